"""Waiting for others by the rule of `patience.py`: asks, logs and sleeps until they are there."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tensorflow as tf

from tfparallel.coordination.patience import Wait
from tfparallel.coordination.probe import what_answers
from tfparallel.coordination.waited import waiting_for_others

_POLL_S = 0.2


def say(level: int, text: str) -> None:
    """Logs beneath TensorFlow's logger, to its handlers, but from INFO on.

    TensorFlow's own level hides INFO. `logging.getLogger("tensorflow.tfparallel")` sets this one's.
    """
    _logger().log(level, "%s", text)


def _logger() -> logging.Logger:
    logger = tf.get_logger().getChild("tfparallel")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return logger


@dataclass(frozen=True)
class Clock:
    """What waiting needs of the world; a simulation has its own."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[int, str], None] = say


REAL = Clock()


def wait_until_nobody_is_missing(
    missing: Callable[[], str],
    speaker: str,
    what: str,
    limit_s: float | None,
    option: str,
    clock: Clock = REAL,
) -> None:
    """Asks `missing` again and again until it names nobody.

    Args:
        missing: the names of all that have not come yet, "" for nobody.
        speaker, what, limit_s, option: see `Wait`.
        clock: to wait on.

    Raises:
        WaitedTooLong: naming them.
    """
    wait = Wait(speaker, what, limit_s, clock.now_s(), option)
    while whom := missing():
        look(wait, whom, clock)
        clock.sleep(_POLL_S)


def look(wait: Wait, whom: str, clock: Clock = REAL) -> None:
    """`Wait.look` now; logs what it says."""
    if (said := wait.look(clock.now_s(), whom)) is not None:
        clock.say(*said)


def wait_for_tasks(
    addresses: Mapping[str, str],
    limit_s: float | None,
    speaker: str,
    option: str,
    clock: Clock = REAL,
) -> None:
    """Waits until TensorFlow's servers answer at all addresses.

    Args:
        addresses: "host:port" by the task's name, for example "worker 1".
        limit_s, speaker, option: see `Wait`.
        clock: to wait on.

    Raises:
        WaitedTooLong: naming the tasks that are missing, their addresses and what answers there.
    """

    def missing() -> str:
        answers = {task: what_answers(address) for task, address in addresses.items()}
        return ", ".join(
            f"{task} ({addresses[task]}, where {answer})"
            for task, answer in answers.items()
            if answer
        )

    with waiting_for_others(clock.now_s):
        wait_until_nobody_is_missing(missing, speaker, "start", limit_s, option, clock)
