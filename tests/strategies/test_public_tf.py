"""TensorFlow's own eager tests of a strategy, under every strategy of one process."""

import itertools

import pytest
from tensorflow.python.distribute import strategy_test_lib

import tfparallel
from tests.conformance.cases.public_tf import BY_NUMBER_OF_DEVICES, COMMON, V1Names, started
from tests.hybrid.meshes import hybrid
from tests.tensor_parallel.layouts import LayoutOfAnything, cpu_mesh

ONE_DEVICE = {"one_device": lambda: tfparallel.OneDeviceStrategy("CPU:0")}
TWO_REPLICAS = {
    "mirrored": lambda: tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central_storage": lambda: tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    "pipeline": lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2),
    "sharded": lambda: tfparallel.ShardedStrategy(["CPU:0", "CPU:1"], min_size=1),
}
OF_PARTS = {
    "tensor_parallel": lambda: tfparallel.TensorParallelStrategy(LayoutOfAnything(cpu_mesh(2, 2))),
    "hybrid_of_pipelines": lambda: hybrid({"data": 2, "pipeline": 2}, num_microbatches=1),
    "hybrid_of_shards": lambda: hybrid({"shard": 2, "model": 2}),
}
GRADIENTS_IN_GRAPH = ["_test_all_reduce_sum_gradients", "_test_all_reduce_mean_gradients"]


ALL = {**ONE_DEVICE, **TWO_REPLICAS, **OF_PARTS}


def kinds(named: dict, long: dict) -> list:
    """Names of strategies, of which those in `long` are asked in `make test-all` only."""
    return [*named, *(pytest.param(name, marks=pytest.mark.long) for name in long)]


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("kind", kinds({**ONE_DEVICE, **TWO_REPLICAS}, OF_PARTS))
def test_of_any_strategy(kind, name):
    strategy = ALL[kind]()
    getattr(started(strategy_test_lib.DistributionTestBase), name)(V1Names(strategy))


@pytest.mark.parametrize("name", BY_NUMBER_OF_DEVICES)
@pytest.mark.parametrize("kind", ONE_DEVICE)
def test_of_one_device(kind, name):
    test = started(strategy_test_lib.OneDeviceDistributionTestBase)
    getattr(test, name)(V1Names(ONE_DEVICE[kind]()))


@pytest.mark.parametrize(
    "name, in_function",
    [
        *itertools.product(BY_NUMBER_OF_DEVICES, [False, True]),
        *((name, True) for name in GRADIENTS_IN_GRAPH),
    ],
)
@pytest.mark.parametrize("kind", kinds(TWO_REPLICAS, OF_PARTS))
def test_of_two_replicas(kind, name, in_function):
    """`in_function`: what goes to `strategy.run` is a `tf.function`."""
    test = started(strategy_test_lib.TwoDeviceDistributionTestBase)
    getattr(test, name)(V1Names(ALL[kind]()), run_in_function=in_function)
