"""What is said of a strategy once: what it is made of, when it is there, and if nobody used it."""

import atexit
import logging
import os
import sys

import tensorflow as tf

from tfparallel.coordination.scheduler import lonely_warning
from tfparallel.coordination.waiting import say

_unused: dict[int, str] = {}  # descriptions of strategies that nobody has entered, by identity
_warned: list[str] = []  # what is said once in a process


def say_of(strategy: tf.distribute.Strategy) -> None:
    """Says what a strategy that is about to be ready is made of, on the chief; warns if alone."""
    if not strategy.is_chief:
        return
    say(logging.INFO, f"{strategy!r}")
    if len(_devices(strategy)) > 1 or strategy.num_replicas_in_sync > 1:
        _unused[id(strategy)] = repr(strategy)
    if strategy.num_workers == 1 and not os.environ.get("TF_CONFIG"):
        _say_once(lonely_warning(os.environ, type(strategy).__name__))


def is_used(strategy: tf.distribute.Strategy) -> None:
    """Somebody has entered its scope, or has run something on its replicas."""
    _unused.pop(id(strategy), None)


def _devices(strategy: tf.distribute.Strategy) -> set[str]:
    return {*strategy.extended.worker_devices, *strategy.extended.parameter_devices}


def _say_once(text: str | None) -> None:
    if text is not None and not _warned:
        _warned.append(text)
        say(logging.WARNING, text)


@atexit.register
def _tell_of_unused() -> None:
    if hasattr(sys, "last_value"):  # the program failed: that is what its user reads
        return
    logging.raiseExceptions = False  # the stream of a handler may be closed by now
    for described in dict.fromkeys(_unused.values()):
        say(
            logging.WARNING,
            f"{described} was not used: nothing was built in `with strategy.scope():`, so what was "
            "trained was trained without it. Build and compile the model there.",
        )
