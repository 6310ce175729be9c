"""The collectives of all transports, against numpy, for uneven lengths and all dtypes."""

import functools
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.communication.collective_claims import (
    DTYPES,
    LENGTHS,
    all_differences,
    asked,
    differences,
)
from tests.communication.rings import connect_all, on_all
from tests.horovod.launching import horovodrun
from tests.multi_process.pool import WorkerPool, cluster_environments
from tfparallel.communication.carried_dtypes import as_words, from_words
from tfparallel.communication.ring_all_reduce import RingAllReduce
from tfparallel.communication.ring_collectives import RingCollectives
from tfparallel.communication.stock_collectives import StockCollectives
from tfparallel.internals import ResourceVariable
from tfparallel.replicas.graph_collectives import GraphCollectives

pytestmark = pytest.mark.turns


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ring(size):
    rings = connect_all(size)

    def on(rank: int) -> list[str]:
        return all_differences(_of_ring(rings[rank], rank, size), in_function=False)

    try:
        assert on_all(size, on) == [[]] * size
    finally:
        for ring in rings:
            ring.close()


def _of_ring(ring, rank: int, size: int) -> RingCollectives:
    keys = tf.distribute.experimental.CommunicationOptions()
    reduction = RingAllReduce(
        ring=ring,
        order=ResourceVariable(0.0),
        device="CPU:0",
        devices=["CPU:0"],
        group_size=size,
        options=keys,
    )
    return RingCollectives(reduction, "CPU:0", size, rank)


def test_a_reduce_scatter_of_the_ring_sends_half_the_bytes_of_an_all_reduce():
    rings = connect_all(4)

    def on(rank: int) -> list[int]:
        collectives, ring = _of_ring(rings[rank], rank, 4), rings[rank]
        sent = [ring.bytes_sent]
        for collective in (collectives.all_reduce, collectives.reduce_scatter):
            collective(tf.zeros([4, 100_000]))
            sent.append(ring.bytes_sent)
        return [b - a for a, b in zip(sent, sent[1:], strict=False)]

    try:
        for whole, half in on_all(4, on):
            assert half == pytest.approx(whole / 2, rel=0.01)
    finally:
        for ring in rings:
            ring.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_graph_between_replicas(size):
    strategy = tfparallel.MirroredStrategy([f"CPU:{i}" for i in range(size)])
    collectives = GraphCollectives()
    found: list[str] = []
    for dtype in DTYPES[:: 1 if size == 2 else 4]:
        for length in LENGTHS:
            run = tf.function(functools.partial(_run, strategy, collectives, dtype, length))
            results = [strategy.experimental_local_results(each) for each in run()]
            for i in range(size):
                own = [np.asarray(each[i]) for each in results]
                found += differences(own, size, i, dtype, length)
    assert not found


def test_replicas_get_a_sum_that_is_added_up_once():
    """And so the same bits for all."""
    strategy = tfparallel.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    collectives = GraphCollectives()
    run = tf.function(lambda: strategy.run(lambda: collectives.all_reduce(tf.random.normal([9]))))
    operations = run.get_concrete_function().graph.get_operations()
    assert len([op for op in operations if "sum_in_order" in op.name]) == 4 - 1
    first, *others = strategy.experimental_local_results(run())
    for other in others:
        np.testing.assert_array_equal(other, first)


def _run(strategy, collectives, dtype, length):
    return strategy.run(lambda: asked(collectives, dtype, length))


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_between_workers_of_tensorflow(num_workers):
    program = ["-m", "tests.communication.collectives_worker"]
    pool = WorkerPool(program, lambda: cluster_environments(num_workers))
    try:
        assert pool.ask({}, timeout_s=120) == [[]] * num_workers
    finally:
        pool.close()


@pytest.mark.parametrize(("at_once", "times"), [(False, 4), (True, 0)])
def test_ranks_of_horovod_count_before_and_after_what_has_an_order(at_once, times):
    """The order is that of the counter, by which a rank that is behind is found, too."""
    pytest.importorskip("horovod.tensorflow")
    from tfparallel.communication.horovod_collectives import HorovodCollectives

    places = SimpleNamespace(size=lambda: 2, rank=lambda: 0, process_set_id=0)
    collectives = HorovodCollectives(places, "CPU:0")

    @tf.function
    def two():
        with collectives.at_once_if(at_once):
            return [collectives.all_reduce(tf.ones(2)) for _ in range(2)]

    types = [op.type for op in two.get_concrete_function().graph.get_operations()]
    assert types.count("HorovodAllreduce") == 2
    assert types.count("AssignAddVariableOp") == times


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_between_ranks_of_horovod(num_ranks):
    status, output = horovodrun("collectives", num_ranks=num_ranks)
    assert status == 0, output
    assert output.count("nothing differs") == num_ranks, output


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_of_horovod_send_no_more_than_has_to_be_sent(num_ranks, tmp_path):
    """By the counter of a network interface; an all-reduce is a reduce-scatter and a gather."""
    own_network = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
    if subprocess.run([*own_network, "true"], capture_output=True).returncode:
        pytest.skip("no network of its own here (unshare -rn): others would be counted, too")
    status, output = horovodrun("wire_bytes", tmp_path, num_ranks=num_ranks, within=own_network)
    assert status == 0, output
    ratios = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0.0)
    for name, ratio in re.findall(r"RATIO (\w+) ([\d.]+)", output):
        ratios[name] = max(ratios[name], float(ratio))
    least = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}
    assert ratios == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_words_have_every_bit(dtype):
    numbers = np.random.default_rng(0).integers(0, 256, 1600, np.uint8).tobytes()
    array = np.frombuffer(numbers, dtype.as_numpy_dtype) if dtype != tf.bool else np.ones(9, bool)
    words = as_words(tf.constant(array, dtype))
    assert words.dtype in (tf.int32, tf.int64)
    assert from_words(words, dtype).numpy().tobytes() == array.tobytes()


def test_words_of_text_are_refused():
    with pytest.raises(TypeError, match="carry numbers. Received: a tensor of string"):
        as_words(tf.constant("text"))


def test_what_is_gathered_outside_of_functions_is_traced_once(monkeypatch):
    traced = []
    monkeypatch.setattr(StockCollectives, "_gather_alike", lambda _, part: traced.append(1) or part)
    collectives = StockCollectives(None, "CPU:0", size=2, index=0)
    for _ in range(2):
        collectives.all_gather_each([tf.ones([3])])
    assert len(traced) == 1
