"""Which collectives workers agree on. What runs them between processes: the conformance suite."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, train
from tfparallel.data_parallel.watched_collectives import WatchedCollectives
from tfparallel.data_parallel.worker_collectives import (
    BYTES_PER_PACK,
    Implementation,
    Options,
    check_alike,
    options_of_gradients,
    options_of_hosts,
)
from tfparallel.internals import CollectiveAllReduce
from tfparallel.internals.distribute import count_collectives, launchers_of

ADDRESSES = ["a:1", "b:1", "c:1"]


def test_nccl_is_asked_for_by_name_on_gpus_and_in_packs():
    options = options_of_gradients(Options(timeout_seconds=7.0), "GPU", is_divided=False)
    assert options.implementation == Implementation.NCCL
    assert (options.bytes_per_pack, options.timeout_seconds) == (BYTES_PER_PACK, 7.0)
    own = options_of_gradients(Options(bytes_per_pack=5), "GPU", is_divided=False)
    assert own.bytes_per_pack == 5


def test_what_the_user_asks_for_holds():
    ring = Options(implementation=Implementation.RING)
    assert options_of_gradients(ring, "GPU", False).implementation == Implementation.RING
    assert options_of_gradients(Options(), "CPU", False).implementation == Implementation.AUTO


def test_there_is_no_nccl_between_parts_of_one_gpu():
    assert options_of_gradients(Options(), "GPU", True).implementation == Implementation.RING
    with pytest.raises(ValueError, match="not between the parts of one"):
        options_of_gradients(Options(implementation=Implementation.NCCL), "GPU", True)


def test_a_worker_without_gpus_is_named():
    check_alike(["GPU"] * 3, [8, 8, 8], ADDRESSES)
    with pytest.raises(ValueError, match=r"rank 1 \(b:1\) has 1 CPU; the others have 8 GPU"):
        check_alike(["GPU", "CPU", "GPU"], [8, 1, 8], ADDRESSES)
    with pytest.raises(ValueError, match=r"rank 0 \(a:1\) has 1 CPU; the others have 1 GPU"):
        check_alike(["CPU", "GPU"], [1, 1], ADDRESSES)
    with pytest.raises(ValueError, match=r"rank 2 \(c:1\) has 4 GPU"):
        check_alike(["GPU"] * 3, [8, 8, 4], ADDRESSES)


@pytest.mark.parametrize(("kind", "hint"), [("GPU", "nccl"), ("CPU", "auto")])
def test_the_hint_is_in_the_graph(kind, hint):
    """TensorFlow takes NCCL only if the operation says so."""
    options = options_of_gradients(Options(), kind, is_divided=False)
    assert _collectives(CollectiveAllReduce(["CPU:0"], 2, options)) == [
        ("CollectiveReduceV2", hint)
    ]


def test_collectives_of_hosts_are_a_ring():
    options = options_of_hosts(Options(implementation=Implementation.NCCL))
    operations = CollectiveAllReduce(["CPU:0"], 2, options)
    assert _collectives(operations) == [("CollectiveReduceV2", "ring")]


def _collectives(operations) -> list[tuple[str, str]]:
    """The kind and hint of each collective that a reduction puts into a graph."""
    with tf.Graph().as_default() as graph:
        (launcher,) = launchers_of(operations)
        launcher.all_reduce(tf.ones([3]), options=operations._options)
    found = [op for op in graph.get_operations() if op.type.startswith("Collective")]
    return [(op.type, op.get_attr("communication_hint").decode()) for op in found]


def test_a_collective_waits_for_no_counter_of_the_watch():
    """Only the counters wait for what they count, on its device: the host waits for neither."""
    device = "/device:CPU:1"  # not where TensorFlow puts what nobody places
    watched = WatchedCollectives(SimpleNamespace(rank=0), None)
    operations = CollectiveAllReduce([device], 2, options_of_hosts(Options()))
    (launcher,) = launchers_of(operations)
    count_collectives(launcher, watched.counter(device))

    @tf.function(autograph=False)
    def step(x):
        return launcher.all_reduce(launcher.all_reduce(x * 2.0))

    graph = step.get_concrete_function(tf.TensorSpec([3])).graph
    watched.stop()
    counters = {op for op in graph.get_operations() if op.type.startswith("Assign")}
    collectives = [op for op in graph.get_operations() if op.type == "CollectiveReduceV2"]
    assert len(collectives) == 2 and len(counters) == 4
    assert all(device in op.device and device in op.inputs[0].device for op in counters)
    assert all(device in op.device for op in collectives)
    for collective in collectives:
        assert not counters & _before(collective)
    last = [op for op in counters if set(collectives) <= _before(op)]
    assert [op.type for op in last] == ["AssignVariableOp"]


def _before(operation: tf.Operation) -> set[tf.Operation]:
    """All that an operation waits for."""
    found, left = set(), [operation]
    while left:
        for each in [x.op for x in left[-1].inputs] + list(left.pop().control_inputs):
            if each not in found:
                found.add(each)
                left.append(each)
    return found


@pytest.mark.turns
def test_one_worker_alone_trains_as_one_device():
    """Without a cluster."""
    alone = tfparallel.MultiWorkerMirroredStrategy()
    assert_same_training(train(None), train(alone))
