"""The architectures that meshes are built for train as on one device, on meshes of 4 and of 8."""

import fnmatch
import functools

import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, train
from tests.hybrid.architectures import MODELS
from tests.hybrid.meshes import hybrid
from tests.multi_process.pool import WorkerPool, cluster_environments

MESHES = [  # every two axes
    {"data": 2, "pipeline": 2},
    {"pipeline": 2, "model": 2},
    {"shard": 2, "pipeline": 2},
    {"data": 2, "model": 2},
    {"shard": 2, "model": 2},
    {"data": 2, "shard": 2},
]
OF_EIGHT = [
    {"data": 2, "pipeline": 2, "model": 2},
    {"data": 2, "shard": 2, "pipeline": 2},
    {"data": 2, "shard": 2, "model": 2},
    {"shard": 2, "pipeline": 2, "model": 2},
]


def named(sizes):
    return " x ".join(sizes)


@pytest.fixture(scope="module")
def workers():
    """Gives a pool of so many processes, which train on meshes of so many logical CPUs each."""
    worker = ["-m", "tests.hybrid.architectures_worker"]

    @functools.cache
    def pool(count, devices):
        environments = functools.partial(cluster_environments, count)
        return WorkerPool([*worker, str(devices)], environments)

    pools = {counts: pool(*counts) for counts in ((1, 8), (2, 4))}
    yield lambda *counts: pools[counts]
    for each in pools.values():
        each.close()


@pytest.mark.long
@pytest.mark.parametrize("sizes", MESHES, ids=named)
@pytest.mark.parametrize("model", MODELS)
def test_an_architecture_trains_as_on_one_device(model, sizes):
    options = {**MODELS[model], "rows": 10, "batch_size": 5}
    assert_same_training(train(None, **options), train(hybrid(sizes), **options))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", OF_EIGHT, ids=named)
@pytest.mark.parametrize("model", MODELS)
def test_it_does_on_a_mesh_of_three_axes(workers, model, sizes):
    workers(1, 8).ask({"model": model, "sizes": sizes}, timeout_s=570)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", MESHES, ids=named)
@pytest.mark.parametrize("model", MODELS)
def test_it_does_in_two_processes_with_a_mesh_each(workers, model, sizes):
    workers(2, 4).ask({"model": model, "sizes": sizes}, timeout_s=570)


JOINED = ["narrow", "joined", "pooled", "scores"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "partition"),
    [
        # One branch is a pipeline of two layers; that of the large kernel has two devices.
        ([0, [1, 2], 3], [["stem", "wide_1"], ["wider_*"], ["wide_2", *JOINED]]),
        # And so has what follows.
        ([0, 1, [2, 3]], [["stem", "wide_1"], ["wider_*"], ["wide_2", *JOINED]]),
        # Both are, on devices that no other layer is on.
        ([0, 1, 2, 3], [["stem"], ["wide_1", "wider_1"], ["wide_2", "wider_2"], JOINED]),
        ([0, [1, 2], 3], [["stem"], ["wide_1", "wider_1"], ["wide_2", "wider_2", *JOINED]]),
    ],
    ids=str,
)
def test_branches_are_on_devices_of_their_own(devices, partition):
    options = {**MODELS["inception"], "rows": 10, "batch_size": 5}
    stages = [[each] if isinstance(each, int) else each for each in devices]
    names = [[f"CPU:{number}" for number in each] for each in stages]
    strategy = tfparallel.PipelineStrategy(names, 4, partition=partition)
    training = train(strategy, **options)
    assert_same_training(train(None, **options), training)
    for layer in [layer for layer in training.model.layers if layer.weights]:
        (stage,) = [
            stage
            for stage, patterns in zip(stages, partition, strict=True)
            if any(fnmatch.fnmatch(layer.name, pattern) for pattern in patterns)
        ]
        copies = [tf.DeviceSpec.from_string(x.device) for x in layer.kernel.value.values]
        assert {copy.device_index for copy in copies} == {*stage}
