"""What a step sends along an axis, counted in its graph, is what the axis has to send."""

import collections

import pytest
import tensorflow as tf
from tensorflow.python.eager import context as eager  # records what each device runs

from benchmarks import crossing, hybrid


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        pytest.param(sizes, what, marks=[] if sizes == {"shard": 4} else pytest.mark.long)
        for sizes, what in hybrid.meshes()
    ],
    ids=str,
)
def test_no_axis_sends_more_than_it_has_to(sizes, what):
    sent = hybrid.bytes_by_axis(sizes, what)
    for axis in sizes:
        assert sent[axis] == hybrid.bytes_along(axis, sizes, what)


@pytest.mark.long
def test_tensorflow_sends_what_is_counted():
    """Beside the graphs into which TensorFlow has cut the step, for each device one."""
    strategy, model = hybrid.model_on({"pipeline": 2, "model": 2})
    x = tf.ones((hybrid.ROWS_OF_STEP, hybrid.WIDTH_OF_LAYER))
    model.train_on_batch(x, x)
    step = tf.function(lambda batch: strategy.run(model.train_step, ((batch, batch),)))
    counted = crossing.copies_by_link(
        step.get_concrete_function(x).graph, hybrid.ROWS_OF_STEP // 2, "CPU:0"
    )
    eager.context().enable_graph_collection()
    try:
        step(x)
        graphs = eager.context().export_run_metadata().partition_graphs
    finally:
        eager.context().disable_graph_collection()
    told = {name for graph in graphs for name in _told_of_arrays(graph)}
    sent = collections.Counter(
        tuple(crossing.short(node.attr[end].s.decode()) for end in ("send_device", "recv_device"))
        for graph in graphs
        for node in graph.node
        if node.op == "_Send" and _is_of_rows(node) and node.attr["tensor_name"].s not in told
    )
    assert sent == counted
    assert set(sent) == {("CPU:0", "CPU:2"), ("CPU:2", "CPU:0")}  # from stage to stage alone


def test_what_a_called_function_takes_and_returns_passes_through_the_device_of_its_call():
    def counted(attributes):
        @tf.function(experimental_attributes=attributes)
        def spread(x):
            with tf.device("CPU:1"):
                return x * 2.0

        @tf.function
        def step(x):
            with tf.device("CPU:1"):
                x = x + 1.0
            with tf.device("CPU:0"):
                y = spread(x)
            with tf.device("CPU:1"):
                return y + 1.0

        graph = step.get_concrete_function(tf.zeros((100,))).graph
        return crossing.bytes_by_link(graph, 1, "CPU:0")

    there, back = ("CPU:1", "CPU:0", False), ("CPU:0", "CPU:1", False)
    # The step's argument and result, its and the function's, are on CPU:0.
    assert counted({}) == {back: 800, there: 800}
    assert counted({"_noinline": True}) == {back: 1200, there: 1200}


def _told_of_arrays(graph) -> set:
    """The names of numbers that are received to say that an array has been written."""
    nodes = {node.name: node for node in graph.node}
    given = [node.input[2] for node in graph.node if node.op == "TensorArrayReadV3"]
    for node in graph.node:
        if node.attr["f"].func.name.startswith("tfparallel_left"):  # a call that reads one
            given += node.input
    flows = [nodes[name.split(":")[0]] for name in given]
    return {node.attr["tensor_name"].s for node in flows if node.op == "_Recv"}


def _is_of_rows(node) -> bool:
    """Whether a tensor is sent, which here is of rows: weights, in parts, stay where they are.

    All else is read from variables, as the rate is, or says that something has been done.
    """
    is_tensor = node.attr["T"].type == tf.float32.as_datatype_enum
    return is_tensor and "/ctrl/" not in node.input[0] and "ReadVariableOp" not in node.input[0]
