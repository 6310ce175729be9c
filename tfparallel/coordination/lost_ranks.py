"""Which rank has ended first, where all others end because of it.

Horovod tells a rank that its collective has failed, and not whose fault it is. But ranks share a
store, in which a rank is there while its process runs. Who fails because of another says so there
before it ends: a rank that has left without having said so is the one. Where none has left, one may
be stopped: then what it tells of its progress (`stall_watch.py`) does not change.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import tensorflow as tf

from tfparallel.coordination.agreement import Agreement, PeerEndedError
from tfparallel.coordination.stall_watch import progress_key
from tfparallel.coordination.store import RankHasEnded

_LOOKS_S = 5.0  # for one that has ended; the system closes its connections at once
_SILENT_S = 10.0  # a rank tells its progress more often
_STAYS_S = 20.0  # rank 0, which keeps the store, until the others have looked
_POLL_S = 0.1

T = TypeVar("T")


class RankLostError(ConnectionError):
    """A rank that the others trained with has ended, or does not run; the message names it."""


@contextlib.contextmanager
def names_lost_ranks(agreement: Agreement, sign: str) -> Iterator[None]:
    """Within it, errors of TensorFlow that hold `sign` become `RankLostError`, if a rank has ended.

    Args:
        agreement: of the ranks, on a `TcpStore`.
        sign: what tells errors of the transport from others: "Horovod".
    """
    try:
        yield
    except (tf.errors.OpError, ConnectionError, PeerEndedError) as error:
        if isinstance(error, tf.errors.OpError) and sign not in error.message:
            raise
        if isinstance(error, (RankLostError, PeerEndedError)) or not (lost := _lost(agreement)):
            raise
        raise lost_rank_error(agreement, lost) from error


def who_ended_before(agreement: Agreement) -> str:
    """For a rank that is about to end, and may be the first: who was, and all others know it then.

    "" where it is the first itself: nothing is said to the others, which name it.
    """
    try:
        lost = _until(lambda: _ended_first(agreement, _others(agreement)), _LOOKS_S)
        if lost:
            agreement.store.put(_key(agreement, "fails", agreement.rank), "yes")
            agreement.store.put(_found(agreement), lost)
    except ConnectionError as error:
        return str(error)
    return lost


def has_been_found(agreement: Agreement, limit_s: float) -> str:
    """What `who_ended_before` gives on the first rank where it does, within a time; else ""."""
    try:
        return agreement.store.get(_found(agreement), limit_s)
    except TimeoutError:
        return ""


def say_looked(agreement: Agreement) -> None:
    """This rank knows, and says so; rank 0, which keeps the store, waits until all others do."""
    with contextlib.suppress(ConnectionError):
        _stay(agreement)


def lost_rank_error(agreement: Agreement, lost: str) -> RankLostError:
    """The error of a rank that knows who is `lost`."""
    return RankLostError(
        f"Expected all ranks to live as long as the training. Received: {lost} (Rank "
        f"{agreement.rank} is speaking.)"
    )


def _found(agreement: Agreement) -> str:
    return f"tfparallel/{agreement.name}/found"


def _others(agreement: Agreement) -> list[int]:
    return [rank for rank in range(agreement.num_workers) if rank != agreement.rank]


def _lost(agreement: Agreement) -> str:
    """The ranks that have ended first or do not run, in a sentence; "" if all are there."""
    others = _others(agreement)
    try:
        agreement.store.put(_key(agreement, "fails", agreement.rank), "yes")
        lost = _until(lambda: _ended_first(agreement, others), _LOOKS_S)
        lost = lost or _silent(agreement, others)
        _stay(agreement)
    except ConnectionError as error:
        return str(error)
    return lost


def _stay(agreement: Agreement) -> None:
    """Says that this rank has looked; rank 0, which keeps the store, waits for the others."""
    agreement.store.put(_key(agreement, "looked", agreement.rank), "yes")
    if agreement.rank == 0:
        others = _others(agreement)
        _until(lambda: all(_needs_no_store(agreement, rank) for rank in others), _STAYS_S)


def _ended_first(agreement: Agreement, others: list[int]) -> str:
    ended = [r for r in others if _has_left(agreement, r) and not _has(agreement, "fails", r)]
    return f"{_named(agreement, ended)} has ended, its own log says why." if ended else ""


def _silent(agreement: Agreement, others: list[int]) -> str:
    before = {rank: _value(agreement, progress_key(rank)) for rank in others}
    time.sleep(_SILENT_S)
    silent = [r for r in others if before[r] and before[r] == _value(agreement, progress_key(r))]
    what = f"does not run: it has been silent for {_SILENT_S:g} s."
    return f"{_named(agreement, silent)} {what}" if silent else ""


def _named(agreement: Agreement, ranks: list[int]) -> str:
    return ", ".join(f"rank {rank} ({agreement.store.describe(rank)})" for rank in ranks)


def _needs_no_store(agreement: Agreement, rank: int) -> bool:
    return _has(agreement, "looked", rank) or _has_left(agreement, rank)


def _has_left(agreement: Agreement, rank: int) -> bool:
    try:
        agreement.store.require_alive(rank)
    except RankHasEnded:
        return True
    return False


def _has(agreement: Agreement, what: str, rank: int) -> bool:
    return bool(_value(agreement, _key(agreement, what, rank)))


def _value(agreement: Agreement, key: str) -> str:
    try:
        return agreement.store.get(key, 0.0)
    except TimeoutError:
        return ""


def _key(agreement: Agreement, what: str, rank: int) -> str:
    return f"tfparallel/{agreement.name}/{what}/{rank}"


def _until(condition: Callable[[], T], limit_s: float) -> T:
    """What `condition` gives when it is true, or at last."""
    deadline_s = time.monotonic() + limit_s
    while not (result := condition()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return result
