"""No GPU is here: what steps would do on one is read from their graphs (`audit.py`).

`copies.json` is how many copies cross between host and devices in a step, by strategy, model and
size of the batch. They may only fall, each: `python -m tests.gpu.table` writes them anew, and
refuses more than before.
"""

import re

import keras
import pytest
import tensorflow as tf
from tensorflow.python.grappler import tf_optimizer

import tfparallel
from tests.docs.snippets import ROOT
from tests.gpu.audit import GPU_0, audit
from tests.gpu.folding import Folded
from tests.gpu.jobs import NUM_CPUS, audited_in_job, close_pools, needs_horovod
from tests.gpu.steps import (
    AUDITED_MODELS,
    BY_DEFAULT,
    COMPOSITES,
    EVERY,
    GPUS,
    INNER,
    KERAS,
    OF_COMPOSITES,
    ROWS,
    STRATEGIES,
    audited,
)
from tests.gpu.table import read_table, risen_directions, row_name


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left():
    yield
    close_pools()


def _steps() -> list:
    marks = {key: () if key in BY_DEFAULT else pytest.mark.long for key in EVERY}
    return [pytest.param(*key, marks=marks[key], id="-".join(key)) for key in EVERY]


@pytest.mark.parametrize(("strategy", "model", "size"), _steps())
def test_a_step_runs_on_gpus_as_the_table_says(strategy, model, size):
    if needs_horovod(strategy):
        pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")
    found = audited(strategy, model, size)
    assert not found.faults()
    assert not found.waits or strategy in _MOVED, found.waits
    assert found.row() == read_table()[row_name(strategy, model, size)], dict(found.copies)


def test_the_table_has_every_step_and_no_other():
    assert read_table().keys() == {row_name(*key) for key in EVERY}


_COLUMNS = (KERAS, "one_device", "mirrored", "pipeline", "multi_worker", "horovod")


