"""Batches that are on the devices before their steps change nothing but when they are copied."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests import helpers
from tfparallel.callbacks import Measure
from tfparallel.callbacks.fit_clock import Traces
from tfparallel.replicas import batches_ahead
from tfparallel.replicas.batches_ahead import BatchesAhead, batches_ahead_by_default
from tfparallel.replicas.placed_batch import BatchPlacement, can_be_placed

pytestmark = pytest.mark.turns

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
STRATEGIES = {
    "mirrored": lambda **kw: tfparallel.MirroredStrategy(DEVICES, **kw),
    "one_device": lambda **kw: tfparallel.OneDeviceStrategy("CPU:1", **kw),
    "central_storage": lambda **kw: tfparallel.CentralStorageStrategy(DEVICES, "CPU:0", **kw),
    "sharded": lambda **kw: tfparallel.ShardedStrategy(DEVICES, min_size=1, **kw),
    "hybrid": lambda **kw: tfparallel.HybridStrategy({"data": 2, "shard": 2}, **kw),
}


def trained(strategy, steps=1, **options):
    """33 rows in batches of 7: the last is smaller; with what `predict` gives of 5 rows by 2."""

    def compile_options():
        return {**helpers.tiny_compile_options(), "steps_per_execution": steps}

    options = {"rows": 33, "batch_size": 7, "validation_split": 0.1, **options}
    with helpers.in_float64():
        training = helpers.train(strategy, compile_options=compile_options, **options)
        predicted = training.model.predict(helpers.tiny_data(5)[0], batch_size=2, verbose=0)
    return {**training.results(), "predicted": predicted}


LONG = {"central_storage", "sharded", "hybrid"}  # they differ in what is computed, not in batches


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.long if name in LONG else ())
        for name, make in STRATEGIES.items()
    ],
)
def test_a_training_ends_as_on_one_device_whose_batches_nobody_reads_ahead(make):
    helpers.assert_same_training(trained(None), trained(make(prefetch_batches=2)), 1e-9)


@pytest.mark.parametrize("steps", [2, 3])
def test_several_steps_an_execution_end_with_the_data(steps):
    """Of 5 batches, 2 at once: the last execution has one step."""
    strategy = STRATEGIES["mirrored"](prefetch_batches=1)
    helpers.assert_same_training(trained(None, steps), trained(strategy, steps), 1e-9)


def compiled_under(strategy):
    with strategy.scope():
        model = helpers.tiny_model()
        model.compile(helpers.momentum_sgd(), **helpers.tiny_compile_options())
    return model


def test_parts_are_on_their_devices_before_the_step_which_is_traced_once(monkeypatch):
    """Also for a last batch of fewer rows than replicas."""
    placed, place = [], BatchPlacement.place
    monkeypatch.setattr(
        BatchPlacement, "place", lambda *args: placed.append(place(*args)) or placed[-1]
    )
    traces = []

    class Counted(keras.Sequential):
        def train_step(self, data):
            traces.append(data)
            return super().train_step(data)

    with STRATEGIES["mirrored"](prefetch_batches=2).scope():
        model = Counted([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", **helpers.tiny_compile_options())
    x, y = helpers.tiny_data(20)
    model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    assert len(traces) <= 2 * len(DEVICES)  # TensorFlow traces twice where variables are created
    assert 1 <= Traces(model)() <= 2  # as whoever measures a training counts them
    rows = [[len(part[0]) for part in batch.parts] for batch in placed]
    assert rows == 2 * [[2, 2, 2], [2, 2, 2], [2, 2, 2], [1, 1, 0]]
    for batch in placed:
        devices = [[tensor.device[-5:] for tensor in part] for part in batch.parts]
        assert devices == [[device, device] for device in DEVICES]
    together = np.concatenate([part[0] for batch in placed[:4] for part in batch.parts])
    np.testing.assert_array_equal(together, x)


class Source:
    """Numbers; notes when each is read. `wrong` raises."""

    def __init__(self, end, wrong=()):
        self.read, self._end, self._wrong = [], end, wrong

    def __next__(self):
        number = len(self.read)
        self.read.append(number)
        if number in self._wrong:
            raise tf.errors.DataLossError(None, None, f"batch {number} is broken")
        if number >= self._end:
            raise StopIteration
        return number


def test_batches_are_read_in_order_and_no_further_ahead_than_asked():
    source = Source(7)
    ahead = BatchesAhead(source, lambda batch: batch * 10, 2)
    assert source.read == []  # before the first step nothing is read
    for number in range(7):
        assert next(ahead) == number * 10
        assert ahead.is_whole()  # waits
        assert source.read == list(range(min(number + 3, 8)))  # number 7 was the end
        assert ahead.not_taken() == list(range(number + 1, min(number + 3, 7)))
    with pytest.raises(StopIteration):
        next(ahead)
    with pytest.raises(tf.errors.OutOfRangeError):
        next(iter(ahead))  # as Keras asks where an execution begins


def test_the_next_batch_is_placed_while_the_step_before_runs():
    placed = threading.Event()

    def place(batch):
        if batch == 1:
            placed.set()
        return batch

    ahead = BatchesAhead(Source(3), place, 1)
    assert next(ahead) == 0
    assert placed.wait(20)  # nobody has asked for it yet


def test_no_batch_is_read_that_keras_would_not_ask_for():
    source = Source(9)
    ahead = BatchesAhead(source, lambda batch: batch, 3, most=4)
    assert [next(ahead) for _ in range(4)] == [0, 1, 2, 3]
    assert ahead.is_whole() and source.read == [0, 1, 2, 3]


@pytest.mark.parametrize(("steps", "asked"), [(1, 10), (2, 12)])
def test_fit_does_not_read_behind_the_batches_of_an_epoch(monkeypatch, steps, asked):
    """As without reading ahead: what comes at the end of the data (a cache is whole) does not.

    With two steps an execution Keras does ask once after the fifth batch.
    """
    reads, read = [], batches_ahead._read
    monkeypatch.setattr(batches_ahead, "_read", lambda *args: reads.append(1) or read(*args))
    model = compiled_under(STRATEGIES["mirrored"](prefetch_batches=3))
    model.steps_per_execution = steps
    model.fit(*helpers.tiny_data(10), batch_size=2, epochs=2, verbose=0)
    assert len(reads) == asked


def test_an_error_in_the_data_comes_at_its_step():
    ahead = BatchesAhead(Source(9, wrong=[2]), lambda batch: batch, 3)
    assert [next(ahead), next(ahead)] == [0, 1]
    assert not ahead.is_whole()
    with pytest.raises(tf.errors.DataLossError, match="batch 2 is broken"):
        next(ahead)


def test_fit_ends_with_the_error_of_a_dataset_after_the_steps_before_it():
    def broken(i, row, label):
        is_well = tf.debugging.assert_less(i, tf.constant(8, i.dtype), "row 8 is broken")
        with tf.control_dependencies([is_well]):
            return tf.identity(row), label

    x, y = helpers.tiny_data(12)
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(12), x, y)).map(broken).batch(2)
    model = compiled_under(STRATEGIES["mirrored"](prefetch_batches=2))
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 8 is broken"):
        model.fit(dataset, verbose=0, callbacks=[count])
    assert steps == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_measured_training_ends_with_data_of_unknown_length(steps):
    x, y = helpers.tiny_data(10)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2).filter(lambda x, y: True)
    model = compiled_under(STRATEGIES["one_device"](prefetch_batches=2))
    model.steps_per_execution = steps
    counted = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: counted.append(batch)
    )
    model.fit(dataset, epochs=2, verbose=0, callbacks=[Measure(verbose=0), count])
    assert model.optimizer.iterations == 10 and len(counted) == 2 * -(-5 // steps)


def test_gpus_read_ahead_by_themselves_and_nothing_else_does():
    assert batches_ahead_by_default(["/device:GPU:0", "/job:worker/task:1/device:GPU:1"]) == 2
    assert batches_ahead_by_default(["/device:CPU:0", "/device:GPU:0"]) == 0


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ((tf.TensorSpec([None, 3]), tf.TensorSpec([])), True),
        ((tf.TensorSpec([4, 3]), None), True),
        (tf.TensorSpec([]), False),  # no rows
        (tf.TensorSpec(None), False),
        (tf.TensorSpec([None], tf.string), False),
        (tf.RaggedTensorSpec([None, None]), False),
        (tf.SparseTensorSpec([None, 3]), False),
    ],
)
def test_dense_tensors_with_rows_can_be_placed(spec, expected):
    assert can_be_placed(spec) == expected


def test_scalars_and_nothing_go_to_every_replica():
    strategy = STRATEGIES["mirrored"](prefetch_batches=2)
    spec = {"x": tf.TensorSpec([7, 2]), "scale": tf.TensorSpec([]), "none": None}
    batch = {"x": tf.reshape(tf.range(14.0), [7, 2]), "scale": tf.constant(3.0), "none": None}
    placed = BatchPlacement(strategy.extended, spec).place(batch)
    assert placed.total == 7  # known before there is a batch
    assert [part["x"].shape for part in placed.parts] == [(3, 2), (2, 2), (2, 2)]
    assert all(part["none"] is None and part["scale"] == 3.0 for part in placed.parts)


def test_what_is_not_placed_is_said_and_trained_on(caplog):
    data = tf.data.Dataset.from_tensor_slices((["a", "b", "c", "d"], [1.0, 2.0, 3.0, 4.0])).batch(2)
    with STRATEGIES["one_device"](prefetch_batches=1).scope():
        words = keras.layers.TextVectorization(output_sequence_length=1, vocabulary=["a", "b"])
        layers = [keras.Input((), dtype="string"), words, keras.layers.Embedding(4, 2)]
        model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(data, verbose=0)
    assert "prefetch_batches=1 for a dataset of" in caplog.text


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="prefetch_batches.*Received: -1"):
        tfparallel.MirroredStrategy(prefetch_batches=-1)


def test_a_strategy_of_stages_refuses_what_it_would_not_do():
    with pytest.raises(ValueError, match="is for replicas that each have one device"):
        tfparallel.HybridStrategy({"pipeline": 2, "data": 2}, prefetch_batches=2)
