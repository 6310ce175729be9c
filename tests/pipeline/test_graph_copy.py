"""A function of a graph: which of TensorFlow's executors runs it."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.pipeline.graph_copy import GraphFunction

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2)]
IN_ORDER = b"SINGLE_THREADED_EXECUTOR"
X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def square(x):
    return [x @ x]


def loop(x):
    for _ in tf.range(2):
        x = x @ x
    return [x]


def elsewhere(x):
    with tf.device(DEVICES[1]):
        return [x @ x]


def _called(computation, device=DEVICES[0]):
    """The result for X, and the executors of the bodies that the call calls."""
    concrete = tf.function(computation).get_concrete_function(tf.constant(X))
    graph = concrete.graph
    function = GraphFunction("computation", graph, graph.inputs, graph.outputs)

    @tf.function
    def step(x):
        return function(device, [x])

    definition = step.get_concrete_function(tf.constant(X)).graph.as_graph_def()
    called = {node.attr["f"].func.name for node in definition.node if node.op == "RemoteCall"}
    executors = [
        node.attr["executor_type"].s
        for own in definition.library.function
        if own.signature.name in called
        for node in own.node_def
        if "executor_type" in node.attr
    ]
    return step(tf.constant(X))[0].numpy(), executors


@pytest.mark.parametrize("computation", [square, loop, elsewhere])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_operations_run_in_order_where_one_thread_is_enough(monkeypatch, computation, threads):
    """Unless they wait for another device, or call functions: a thread would wait for itself."""
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", threads)
    result, executors = _called(computation)
    expected = X @ X if computation is not loop else X @ X @ X @ X
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert executors == [IN_ORDER if threads == "1" and computation is square else b""]


def test_operations_run_in_order_on_the_device_of_the_call(monkeypatch):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    result, executors = _called(elsewhere, DEVICES[1])
    np.testing.assert_allclose(result, X @ X, rtol=1e-6)
    assert executors == [IN_ORDER]
