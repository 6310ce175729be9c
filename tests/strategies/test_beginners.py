"""What those who use a strategy for the first time get wrong, or expect."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import tiny_compile_options, tiny_model
from tests.tpu.on_cpus import CpuStrategy


def test_an_unknown_keyword_is_told_what_it_may_have_meant():
    with pytest.raises(
        TypeError, match="no argument 'microbatches'. Did you mean 'num_microbatches'"
    ):
        tfparallel.PipelineStrategy(2, microbatches=4)
    with pytest.raises(TypeError, match="Its arguments are devices, cross_device_ops"):
        tfparallel.MirroredStrategy(xyz=1)


def test_help_shows_the_arguments():
    assert list(inspect.signature(tfparallel.MirroredStrategy).parameters) == [
        "devices",
        "cross_device_ops",
        "memory",
        "prefetch_batches",
    ]


def test_an_unknown_name_is_told_what_it_may_have_meant():
    with pytest.raises(AttributeError, match="Did you mean 'MirroredStrategy'"):
        tfparallel.MirrorStrategy  # noqa: B018


def test_a_strategy_says_what_it_is():
    pipeline = tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=4)
    assert repr(pipeline) == (
        "PipelineStrategy(num_stages=2, num_microbatches=4, devices=['CPU:0', 'CPU:1'])"
    )
    assert (pipeline.rank, pipeline.num_workers, pipeline.is_chief) == (0, 1, True)


@pytest.mark.parametrize("outer", [tfparallel.MirroredStrategy, tf.distribute.MirroredStrategy])
def test_a_scope_in_a_scope_is_refused_by_name(outer):
    outer, inner = outer(["CPU:0"]), tfparallel.OneDeviceStrategy("CPU:0")
    with (
        outer.scope(),
        pytest.raises(RuntimeError, match="scope of OneDeviceStrategy.* inside of that of"),
        inner.scope(),
    ):
        pass
    with inner.scope(), inner.scope():  # one strategy's scope may be entered again
        assert tf.distribute.get_strategy() is inner


@pytest.mark.parametrize("name", ["tf.distribute.MirroredStrategy of 1 replicas", "OneDevice"])
def test_a_scope_of_tensorflow_in_ours_is_refused_by_name(name):
    stock, ours = tf.distribute.MirroredStrategy(["CPU:0"]), tfparallel.OneDeviceStrategy("CPU:0")
    first, second = (stock, ours) if name.startswith("tf.") else (ours, stock)
    with (
        pytest.raises(RuntimeError, match=f"Expected one strategy's scope at a time.*{name}"),
        first.scope(),
        second.scope(),
    ):
        pass
    assert not tf.distribute.has_strategy()


def test_a_model_of_a_stock_strategy_trained_in_our_scope_is_refused_by_name():
    stock, ours = tf.distribute.MirroredStrategy(["CPU:0"]), tfparallel.OneDeviceStrategy("CPU:0")
    with stock.scope():
        model = tiny_model()
        model.compile("sgd", **tiny_compile_options())
    with (
        pytest.raises(RuntimeError, match="a model that was built under one, inside of.*OneDevice"),
        ours.scope(),
    ):
        model.fit(np.ones((8, 6), "float32"), np.zeros(8), verbose=0)


def test_one_device_is_a_name_or_a_number_and_not_several():
    assert repr(tfparallel.OneDeviceStrategy(1)).endswith("devices=['CPU:1'])")
    with pytest.raises(ValueError, match="`device` must be one device.*take MirroredStrategy"):
        tfparallel.OneDeviceStrategy(["CPU:0", "CPU:1"])


def test_devices_that_compute_together_are_named_together():
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), [f"cpu:{i}" for i in range(4)])
    layout = keras.distribution.LayoutMap(mesh)
    groups = "devices=['CPU:0+CPU:1', 'CPU:2+CPU:3']"
    assert groups in repr(tfparallel.TensorParallelStrategy(layout))
    no_layout = keras.distribution.LayoutMap(None)
    stages = tfparallel.HybridStrategy({"pipeline": 2, "model": 2}, layout_map=no_layout)
    assert f"HybridStrategy(pipeline 2 x model 2: num_stages=2, num_microbatches=8, {groups}" in (
        repr(stages)
    )


def test_a_tpus_strategy_says_what_it_is_and_is_as_strict():
    with pytest.raises(TypeError, match="Did you mean 'tpu_cluster_resolver'"):
        tfparallel.TPUStrategy(cluster_resolver=None)
    strategy = CpuStrategy()
    assert repr(strategy) == "CpuStrategy(num_replicas=2, devices=['CPU:0', 'CPU:1'])"
    assert (strategy.rank, strategy.num_workers, strategy.is_chief) == (0, 1, True)
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match="inside of that of CpuStrategy"),
        tfparallel.OneDeviceStrategy("CPU:0").scope(),
    ):
        pass


def test_a_step_of_keras_2_is_refused():
    def run_step(data):
        return data

    run_step.__module__ = "tf_keras.src.engine.training"
    with pytest.raises(RuntimeError, match="Unset TF_USE_LEGACY_KERAS"):
        tfparallel.OneDeviceStrategy("CPU:0").run(run_step, (1,))
    with pytest.raises(RuntimeError, match="Unset TF_USE_LEGACY_KERAS"):
        tfparallel.OneDeviceStrategy("CPU:0").run(tf.function(run_step), (1,))