def test_the_page_says_what_the_table_does():
    page, table = (ROOT / "docs" / "gpu_copies.md").read_text(), read_table()
    rows = re.findall(r"^\| (\w+), (static|unknown) \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 10
    for model, size, numbers in rows:
        expected = [table[row_name(each, model, size)]["to_host"] for each in _COLUMNS]
        assert list(map(int, numbers.split("|"))) == expected, (model, size)


def test_collectives_of_gpus_are_nccl_and_alike_on_all_and_those_of_hosts_a_ring():
    for name, row in read_table().items():
        strategy, model, _ = name.split(", ")
        by_place = row.get("collectives", {})
        places = {each.partition(" on ")[2].replace("GPU:1", "GPU:0") for each in by_place}
        expected = _COLLECTIVES.get(strategy, set())
        if strategy.startswith(("multi_worker", "sharded_workers")) and model in _TABLES:
            expected = expected | {"HOST, ring"}  # tell one another how many rows their GPUs have
        assert places == expected, name
        first, second = (
            {each.partition(" on ")[0]: n for each, n in by_place.items() if device in each}
            for device in ("GPU:0", "GPU:1")
        )
        assert first == second or strategy not in _ON_ALL_GPUS, name


_INNER_OF_WORKERS = [f"multi_worker_{name}" for name in INNER]
_COLLECTIVES = {
    **dict.fromkeys(("mirrored_nccl", "multi_worker", *_INNER_OF_WORKERS), {"GPU:0, nccl"}),
    **dict.fromkeys(("horovod", *(f"horovod_{name}" for name in INNER)), {"GPU:0, horovod"}),
    **dict.fromkeys(
        ("sharded_workers", "sharded_workers_of_one", "sharded_workers_of_copies"), {"GPU:0, nccl"}
    ),
    "sharded_ranks": {"GPU:0, horovod"},
}
_ON_ALL_GPUS = {
    "mirrored_nccl",
    "multi_worker",
    "sharded_workers",
    "sharded_workers_of_copies",
}  # and not on the first of each


def test_predicting_gathers_on_the_hosts_as_training_does_there():
    """A group has one kind of device: with one of them on a GPU, `predict` behind `fit` ends."""
    found = audited_in_job("multi_worker", None, "unknown")
    assert not found.faults()
    kinds = {each.partition(" ")[0] for each in found.collectives}
    assert "CollectiveGatherV2" in kinds
    assert all(each.endswith(" on HOST, ring") for each in found.collectives)


_LOOPS = {"lstm", "masking"}  # which take numbers to the device
_MOVED = {  # which are for that
    "central_storage",  # gradients go to the host, by its definition
    *("parameter_server_sync", "parameter_server_async", "pipeline_offload"),
}
_TABLES = {"embedding", "masking", "positions"}


@pytest.mark.parametrize("strategy", sorted({*STRATEGIES, *NUM_CPUS} - _MOVED - {KERAS}))
def test_nothing_waits_for_a_gpu_within_a_step(strategy):
    """None to the host, of any model and size, so neither metrics nor counters nor sizes."""
    table, keys = read_table(), [key for key in EVERY if key[0] == strategy]
    assert len(keys) >= len(OF_COMPOSITES if strategy in COMPOSITES else AUDITED_MODELS)
    for _, model, size in keys:
        assert not table[row_name(strategy, model, size)]["to_host"], (model, size)


@pytest.mark.parametrize(
    ("strategy", "parts", "others"),
    [
        ("one_device", 1, 0),
        ("mirrored", 2, 0),
        ("sharded", 2, 0),
        ("tensor_parallel", 2, 0),  # both devices get all rows
        ("pipeline", 4, 1),  # microbatches; the learning rate
        ("mirrored_nccl", 2, 0),
        ("multi_worker", 2, 0),
        ("horovod", 1, 0),
    ],
)
def test_a_step_for_a_known_size_gets_its_batch_and_nothing_else(strategy, parts, others):
    for name, row in _rows_of_known_size(strategy).items():
        num_tensors = len(tf.nest.flatten(AUDITED_MODELS[name.split(", ")[1]].data(ROWS)))
        assert row["to_device"] <= num_tensors * parts + others, name


def _rows_of_known_size(strategy: str) -> dict[str, dict]:
    names = {row_name(strategy, model, "static") for model in AUDITED_MODELS.keys() - _LOOPS}
    return {name: row for name, row in read_table().items() if name in names}


def test_more_copies_in_one_direction_are_refused_whatever_the_others_do():
    before = {"to_device": 10, "to_host": 2, "between_devices": 0}
    assert not risen_directions({**before, "to_device": 9}, before)
    changed = {"to_device": 1, "to_host": 3, "between_devices": 0}
    assert risen_directions(changed, before) == ["to_host"]
    gathers = {"CollectiveGatherV2 on GPU:0, nccl": 1, "CollectiveGatherV2 on GPU:1, nccl": 1}
    assert risen_directions({**before, "collectives": gathers}, before) == ["between_devices"]
    assert not risen_directions(
        {**before, "between_devices": 2}, {**before, "collectives": gathers}
    )


def test_an_operation_of_python_in_the_step_is_found():
    class Bad(keras.layers.Layer):
        def call(self, x):
            y = tf.py_function(lambda value: value * 2.0, [x], x.dtype)
            return tf.ensure_shape(y, x.shape)

    assert not _audit_with(keras.layers.Activation("linear")).python_calls
    assert _audit_with(Bad()).python_calls


def test_a_string_on_a_gpu_is_found():
    class Bad(keras.layers.Layer):
        def call(self, x):
            words = tf.strings.as_string(x)
            return tf.strings.to_number(words)

    assert "AsString(float32, string)" in _audit_with(Bad()).without_kernel


def test_a_host_that_waits_for_a_gpu_is_found():
    graph = tf.Graph()
    with graph.as_default():
        with tf.device(GPUS[0]):
            there = tf.random.uniform([2])
            with tf.control_dependencies([there]):
                tf.random.uniform([2])
        assert not audit(graph).waits
        with tf.device("CPU:0"), tf.control_dependencies([there]):
            tf.random.uniform([2])
    assert audit(graph).waits


def test_of_a_graph_that_a_remote_function_is_made_of_what_it_needs_is_counted():
    from tfparallel.segments.graph_copy import GraphFunction

    @tf.function(autograph=False)
    def stage(x):
        whole = tf.argmax(x, output_type=tf.int32)
        return tf.reduce_sum(x), tf.fill([whole], 1.0)

    graph = stage.get_concrete_function(tf.TensorSpec([3])).graph
    for count, results in ((1, graph.outputs), (0, graph.outputs[:1])):
        function = GraphFunction("stage", graph, graph.inputs, results)
        with tf.Graph().as_default() as step:
            function(GPU_0, [tf.ones([3])])
        assert audit(step).totals()["to_host"] == count


def test_an_int32_through_a_remote_call_is_found():
    from tfparallel.internals import FuncGraph
    from tfparallel.internals.graph_functions import RemoteFunction, function_of_graph

    inner = FuncGraph("inner")
    with inner.as_default():
        x = inner.capture(tf.constant([1, 2]))
        inner.inputs, inner.outputs = [x], [x + 1]
    remote = RemoteFunction(function_of_graph("inner_of_test", inner))
    device = "/job:localhost/replica:0/task:0/device:CPU:1"
    outer = FuncGraph("outer")
    with outer.as_default():
        remote(device, [tf.compat.v1.placeholder(tf.int32, [2])])
    assert len(audit(outer).narrow_remote_calls) == 2


def test_metrics_of_a_pipeline_are_on_the_last_stage():
    strategy = STRATEGIES["pipeline"]()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
        model.compile("sgd", "mse", metrics=["mae"])
    model.train_on_batch(tf.ones([12, 6]), tf.ones([12, 3]))
    devices = {variable.value.device for variable in model.metrics_variables}
    assert [device[-5:] for device in devices] == [GPUS[-1]]


def _audit_with(layer: keras.layers.Layer):
    strategy = tfparallel.OneDeviceStrategy(GPUS[0])
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.train_on_batch(tf.ones([12, 6]), tf.ones([12, 3]))

    @tf.function(autograph=False)
    def step(*data):
        return strategy.run(model.train_step, args=(data,))

    specs = [tf.TensorSpec((12, 6)), tf.TensorSpec((12, 3))]
    return audit(step.get_concrete_function(*specs).graph)


def test_what_counts_as_folded_is_a_constant_when_it_runs():
    """Asked of grappler itself, within a function that a `RemoteCall` runs, too."""

    def body(x):
        rows = tf.shape(x)[0]
        size = tf.reduce_prod(tf.stack([rows, tf.size(x[0]), 3]))
        return tf.reduce_sum(x) / tf.cast(size, x.dtype)

    for shape, is_known in (((4, 5), True), ((None, 5), False)):
        concrete = tf.function(body).get_concrete_function(tf.TensorSpec(shape))
        folded = Folded()
        own = {x.type for x in concrete.graph.get_operations() if not folded.is_constant(x)}
        assert ("Prod" in own) is not is_known
        assert ("Prod" in _optimised(concrete)) is not is_known


def _optimised(concrete) -> set[str]:
    """The types of operations that grappler leaves of a function that another device runs."""
    caller = tf.Graph()
    with caller.as_default():
        concrete.add_to_graph(caller)
        x = tf.compat.v1.placeholder(tf.float32, concrete.inputs[0].shape)
        remote = tf.raw_ops.RemoteCall(
            target="/device:CPU:1", args=[x], Tout=[tf.float32], f=concrete._inference_function.name
        )
        tf.compat.v1.add_to_collection("train_op", tf.identity(remote[0]))
    meta = tf.compat.v1.train.export_meta_graph(graph_def=caller.as_graph_def(), graph=caller)
    graph = tf_optimizer.OptimizeGraph(tf.compat.v1.ConfigProto(), meta)
    (body,) = (each for each in graph.library.function if each.node_def)
    return {node.op for node in body.node_def}
