"""What a layout, a mesh or a variable cannot be is refused, by name."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel.layouts import LayoutOfAnything, cpu_mesh, layout_map

COLUMN = (None, "model")


def _fit(layout, model=None):
    strategy = tfparallel.TensorParallelStrategy(layout)
    helpers.train(strategy, model or helpers.tiny_model, epochs=1)


def test_refuses_what_is_no_layout_map():
    with pytest.raises(TypeError, match="ModelParallel. Received: 'megatron'"):
        tfparallel.TensorParallelStrategy("megatron")


def test_refuses_to_compare_weights_of_one_process():
    with pytest.raises(ValueError, match="check_weights_every=2 without a `transport`"):
        tfparallel.TensorParallelStrategy("auto", check_weights_every=2)


def test_refuses_a_layout_map_without_a_mesh():
    with pytest.raises(TypeError, match="device_mesh=None"):
        tfparallel.TensorParallelStrategy(keras.distribution.LayoutMap(None))


def test_refuses_an_axis_that_the_mesh_has_not():
    with pytest.raises(ValueError, match="Invalid axis names .*'modle'"):  # of Keras
        layout_map(1, 2, {".*kernel": (None, "modle")})


def test_refuses_a_mesh_with_more_devices_than_there_are():
    with pytest.raises(ValueError, match="The mesh has 8 devices, and this process has 4"):
        tfparallel.TensorParallelStrategy(layout_map(2, 4, {}))


def test_refuses_two_axes_of_the_model():
    mesh = keras.distribution.DeviceMesh(
        (1, 2, 2), ("batch", "x", "y"), [f"cpu:{i}" for i in range(4)]
    )
    with pytest.raises(ValueError, match=r"one for the model. Received.*\['x', 'y'\]"):
        tfparallel.TensorParallelStrategy(keras.distribution.LayoutMap(mesh))


def test_refuses_a_batch_axis_that_the_mesh_has_not():
    with pytest.raises(ValueError, match="batch_dim_name must be an axis .*'rows'"):
        tfparallel.TensorParallelStrategy(layout_map(1, 2, {}), batch_dim_name="rows")


def test_refuses_a_pattern_that_matches_nothing_before_the_first_step():
    layout = layout_map(1, 2, {".*dense.*/kernel": COLUMN, ".*danse.*/kernel": COLUMN})
    with pytest.raises(
        ValueError, match=r"\['\.\*danse\.\*/kernel'\], which match none of .*dense"
    ):
        _fit(layout)


def test_refuses_a_pattern_that_matches_nothing_in_predict():
    strategy = tfparallel.TensorParallelStrategy(layout_map(1, 2, {".*danse.*/kernel": COLUMN}))
    with strategy.scope():
        model = helpers.tiny_model()
    with pytest.raises(ValueError, match=r"\['\.\*danse\.\*/kernel'\], which match none of"):
        model.predict(helpers.tiny_data(4)[0], verbose=0)


def test_refuses_two_patterns_for_one_path():
    layout = layout_map(1, 2, {".*kernel": COLUMN, ".*dense.*": ("model", None)})
    with pytest.raises(ValueError, match="dense.*/kernel' matches multiple layout"):
        _fit(layout)


def test_refuses_a_layout_of_another_rank():
    with pytest.raises(ValueError, match=r"kernel' must name an axis.*\(6, 8\).*\('model',\)"):
        _fit(layout_map(1, 2, {".*kernel": ("model",)}))


@pytest.mark.parametrize("pattern", [".*kernel", ".*/output"])
def test_refuses_a_layout_that_names_the_model_s_axis_twice(pattern):
    """As JAX does; the second dim would be ignored."""
    layout = layout_map(1, 2, {pattern: ("model", "model")})
    with pytest.raises(ValueError, match=r"'model' for one dim at most.*\('model', 'model'\)"):
        tfparallel.TensorParallelStrategy(layout)


def test_refuses_branches_whose_sequences_are_in_parts():
    with pytest.raises(ValueError, match="sequence_parallel=True with layout='branches'"):
        tfparallel.TensorParallelStrategy("branches", sequence_parallel=True)


def test_a_layout_of_outputs_is_known_and_changes_nothing():
    layout = layout_map(1, 2, {".*/output": ("batch", None), ".*kernel": COLUMN})
    _fit(layout, lambda: keras.Sequential([keras.Input((6,)), layers.Dense(3)]))


def test_refuses_operations_that_parts_do_not_have():
    strategy = tfparallel.TensorParallelStrategy(layout_map(1, 2, {".*kernel": COLUMN}))
    with strategy.scope():
        dense = layers.Dense(4)
        dense.build((None, 3))
    with pytest.raises(NotImplementedError, match="scatter_max of"):
        dense.kernel.value.scatter_max(None)


def test_a_dim_with_fewer_indices_than_devices_stays_whole():
    strategy = tfparallel.TensorParallelStrategy(layout_map(1, 4, {".*kernel": COLUMN}))
    with strategy.scope():
        dense = layers.Dense(3, name="narrow")
        dense.build((None, 3))
    (placement,) = [p for p in strategy.extended.layouts.placements.values() if "kernel" in p.path]
    assert placement.rows is None
    assert placement.reason == "dim 1 has 3 indices for 4 devices"


def test_says_once_that_a_layer_has_no_rule(caplog):
    strategy = tfparallel.TensorParallelStrategy(layout_map(1, 2, {".*gamma": ("model",)}))
    with strategy.scope():
        layer = layers.GroupNormalization(2, name="unruly")
        layer.build((None, 4))
    layer(np.ones((2, 4)))
    layer(np.ones((2, 4)))
    assert [r.message.count("'unruly'") for r in caplog.records if "unruly" in r.message] == [1]


def test_a_mesh_of_one_axis_is_one_group():
    mesh = keras.distribution.DeviceMesh((3,), ("model",), [f"cpu:{i}" for i in range(3)])
    strategy = tfparallel.TensorParallelStrategy(keras.distribution.LayoutMap(mesh))
    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.layouts.groups.parts == 3


def test_model_parallel_of_keras_names_the_batch_axis():
    layout = keras.distribution.LayoutMap(cpu_mesh(2, 2))
    distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="model")
    groups = tfparallel.TensorParallelStrategy(distribution).extended.layouts.groups
    assert (groups.batch_axis, groups.model_axis) == ("model", "batch")
    assert [[d[-1] for d in group] for group in groups.groups] == [["0", "2"], ["1", "3"]]


def test_jit_compile_is_refused():
    strategy = tfparallel.TensorParallelStrategy(layout_map(1, 2, {".*dense.*kernel": COLUMN}))

    def options():
        return {**helpers.tiny_compile_options(), "jit_compile": True}

    with pytest.raises(ValueError, match="jit_compile=True needs the variables where XLA"):
        helpers.train(strategy, compile_options=options)


def test_tokens_count_from_the_end_and_others_change_no_weight():
    tokens, y = np.array([[1, -1, 5, 0], [2, 3, -6, 4]], "int32"), np.ones((2, 4), "float32")

    def trained(scope):
        keras.utils.set_random_seed(helpers.SEED)
        with scope:
            table, head = layers.Embedding(6, 2), layers.Dense(4)
            model = keras.Sequential([keras.Input((4,), dtype="int32"), table, layers.Flatten()])
            model.add(head)
            model.compile("sgd", "mse")
        model.fit(tokens, y, epochs=2, verbose=0)
        return model

    strategy = tfparallel.TensorParallelStrategy(LayoutOfAnything(cpu_mesh(1, 2)))
    model = trained(strategy.scope())
    before = model.get_weights()
    expected = trained(contextlib.nullcontext()).get_weights()
    for ours, theirs in zip(before, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for wrong in (6, -7):
        with pytest.raises(tf.errors.InvalidArgumentError, match="Expected indices in"):
            model.fit(np.where(tokens == 5, wrong, tokens), y, verbose=0)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
