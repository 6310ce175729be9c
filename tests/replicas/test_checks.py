"""Misuse that is refused before TensorFlow sees it; the rest is in tests/conformance."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.tpu.test_spmd_step import CpuStrategy
from tfparallel.replicas import checks

FEATURES, TARGETS = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")


class CompiledStep(keras.Sequential):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def build(strategy, model_class=keras.Sequential, **options):
    with strategy.scope():
        model = model_class([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", **options)
    return model


class RunsTwiceAsDeep(tfparallel.PipelineStrategy):
    """Its `run` is called by Keras, and calls that of its base."""

    def run(self, *args, **kwargs):
        return super().run(*args, **kwargs)


LOCAL = {
    "one_device": lambda: tfparallel.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]),
    "mirrored_of_one": lambda: tfparallel.MirroredStrategy(["CPU:0"]),
    "central_storage": lambda: tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    "multi_worker": lambda: tfparallel.MultiWorkerMirroredStrategy(),
    "pipeline": lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"]),
    "pipeline_of_one_microbatch": lambda: tfparallel.PipelineStrategy(["CPU:0"], 1),
    "one_call_deeper": lambda: RunsTwiceAsDeep(["CPU:0", "CPU:1"]),
    "spmd": lambda: CpuStrategy(),
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_a_train_step_that_is_a_tf_function_is_refused(name, method):
    model = build(LOCAL[name](), CompiledStep)
    with pytest.raises(ValueError, match="Remove the decorator"):
        getattr(model, method)(FEATURES, TARGETS)


def test_a_train_step_made_a_tf_function_on_the_model_is_refused():
    model = build(LOCAL["mirrored"]())
    model.train_step = tf.function(model.train_step)
    with pytest.raises(ValueError, match="Remove the decorator"):
        model.fit(FEATURES, TARGETS, verbose=0)


def test_a_tf_function_of_the_same_name_in_a_custom_loop_is_not_refused():
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def train_step(value):
        return 2 * value

    results = strategy.experimental_local_results(strategy.run(train_step, args=(tf.constant(1),)))
    assert [int(result) for result in results] == [2, 2]


def test_jit_compile_is_refused_on_a_device_xla_does_not_compile_for():
    model = build(tfparallel.OneDeviceStrategy("CPU:1"), jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=True needs the first device"):
        model.fit(FEATURES, TARGETS, verbose=0)


def test_jit_compile_is_refused_where_the_variables_are_elsewhere():
    strategy = tfparallel.CentralStorageStrategy(["CPU:0"], parameter_device="CPU:1")
    model = build(strategy, jit_compile=True)
    with pytest.raises(ValueError, match="variables on .*CPU:1, computation on .*CPU:0"):
        model.fit(FEATURES, TARGETS, verbose=0)


def test_jit_compile_is_refused_where_workers_have_two_groups_of_collectives():
    strategy = tfparallel.MirroredStrategy(["CPU:0"])
    model = build(strategy, jit_compile=True)
    strategy.extended._num_workers = 2
    with pytest.raises(ValueError, match="needs one process: .* of 2 workers"):
        checks.check_jit_compile(strategy, model)


@pytest.mark.parametrize(
    "make_strategy",
    [
        lambda: tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"]),
        lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2),
    ],
    ids=["central_storage", "pipeline"],
)
def test_predicting_with_jit_compile_is_refused_where_no_device_has_the_model(make_strategy):
    model = build(make_strategy(), jit_compile=True)
    with pytest.raises(ValueError, match="needs the whole model on each device"):
        model.predict(FEATURES, verbose=0)


def test_each_replica_predicts_with_jit_compile():
    model = build(tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]), jit_compile=True)
    np.testing.assert_allclose(model.predict(FEATURES, verbose=0), model(FEATURES), atol=1e-6)


TWO_REPLICAS = [
    lambda: tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]),
    lambda: tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2),
]


@pytest.mark.parametrize("compiled", [lambda fn: fn, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize("make", TWO_REPLICAS, ids=["mirrored", "central", "pipeline"])
def test_only_what_is_each_replicas_own_is_summed(make, compiled):
    strategy = make()
    shared = tf.constant(3.0)
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def assigned(value):
        compiled(lambda: strategy.run(lambda: total.assign(value())))()
        return total.numpy()

    assert assigned(lambda: tf.identity(shared)) == 6.0
    assert assigned(lambda: 0.0) == 0.0
    for value in (shared, 3.0):
        with pytest.raises(ValueError, match="which must be a tensor of each replica"):
            assigned(lambda value=value: value)


@pytest.mark.parametrize(
    "stock, make",
    [
        (tf.distribute.OneDeviceStrategy, lambda: tfparallel.OneDeviceStrategy("CPU:0")),
        (tf.distribute.MirroredStrategy, TWO_REPLICAS[0]),
        (tf.distribute.experimental.CentralStorageStrategy, TWO_REPLICAS[1]),
        (tf.distribute.MultiWorkerMirroredStrategy, tfparallel.MultiWorkerMirroredStrategy),
    ],
)
def test_a_drop_in_is_an_instance_of_what_it_replaces(stock, make):
    assert isinstance(make(), stock)


def test_microbatches_are_replicas_inside_of_run_only():
    strategy = tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2)
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        assert strategy.num_replicas_in_sync == 1
    inside = strategy.run(lambda: tf.constant(strategy.num_replicas_in_sync))
    assert [int(x) for x in strategy.experimental_local_results(inside)] == [2, 2]
