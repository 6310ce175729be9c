"""Which lines of TensorFlow's logger are printed: each once."""

import contextlib
import io
import logging
import subprocess
import sys

import pytest
import tensorflow as tf
from absl import logging as absl_logging

from tfparallel.coordination.printed_lines import print_once, without_lines


@contextlib.contextmanager
def terminal():
    """What is printed, by TensorFlow's logger and by a root logger that begins without handlers.

    In the test itself: to the root logger's handlers pytest adds its own when a test begins.
    """
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(logging.root, "handlers", [])
        patch.setattr(tf.get_logger(), "handlers", [logging.StreamHandler(stream)])
        yield stream


def log_once_through_absl():
    absl_logging.warning("gives the root logger a handler")


OTHERS = [lambda: None, logging.basicConfig, log_once_through_absl]


@pytest.mark.parametrize("other", OTHERS, ids=["nobody", "basicConfig", "absl"])
def test_a_line_is_printed_once_whoever_else_prints(other):
    with terminal() as printed:
        print_once()
        print_once()
        other()
        tf.get_logger().getChild("tfparallel").warning("of ours")
        tf.get_logger().warning("of TensorFlow")
    assert printed.getvalue().count("of ours") == 1
    assert printed.getvalue().count("of TensorFlow") == 1


@pytest.mark.turns
def test_a_line_is_printed_once_beside_the_handler_of_absls_programs():
    code = (
        "from absl import logging; import tensorflow as tf, tfparallel\n"
        "tfparallel.OneDeviceStrategy('CPU:0'); logging.use_absl_handler()\n"
        "tf.get_logger().warning('a warning')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.stdout + ran.stderr).count("a warning") == 1, ran.stderr


def test_a_handler_that_prints_errors_alone_leaves_the_rest_to_tensorflows():
    with terminal() as printed:
        print_once()
        logging.basicConfig()
        logging.root.handlers[0].setLevel("ERROR")
        tf.get_logger().warning("a warning")
        tf.get_logger().error("an error")
    assert printed.getvalue().count("a warning") == printed.getvalue().count("an error") == 1


def test_lines_are_left_out_for_a_while():
    with terminal() as printed:
        with without_lines("Of no use"):
            tf.get_logger().warning("Of no use here")
            tf.get_logger().warning("of use")
        tf.get_logger().warning("Of no use, later")
    assert printed.getvalue() == "of use\nOf no use, later\n"
