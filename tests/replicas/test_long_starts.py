"""What is said of a first step that takes long: decided on given times, and heard from `fit`."""

import logging
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import tiny_model
from tfparallel.coordination.waiting import Clock
from tfparallel.replicas import long_starts
from tfparallel.replicas.long_starts import LongStart

pytestmark = pytest.mark.turns

X, Y = np.ones((8, 6), "float32"), np.zeros(8)


def said(start: LongStart, times) -> list[tuple[float, str]]:
    looked = [(now_s, start.look(now_s)) for now_s in times]
    return [(now_s, text) for now_s, text in looked if text is not None]


def test_a_start_of_less_than_15_seconds_is_not_spoken_of():
    start = LongStart("train_step", 100.0)
    assert said(start, range(100, 108)) == []
    start.is_traced(108.0)
    assert said(start, range(108, 115)) == []
    assert start.last_words(114.9) is None


def test_each_part_is_spoken_of_once_and_the_end_says_what_both_took():
    start = LongStart("train_step of MirroredStrategy for 8 replicas", 100.0)
    ((at_s, text),) = said(start, range(100, 150))
    assert at_s == 115
    assert text.startswith(
        "Tracing train_step of MirroredStrategy for 8 replicas has taken 15 s so far."
    )
    start.is_traced(150.0)
    ((at_s, text),) = said(start, range(150, 300))
    assert at_s == 165
    assert "has been traced, in 50 s. For 15 s TensorFlow has been optimising the graph" in text
    assert "is over after 200 s: 50 s of tracing, 150 s of" in start.last_words(300.0)


def test_parts_that_are_long_together_are_spoken_of_and_a_short_last_one_is_not_again():
    start = LongStart("train_step", 0.0)
    start.is_traced(14.0)
    ((at_s, text),) = said(start, range(14, 30))
    assert at_s == 15 and "traced, in 14 s. For 1 s" in text
    other = LongStart("train_step", 0.0)
    assert len(said(other, range(20))) == 1
    other.is_traced(20.0)
    assert said(other, range(20, 30)) == []
    assert "30 s: 20 s of tracing, 10 s of" in other.last_words(30.0)


@keras.saving.register_keras_serializable("tests")
class Slow(keras.layers.Layer):
    """Takes its time whenever it is traced, and whenever it runs in a graph."""

    def __init__(self, traces_s: float = 0.0, runs_s: float = 0.0, **options):
        super().__init__(**options)
        self.traces_s, self.runs_s = traces_s, runs_s

    def call(self, x):
        if tf.inside_function():
            time.sleep(self.traces_s)
        zero = tf.numpy_function(self._run, [x], x.dtype)
        return x + tf.stop_gradient(tf.ensure_shape(zero, x.shape))

    def _run(self, x):
        time.sleep(self.runs_s)
        return np.zeros_like(x)


@pytest.fixture
def heard(monkeypatch):
    """What the chief of a strategy hears, with 0.3 s in the place of 15 s."""
    texts: list[str] = []

    def hear(level, text):
        assert level == logging.INFO
        texts.append(text)

    clock = Clock(say=hear)
    original = long_starts.spoken_of
    monkeypatch.setattr(
        "tfparallel.replicas.base.spoken_of",
        lambda strategy, function: original(strategy, function, clock, 0.3),
    )
    return texts


def wait_until_nothing_is_watched():
    for thread in threading.enumerate():
        if thread.name == "tfparallel-long-start":
            thread.join(10)
    assert long_starts._watched == []


def fit(**slow):
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = tiny_model()
        model.add(Slow(**slow))
        model.compile("sgd", "mse")
    model.fit(X, np.zeros((8, 3)), batch_size=8, verbose=0)
    wait_until_nothing_is_watched()


def test_a_step_that_is_traced_for_long_says_so_and_when_it_is_over(heard):
    fit(traces_s=0.4)
    first, *_, last = [text for text in heard if "train_step" in text]
    assert first.startswith("Tracing train_step of MirroredStrategy for 2 replicas has taken")
    assert last.startswith("The first call of train_step of MirroredStrategy for 2 replicas is")


def test_a_graph_whose_first_run_takes_long_says_so_and_only_the_first(heard):
    fit(runs_s=1.5)
    text, last = heard[-2:]
    assert "optimising the graph, and running it for the first time" in text
    assert last.startswith("The first call of train_step")


def test_a_custom_loop_is_spoken_of_by_the_name_of_its_function(heard):
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])

    def my_step():
        time.sleep(0.4)
        return tf.constant(1.0)

    train = tf.function(lambda: strategy.run(my_step))
    for _ in range(2):  # the second is traced no more
        train()
    wait_until_nothing_is_watched()
    assert heard[0].startswith("Tracing my_step of MirroredStrategy for 2 replicas has taken")
    assert [text.startswith("The first call of my_step") for text in heard].count(True) == 1
    assert "The first call of my_step" in heard[-1]


def test_a_step_that_fails_leaves_the_word_to_its_error(heard):
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])

    def my_step():
        time.sleep(0.5)
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        tf.function(lambda: strategy.run(my_step))()
    wait_until_nothing_is_watched()
    (text,) = heard
    assert text.startswith("Tracing my_step")


def test_a_short_start_says_nothing(caplog):
    caplog.set_level(logging.INFO, "tensorflow.tfparallel")
    fit()
    (what,) = caplog.messages
    assert what.startswith("MirroredStrategy(")
