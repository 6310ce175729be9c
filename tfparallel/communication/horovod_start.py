"""Horovod's start, and the groups of ranks that it has: the only file that imports horovod."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from tfparallel.coordination.rank_meeting import meet_ranks
from tfparallel.coordination.waited import waiting_for_others

try:
    import horovod.tensorflow as hvd
    from horovod.common.elastic import State
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from horovod.tensorflow.elastic import run as run_elastic
except ImportError as error:
    raise ImportError(
        "HorovodStrategy needs Horovod, built for the installed TensorFlow: run `pip install "
        "'tfparallel[horovod]'` and then, once, `python -m tfparallel.build_horovod`; it takes a "
        "few minutes."
    ) from error

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ProcessSet",
    "State",
    "hvd",
    "num_ranks",
    "process_sets",
    "run_elastic",
    "start",
]

# By horovodrun, Open MPI, MPICH.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_process_sets: dict[tuple[int, ...], Any] = {}  # that Horovod has started with, by their ranks
_HOROVODS_FUSION_BYTES = 128 << 20  # its default


@runtime_checkable
class ProcessSet(Protocol):
    """What is asked of a `hvd.ProcessSet`."""

    ranks: Sequence[int] | None  # None: all

    def size(self) -> int:
        """How many ranks."""

    def rank(self) -> int:
        """The number of this one among them."""

    def included(self) -> bool:
        """Whether this rank is one of them."""


def start(
    hierarchical: bool,
    bucket_bytes: int,
    limit_s: float | None,
    groups: Callable[[int], Iterable[Sequence[int]]] | None = None,
) -> None:
    """Starts Horovod in this process, unless it runs already.

    Args:
        hierarchical: reduce within each host first; read by Horovod when it starts.
        bucket_bytes: Horovod joins no tensors to more than that, unless it was told a number or
            finds it by itself. By default, it makes one reduction of all buckets that are ready:
            their tensors are copied in and out, and no weight is updated before the last arrives.
        limit_s: how long to wait for all ranks to start; None waits for ever.
        groups: gives, of how many ranks there are, those of `process_sets` that will be asked for:
            Horovod makes them when it starts.

    Raises:
        WaitedTooLong: naming the ranks that have not started.
        ValueError: if Horovod runs already and was started otherwise.
    """
    variable = "HOROVOD_HIERARCHICAL_ALLREDUCE"
    if hierarchical and os.environ.get(variable) != "1":
        if hvd.is_initialized():
            raise ValueError(
                'reduction="hierarchical" must be known before Horovod starts. Received: a running '
                f"Horovod. Create the strategy before hvd.init(), or set {variable}=1."
            )
        os.environ[variable] = "1"
    if os.environ.get("HOROVOD_AUTOTUNE", "0") == "0":
        threshold = min(bucket_bytes, _HOROVODS_FUSION_BYTES)
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(threshold))
    with waiting_for_others():  # it returns when all ranks have come
        if hvd.is_initialized():
            return
        meet_ranks(os.environ, limit_s)
        _start_with(groups)


def num_ranks() -> tuple[int, int] | None:
    """How many ranks there are, and of this host, without Horovod's start; None if nothing tells.

    The launcher does, but in a job that grows and shrinks.
    """
    if hvd.is_initialized():
        return hvd.size(), hvd.local_size()
    size, local_size = _told(_SIZES), _told(_LOCAL_SIZES)
    if size is None or local_size is None or os.environ.get("HOROVOD_ELASTIC") == "1":
        return None
    return size, local_size


def _told(names: Sequence[str]) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def _start_with(groups: Callable[[int], Iterable[Sequence[int]]] | None) -> None:
    _process_sets.clear()  # those of an earlier start are gone
    size = _told(_SIZES)
    if groups is None:
        hvd.init()
    elif size is None:  # dear: all ranks meet, again and again, to see whether there is a new one
        hvd.init(process_sets="dynamic")
    else:
        sets = [hvd.ProcessSet(list(ranks)) for ranks in groups(size)]
        hvd.init(process_sets=sets)
        _process_sets.update({tuple(each.ranks): each for each in sets})


def process_sets(groups: Iterable[Sequence[int]]) -> list[ProcessSet]:
    """Horovod's process sets of groups of ranks; all ranks ask for all groups, in one order.

    Raises:
        ValueError: if Horovod runs already, without them.
    """
    return [_process_set(list(ranks)) for ranks in groups]


def _process_set(ranks: list[int]) -> ProcessSet:
    known = _process_sets.get(tuple(ranks))
    if known is None:
        known = _process_sets[tuple(ranks)] = _added(ranks)
    return known


def _added(ranks: list[int]) -> ProcessSet:
    try:
        return hvd.add_process_set(ranks)
    except ValueError as error:
        raise ValueError(
            "Horovod makes the groups of ranks that meet by themselves when it starts. Received: a "
            f"running Horovod without one of ranks {ranks}. Create the strategy before hvd.init(), "
            f"or set HOROVOD_DYNAMIC_PROCESS_SETS=1 before. (Rank {hvd.rank()} is speaking.)"
        ) from error
