"""A variable in parts reads as the whole, stores a part, and is refused where it can do neither."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import tiny_compile_options, tiny_data, tiny_model, train
from tfparallel.sharded.copies import SharesCopies
from tfparallel.sharded.sharded_variables import KeptWholeVariable, ShardedVariable


def sharded(devices: int = 3, **options):
    options = {"min_size": 1, **options}
    return tfparallel.ShardedStrategy([f"CPU:{i}" for i in range(devices)], **options)


def num_bytes(model, i: int) -> int:
    """Of weights and slots of one number a weight at least, on replica `i`."""
    variables = [*model.trainable_variables, *model.optimizer.variables]
    parts = [v.value.values[i] for v in variables if v.shape.rank]
    return sum(np.prod(part.shape) * part.dtype.size for part in parts)


def wide(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((63,)), keras.layers.Dense(255)])
        model.compile(keras.optimizers.Adam(), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_each_replica_stores_its_share_of_weights_and_slots(devices):
    whole = 3 * 64 * 255 * 4
    model = wide(sharded(devices))
    for i in range(devices):
        assert num_bytes(model, i) <= 1.03 * whole / devices
    assert wide_weights_are_whole(model)


def wide_weights_are_whole(model) -> bool:
    return [w.shape for w in model.get_weights()] == [(63, 255), (255,)]


def test_with_whole_weights_each_replica_stores_its_share_of_the_slots():
    model = wide(sharded(2, shard="optimizer"))
    assert num_bytes(model, 0) <= 1.03 * 64 * 255 * 4 * (1 + 2 / 2)
    kinds = {type(v.value) for v in model.trainable_variables}
    assert kinds == {KeptWholeVariable}


def test_a_replica_stores_a_part_and_reads_the_whole():
    strategy = sharded(2)
    with strategy.scope():
        variable = keras.Variable(np.arange(5, dtype="float32"))
    assert isinstance(variable.value, ShardedVariable)
    assert [part.numpy().tolist() for part in variable.value.values] == [[0, 1, 2], [3, 4, 0]]
    assert variable.numpy().tolist() == [0, 1, 2, 3, 4]
    per_replica = strategy.run(lambda: variable * 2.0)
    for value in strategy.experimental_local_results(per_replica):
        assert value.numpy().tolist() == [0, 2, 4, 6, 8]


def test_what_a_replica_assigns_is_read_whole_by_all():
    strategy = sharded(2)
    with strategy.scope():
        variable = keras.Variable(np.arange(5, dtype="float32"))

    @tf.function
    def run():
        def assign():
            variable.assign(variable + 1.0)
            return tf.identity(variable)

        return strategy.run(assign)

    for value in strategy.experimental_local_results(run()):
        assert value.numpy().tolist() == [1, 2, 3, 4, 5]


def test_scalars_small_and_frozen_weights_stay_whole():
    with sharded(2, min_size=6).scope():
        small = keras.Variable(np.zeros(5, "float32"))
        scalar = keras.Variable(0.0)
        frozen = keras.Variable(np.zeros(9, "float32"), trainable=False)
        large = keras.Variable(np.zeros(6, "float32"))
    assert not any(isinstance(v.value, ShardedVariable) for v in (small, scalar, frozen))
    assert isinstance(large.value, ShardedVariable)


def test_one_device_has_nothing_to_share():
    with sharded(1).scope():
        variable = keras.Variable(np.zeros(9, "float32"))
    assert not isinstance(variable.value, ShardedVariable)


def test_a_read_in_a_function_within_the_step_is_refused():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def build(self, shape):
            self.dense.build(shape)
            self.inner = tf.function(self.dense.__call__)

        def call(self, x):
            return self.inner(x)

    with sharded(2).scope():
        model = Model()
        model.build((None, 6))
        model.compile("sgd", **tiny_compile_options())
    with pytest.raises(NotImplementedError, match=r"Remove the @tf.function"):
        model.fit(*tiny_data(6), verbose=0)


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="`shard` must be one of .* Received: 'weights'"):
        sharded(shard="weights")


def test_no_weight_is_too_small_to_be_one():
    with pytest.raises(ValueError, match="`min_size` must be at least 1"):
        sharded(min_size=0)


@pytest.mark.turns
@pytest.mark.parametrize("loads_under", [2, 3, None])
def test_files_say_nothing_of_the_number_of_shards(tmp_path, loads_under):
    saved = train(sharded(3), optimizer=lambda: keras.optimizers.Adam(0.01)).model
    saved.save(tmp_path / "model.keras")
    checkpoint = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    if loads_under is None:
        loaded, other = keras.models.load_model(tmp_path / "model.keras"), tiny_model()
        other.compile(keras.optimizers.Adam())
        other.optimizer.build(other.trainable_variables)
    else:
        with sharded(loads_under).scope():
            loaded, other = keras.models.load_model(tmp_path / "model.keras"), tiny_model()
            other.compile(keras.optimizers.Adam())
            other.optimizer.build(other.trainable_variables)
    reader = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    reader.read(path).assert_existing_objects_matched()
    for model in (loaded, other):
        pairs = zip(
            [*saved.variables, *saved.optimizer.variables],
            [*model.variables, *model.optimizer.variables],
            strict=True,
        )
        for expected, received in pairs:
            np.testing.assert_array_equal(expected.numpy(), received.numpy())


def test_an_update_leaves_a_copy_that_is_read_in_place_and_nothing_beside_it():
    strategy = sharded(2, shard="optimizer")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(np.ones((4, 3), "float32"), np.ones((4, 2), "float32"))
    for weight in model.trainable_variables:
        for i, copy in enumerate(weight.value.values):
            first, second = np.asarray(copy.read_value()), np.asarray(copy.read_value())
            assert first.ctypes.data == second.ctypes.data
            assert weight.value.component(i)._own.read_value().shape == [0]


def test_updated_weights_of_several_processes_are_gathered_together(monkeypatch):
    gathers = []

    def gather(self, parts):  # as if the other one had the same
        gathers.append(len(parts))
        return [tf.concat([part, part], 0) for part in parts]

    monkeypatch.setattr(SharesCopies, "_num_workers", 2)
    monkeypatch.setattr(SharesCopies, "_gather_over_processes", gather)
    monkeypatch.setattr(SharesCopies, "_scatter_over_processes", lambda self, rows: rows[0])
    with sharded(1, shard="optimizer").scope():
        layers = [keras.layers.Dense(16) for _ in range(8)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(np.zeros((4, 16), "float32"), np.zeros((4, 16), "float32"))
    assert gathers == [16]  # kernels and biases, in one collective
