"""Which lines of TensorFlow's logger are printed: each once."""

import io
import logging
import subprocess
import sys

import pytest
import tensorflow as tf
from absl import logging as absl_logging

from tfparallel.coordination.printed_lines import print_once, without_lines


@pytest.fixture
def terminal(monkeypatch):
    """What is printed, by TensorFlow's logger and by a root logger that begins without handlers."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(tf.get_logger(), "handlers", [logging.StreamHandler(stream)])
    return stream


def log_once_through_absl():
    absl_logging.warning("gives the root logger a handler")


OTHERS = [lambda: None, logging.basicConfig, log_once_through_absl]


@pytest.mark.parametrize("other", OTHERS, ids=["nobody", "basicConfig", "absl"])
def test_a_line_is_printed_once_whoever_else_prints(terminal, other):
    print_once()
    print_once()
    other()
    tf.get_logger().getChild("tfparallel").warning("of ours")
    tf.get_logger().warning("of TensorFlow")
    assert terminal.getvalue().count("of ours") == 1
    assert terminal.getvalue().count("of TensorFlow") == 1


def test_a_line_is_printed_once_beside_the_handler_of_absls_programs():
    code = (
        "from absl import logging; import tensorflow as tf, tfparallel\n"
        "tfparallel.OneDeviceStrategy('CPU:0'); logging.use_absl_handler()\n"
        "tf.get_logger().warning('a warning')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.stdout + ran.stderr).count("a warning") == 1, ran.stderr


def test_a_handler_that_prints_errors_alone_leaves_the_rest_to_tensorflows(terminal):
    print_once()
    logging.basicConfig(level="ERROR")
    logging.root.handlers[0].setLevel("ERROR")
    tf.get_logger().warning("a warning")
    tf.get_logger().error("an error")
    assert terminal.getvalue().count("a warning") == terminal.getvalue().count("an error") == 1


def test_lines_are_left_out_for_a_while(terminal):
    with without_lines("Of no use"):
        tf.get_logger().warning("Of no use here")
        tf.get_logger().warning("of use")
    tf.get_logger().warning("Of no use, later")
    assert terminal.getvalue() == "of use\nOf no use, later\n"
