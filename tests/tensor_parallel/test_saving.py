"""Files hold whole tensors: what was trained in parts loads anywhere, and the other way round."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel.layouts import layout_map

pytestmark = pytest.mark.turns

LAYOUT = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}


def _model():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(7, "tanh", name="up"), layers.Dense(3, name="down")]
    )


def _strategy(replicas=1, parts=2):
    return tfparallel.TensorParallelStrategy(layout_map(replicas, parts, LAYOUT))


def _trained(strategy):
    return helpers.train(strategy, _model, optimizer=lambda: keras.optimizers.Adam(0.01)).model


def _variables(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def _assert_same(model, other):
    for one, two in zip(_variables(model), _variables(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_keras_file_loads_without_a_strategy_and_in_other_parts(tmp_path):
    model = _trained(_strategy(1, 2))
    model.save(tmp_path / "model.keras")
    _assert_same(model, keras.models.load_model(tmp_path / "model.keras"))
    with _strategy(2, 2).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    _assert_same(model, loaded)
    kernel = loaded.layers[0].kernel.value
    assert [p.shape.as_list() for p in kernel.parts[1]] == [[6, 4], [6, 3]]
    for copy in kernel.parts:
        np.testing.assert_array_equal(np.concatenate([p.numpy() for p in copy], 1), kernel.numpy())


def test_a_file_of_weights_loads_from_one_device(tmp_path):
    model = _trained(None)
    model.save_weights(tmp_path / "model.weights.h5")
    with _strategy().scope():
        loaded = _model()
    loaded.load_weights(tmp_path / "model.weights.h5")
    for one, two in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("source, target", [(2, None), (None, 2), (2, 3), (3, 2)])
def test_a_checkpoint_restores_in_other_parts(tmp_path, source, target):
    model = _trained(_strategy(1, source) if source else None)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    strategy = _strategy(1, target) if target else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        other = _model()
        other.compile(keras.optimizers.Adam(0.01), **helpers.tiny_compile_options())
        other.optimizer.build(other.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    checkpoint.restore(path).expect_partial()
    _assert_same(model, other)


def test_a_checkpoint_holds_each_variable_once_and_whole(tmp_path):
    model = _trained(_strategy())
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "c"))
    shapes = [tuple(shape) for name, shape in tf.train.list_variables(path) if "VALUE" in name]
    assert shapes.count((6, 7)) == 3 and shapes.count((7, 3)) == 3  # the kernel and two moments


def test_predict_and_set_weights_know_the_whole():
    model = _trained(_strategy())
    weights = [np.full_like(w, 0.1) for w in model.get_weights()]
    model.set_weights(weights)
    x, _ = helpers.tiny_data(5)
    plain = _model()
    plain.set_weights(weights)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-6)


def test_an_exported_model_holds_whole_variables(tmp_path):
    model = _trained(_strategy())
    x, _ = helpers.tiny_data(5)
    for change in (1.0, 0.5):
        model.set_weights([change * w for w in model.get_weights()])
        expected = model.predict(x, verbose=0)
        model.export(tmp_path / str(change), verbose=False)
        served = tf.saved_model.load(str(tmp_path / str(change)))
        np.testing.assert_allclose(served.serve(x), expected, atol=1e-6)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_killed_training_goes_on_where_it_was(tmp_path, parts):
    """BackupAndRestore of a training in parts, also into others: as without the interruption."""

    class Killed(Exception):
        pass

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise Killed

    def fit(strategy, *callbacks):
        backup = tfparallel.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        return helpers.train(strategy, _model, epochs=2, callbacks=[backup, *callbacks]).model

    with pytest.raises(Killed):
        fit(_strategy(), Kill())
    resumed, expected = fit(_strategy(1, parts)), helpers.train(_strategy(), _model).model
    if parts == 2:
        _assert_same(expected, resumed)
    for one, two in zip(_variables(expected), _variables(resumed), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6)
