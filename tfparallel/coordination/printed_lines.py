"""What is left out of the lines that TensorFlow's logger prints."""

import contextlib
import logging
import sys
from collections.abc import Iterator

import tensorflow as tf


def print_once() -> None:
    """Has each line printed once, also after the root logger has got a handler of its own.

    TensorFlow's logger prints, and passes on what it has printed. Whoever calls
    `logging.basicConfig`, as absl does for the first line that is logged through it, reads
    everything twice from then on.
    """
    for handler in tf.get_logger().handlers:
        if _is_not_printed_by_root not in handler.filters:
            handler.addFilter(_is_not_printed_by_root)


@contextlib.contextmanager
def without_lines(beginning: str) -> Iterator[None]:
    """Leaves out what TensorFlow says of things that the caller does not use."""

    def is_another(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    tf.get_logger().addFilter(is_another)
    try:
        yield
    finally:
        tf.get_logger().removeFilter(is_another)


def _is_not_printed_by_root(record: logging.LogRecord) -> bool:
    is_passed_on = tf.get_logger().propagate
    return not (is_passed_on and any(_prints(h, record.levelno) for h in logging.root.handlers))


def _prints(handler: logging.Handler, level: int) -> bool:
    stream = getattr(getattr(handler, "python_handler", handler), "stream", None)  # absl's has one
    return stream in (sys.stdout, sys.stderr) and level >= handler.level
