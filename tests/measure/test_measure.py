"""The callback within `fit`: what it tells is true, and it changes nothing."""

import contextlib
import json
import os
import subprocess
import sys
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tests.launch.jobs import ROOT
from tfparallel.callbacks import BackupAndRestore, Measure
from tfparallel.callbacks.fit_clock import Traces
from tfparallel.measure.input_wait import InputWait
from tfparallel.measure.reading import read_records
from tfparallel.measure.shares import CATEGORIES

pytestmark = pytest.mark.turns

STRATEGIES = {
    "none": lambda: None,
    "one_device": lambda: tfparallel.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: tfparallel.MirroredStrategy(2),
    "pipeline": lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=4),
}


def compiled(strategy=None, **options):
    keras.utils.set_random_seed(7)
    with keras.name_scope("") if strategy is None else strategy.scope():
        model = tiny_model()
        model.compile("sgd", **tiny_compile_options(), **options)
    return model


def slow(seconds):
    """A pipeline of 8 batches of 4 rows that takes `seconds` a batch, in one thread."""
    x, y = tiny_data(32)

    def pause(rows):
        time.sleep(seconds)
        return rows

    @tf.autograph.experimental.do_not_convert
    def paused(rows, classes):
        return tf.ensure_shape(tf.numpy_function(pause, [rows], tf.float32), rows.shape), classes

    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)
    return dataset.map(paused).with_options(options)


