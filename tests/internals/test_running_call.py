"""Whether a call has ended is known from another thread, while the call's own thread runs."""

import sys
import threading

import keras
import numpy as np
import pytest

from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tfparallel.internals.keras_trainer import running_fit
from tfparallel.internals.running_call import RunningCall


def test_a_call_runs_until_it_returns():
    def called():
        call, again = (RunningCall(sys._getframe(level)) for level in (1, 1))
        assert call.is_running() and call == again
        return call

    first, second = called(), called()
    assert not first.is_running() and first != second


def test_a_call_that_has_raised_has_ended_though_its_traceback_is_kept():
    calls = []

    def raises():
        calls.append(RunningCall(sys._getframe()))
        raise ValueError("kept")

    with pytest.raises(ValueError, match="kept") as kept:
        raises()
    assert not calls[0].is_running()
    assert kept.traceback[-1].name == "raises"


def test_another_thread_asks_while_the_call_goes_deep_and_back():
    """As often as it can: Python crashes where it walks such a stack."""
    done, answers = threading.Event(), []

    def ask(call):
        while not done.is_set():
            answers.append(call.is_running())

    def deep(level):
        return sum(deep(level - 1) for _ in range(2)) if level else 1

    def called():
        call = RunningCall(sys._getframe())
        thread = threading.Thread(target=ask, args=(call,))
        thread.start()
        deep(16)
        done.set()
        thread.join()
        return call

    assert not called().is_running()
    assert answers and all(answers)


def test_fit_runs_until_it_ends():
    class Asks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.call = running_fit(self.model)

        def on_train_end(self, logs=None):
            self.ran = self.call.is_running()

    keras.utils.set_random_seed(1)
    model, asks = tiny_model(), Asks()
    model.compile("sgd", **tiny_compile_options())
    assert running_fit(model) is None
    model.fit(*tiny_data(8), epochs=1, verbose=0, callbacks=[asks])
    assert asks.ran and not asks.call.is_running()
    assert np.isfinite(model.get_weights()[0]).all()
