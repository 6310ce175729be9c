"""A function of a graph: which of TensorFlow's executors runs it."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.segments.graph_copy import GraphFunction

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


def twice(x):
    return [x @ x, x + x]


def _called(computation, device=DEVICES[0]):
    """The result for X, and the functions that are called, each with the call of its body."""
    concrete = tf.function(computation).get_concrete_function(tf.constant(X))
    graph = concrete.graph
    function = GraphFunction("computation", graph, graph.inputs, graph.outputs)

    @tf.function
    def step(x):
        return function(device, [x])

    definition = step.get_concrete_function(tf.constant(X)).graph.as_graph_def()
    names = {node.attr["f"].func.name for node in definition.node if node.op == "RemoteCall"}
    functions = [own for own in definition.library.function if own.signature.name in names]
    calls = [
        (own, node) for own in functions for node in own.node_def if "executor_type" in node.attr
    ]
    return step(tf.constant(X))[0].numpy(), calls


def _executors(calls):
    return [node.attr["executor_type"].s for _, node in calls]


def test_one_operation_takes_all_results_of_a_pass(monkeypatch):
    """Of the call that is run in order: each that waits for it would be handed to a thread."""
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    _, [(function, call)] = _called(twice)
    sources = {result.split(":")[0] for result in function.ret.values()}
    assert len(function.ret) == 2 and len(sources) == 1 and call.name not in sources


@pytest.mark.parametrize("computation", [square, loop, elsewhere])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_operations_run_in_order_where_one_thread_is_enough(monkeypatch, computation, threads):
    """Unless they call functions: a thread would wait for itself. What is on several devices is
    called as that, and not on one of them."""
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", threads)
    result, calls = _called(computation)
    expected = X @ X if computation is not loop else X @ X @ X @ X
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    in_order = IN_ORDER if threads == "1" and computation is square else b""
    assert _executors(calls) == ([] if computation is elsewhere else [in_order])


def test_operations_run_in_order_on_the_device_of_the_call(monkeypatch):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    result, calls = _called(elsewhere, DEVICES[1])
    np.testing.assert_allclose(result, X @ X, rtol=1e-6)
    assert _executors(calls) == [IN_ORDER]