class Sleeper(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


def assert_sums_up(record):
    assert tuple(record.seconds) == CATEGORIES
    assert sum(record.seconds.values()) == pytest.approx(record.wall_s, rel=5e-3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_changes_no_bit(name):
    """Nor the order of random numbers: rows are shuffled."""
    weights = []
    for callbacks in ([], [Measure(verbose=0)]):
        model = compiled(STRATEGIES[name]())
        model.fit(*tiny_data(22), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    for without, measured in zip(*weights, strict=True):
        np.testing.assert_array_equal(without, measured)


@pytest.mark.parametrize("is_divided_before", [False, True])
def test_the_slowest_stage_of_a_partition_by_patterns_is_told(is_divided_before):
    """One layer of the second stage has 4,000 times the products of the first one's."""
    strategy = tfparallel.PipelineStrategy(
        ["CPU:0", "CPU:1"], num_microbatches=4, partition=[["small"], ["large*"]]
    )
    with strategy.scope():
        widths = {"small": 4, "large_1": 2000, "large_2": 2000, "large_3": 1}
        layers = [keras.layers.Dense(width, name=name) for name, width in widths.items()]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("sgd", "mse")
    x, y = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
    if is_divided_before:
        model.fit(x, y, verbose=0)
    measure = Measure(verbose=0)
    model.fit(x, y, verbose=0, callbacks=[measure])
    assert measure.records[0].details["slowest"].startswith("stage 1, ")
    assert measure.records[0].seconds["imbalance"] > 0


def test_rows_per_second_are_rows_over_time():
    """The last batch of 22 rows is smaller; rows are counted where they come out."""
    measure = Measure(verbose=0)
    started = time.perf_counter()
    compiled().fit(*tiny_data(22), batch_size=4, epochs=3, verbose=0, callbacks=[measure])
    outside_s = time.perf_counter() - started
    assert [each.rows for each in measure.records] == [22] * 3
    assert [each.steps for each in measure.records] == [6] * 3
    assert measure.total.rows == 66
    assert measure.total.rows_per_s == pytest.approx(66 / measure.total.wall_s)
    assert measure.total.wall_s <= outside_s
    for record in [*measure.records, measure.total]:
        assert_sums_up(record)


def test_waiting_for_data_is_measured_at_the_iterator():
    measure = Measure(verbose=0)
    model = compiled()
    model.fit(slow(0.0), verbose=0)  # traces
    model.fit(slow(0.1), verbose=0, callbacks=[measure])
    assert 0.7 <= measure.total.seconds["input"] <= measure.total.wall_s  # 8 pauses; load adds
    assert measure.total.share("input") == max(measure.total.shares.values())
    assert measure.verdict.cause == "input: map"
    assert "num_parallel_calls" in measure.verdict.text


def test_a_pipeline_that_is_ahead_is_not_waited_for():
    """The clock is on the side of the step: nothing runs ahead of it."""
    wait = InputWait()
    iterator = wait.around(iter(tf.data.Dataset.range(64).batch(4)))
    next(iterator)
    time.sleep(0.2)
    assert wait.rows == 4
    assert wait.waited_s < 0.2


def test_data_that_end_by_themselves():
    """Of unknown length: the step that finds nothing is none."""
    measure = Measure(verbose=0)
    data = slow(0.0).filter(lambda x, y: True)
    compiled().fit(data, epochs=2, verbose=0, callbacks=[measure])
    assert [each.steps for each in measure.records] == [8, 8]
    assert [each.rows for each in measure.records] == [32, 32]


def test_a_callback_that_sleeps_is_named():
    measure = Measure(verbose=0)
    model = compiled()
    model.fit(*tiny_data(32), batch_size=4, verbose=0)
    model.fit(*tiny_data(32), batch_size=4, verbose=0, callbacks=[Sleeper(), measure])
    assert 0.4 <= measure.total.details["callbacks_s"]["Sleeper"] <= measure.total.wall_s
    assert measure.verdict.cause == "host: callback Sleeper"
    assert "Sleeper" in measure.verdict.text


def test_the_first_trace_is_told_apart():
    measure = Measure(verbose=0)
    model = compiled()
    model.fit(*tiny_data(32), batch_size=4, epochs=2, verbose=0, callbacks=[measure])
    first, second = measure.records
    assert first.details["traces"] == 1 and second.details["traces"] == 0
    assert first.seconds["tracing"] > 0 == second.seconds["tracing"]


def test_a_step_that_is_made_anew_each_time_is_traced_each_time():
    """Each function that Keras makes counts its own traces only."""

    class MakesAnew(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.make_train_function(force=True)

    measure = Measure(verbose=0)
    model = compiled()
    model.fit(*tiny_data(32), batch_size=4, verbose=0, callbacks=[MakesAnew(), measure])
    assert measure.total.details["traces"] == measure.total.steps == 8


def test_traces_of_functions_that_take_turns_are_counted_once():
    """Those before a function was looked at for the first time count, too."""
    model = types.SimpleNamespace(train_function=None)
    one, other = (tf.function(lambda x: x + 1, autograph=False) for _ in range(2))
    traces, told = Traces(model), []
    one(1.0)
    for function, argument in ((one, 2.0), (other, 1.0), (one, 1.0), (other, 3.0), (None, 0.0)):
        if function is not None:
            function(argument)
        model.train_function = function
        told.append(traces())
    assert told == [2, 3, 3, 4, 4]


def test_saving_is_told_apart_and_a_resumed_run_is_measured(tmp_path):
    x, y = tiny_data(32)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    for stopping in ([Stop()], []):
        model = compiled()
        measure = Measure(verbose=0)
        backup = BackupAndRestore(tmp_path, save_freq=2, delete_on_success=False)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(x, y, batch_size=4, verbose=0, callbacks=[measure, backup, *stopping])
    assert measure.total.seconds["saving"] > 0
    assert (measure.total.steps, measure.total.rows) == (4, 16)  # the last save was at step 4
    assert_sums_up(measure.total)


def test_what_is_written(tmp_path):
    measure = Measure(tmp_path, verbose=0)
    compiled().fit(*tiny_data(12), batch_size=4, epochs=2, verbose=0, callbacks=[measure])
    lines = read_records(tmp_path)
    assert [line["epoch"] for line in lines] == [0, 1, None]
    assert lines[0]["shares"] == measure.records[0].shares
    assert lines[-1]["cause"] == measure.verdict.cause
    events = [path for path in tmp_path.iterdir() if "tfevents" in path.name]
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events[0]))
        for value in event.summary.value
    }
    assert {"measure/share/input", "measure/samples_per_s", "measure/step_ms/median"} <= tags
    with (tmp_path / "measure.jsonl").open("a") as file:
        file.write('{"epoch": 2, "st')  # killed while it was writing
    assert len(read_records(tmp_path)) == 3
    assert json.dumps(lines)


def test_without_tensorboard_the_rest_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # importing it fails
    compiled().fit(*tiny_data(12), epochs=1, verbose=0, callbacks=[Measure(tmp_path, verbose=0)])
    assert [line["epoch"] for line in read_records(tmp_path)] == [0, None]
    assert not [path for path in tmp_path.iterdir() if "tfevents" in path.name]


def test_a_screen_for_each_epoch_and_one_for_all(capsys):
    measure = Measure(one_device_rows_per_s=1e-3)
    compiled().fit(*tiny_data(12), batch_size=4, epochs=2, verbose=0, callbacks=[measure])
    told = capsys.readouterr().out
    assert "epoch 1: 3 steps" in told and "epoch 2: 3 steps" in told and "training: 6" in told
    assert "speed-up" in told and "of 1, efficiency" in told
    assert measure.verdict.text.split()[0] in told


ENDLESS = """
import time
import keras, numpy as np
from tfparallel.callbacks import Measure

def endless():
    while True:
        time.sleep(0.05)
        yield np.ones((4, 4), "float32"), np.ones((4, 1), "float32")

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(endless(), steps_per_epoch=5, verbose=0, callbacks=[Measure(verbose=0)])
print("trained")
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_interpreter_ends_though_data_do_not():
    """It waits for the threads of iterators that are still there, and those wait for it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"}
    command = [sys.executable, "-c", ENDLESS]
    told = subprocess.check_output(command, env=environment, text=True, timeout=180)
    assert told.split()[-1] == "trained"


@pytest.mark.parametrize(
    "arguments", [{"verbose": 3}, {"one_device_rows_per_s": 0}, {"peak_flops_per_s": -1.0}]
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Measure(**arguments)


def test_it_needs_fit():
    measure = Measure()
    measure.set_model(compiled())
    with pytest.raises(ValueError, match=r"Model\.fit"):
        measure.on_train_begin()


@pytest.mark.parametrize("name", ["none", "mirrored", "pipeline"])
def test_model_flops_utilisation(name, capsys):
    """Two products of [rows, 6] and [rows, 8], forward and backward, over time and a given peak."""
    measure = Measure(verbose=1, peak_flops_per_s=1e9)
    compiled(STRATEGIES[name]()).fit(
        *tiny_data(24), batch_size=12, epochs=2, verbose=0, callbacks=[measure]
    )
    of_a_row = 2 * (2 * 6 * 8 + 3 * 8 * 3)
    expected = of_a_row * 48 / measure.total.wall_s
    assert measure.total.flops_per_s == pytest.approx(expected)
    assert measure.total.mfu == pytest.approx(expected / 1e9)
    assert "MFU" in capsys.readouterr().out


def test_a_peak_that_is_measured():
    measure = Measure(verbose=0, peak_flops_per_s="measure")
    compiled().fit(*tiny_data(12), batch_size=4, verbose=0, callbacks=[measure])
    assert 0 < measure.total.mfu < 1


@pytest.mark.parametrize("name", ["none", "mirrored", "pipeline"])
def test_one_device_is_measured_on_request(name, capsys):
    """Beside the training, of which no bit changes."""
    weights = []
    for alone in (None, "measure"):
        measure = Measure(verbose=1, one_device_rows_per_s=alone)
        model = compiled(STRATEGIES[name]())
        model.fit(*tiny_data(24), batch_size=12, epochs=2, verbose=0, callbacks=[measure])
        weights.append(model.get_weights())
        assert ("speed-up" in capsys.readouterr().out) == (alone is not None)
    for without, measured in zip(*weights, strict=True):
        np.testing.assert_array_equal(without, measured)
