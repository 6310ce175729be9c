"""Where a step gathers what a loop in it reads.

The gradient of a gathered variable is recorded on the gradient tape, as if it were one variable's.
The body of a loop (every RNN of Keras has one), or of a branch, is differentiated as a graph, in
which only the replica's own shard would get its slice of the gradient. So the variable is gathered
where the step itself is traced, once, and the loop takes it as an input.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfparallel.internals import FuncGraph, distribute_lib, record


def loops_around() -> tuple[list, tf.Graph]:
    """The loops and branches around the calling code, innermost first, and the graph around them.

    Raises:
        NotImplementedError: in a `tf.function` inside of the step: it may be called in another step
            than it was traced in, and cannot take what is gathered before it.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    step = _graph_of_step()
    if tf.executing_eagerly() or (step is None and not record.could_possibly_record()):
        return [], graph
    inner: list = []
    while graph is not step and getattr(graph, "is_control_flow_graph", False):
        inner.append(graph)
        graph = graph.outer_graph
    if record.could_possibly_record() and step in _outer_graphs(graph):
        raise NotImplementedError(
            "A sharded variable gets its gradient where the step itself, a loop or a branch reads "
            "it. Received: a read in a tf.function within the step. Remove the @tf.function: the "
            "step is compiled as a whole."
        )
    return inner, graph


def _graph_of_step() -> object:
    """The graph that a replica's step is traced in; None outside of replicas."""
    # Contexts of ours know the graph that is traced, and so do TensorFlow's threads of replicas.
    knows = (distribute_lib.get_replica_context(), threading.current_thread())
    graphs = [getattr(each, "graph", None) for each in knows]
    return next((graph for graph in graphs if isinstance(graph, FuncGraph)), None)


def _outer_graphs(graph: object) -> Iterator[tf.Graph]:
    while isinstance(graph, FuncGraph):
        graph = graph.outer_graph
        if graph is not None:
            yield graph


@contextlib.contextmanager
def outside_of(graphs: list, around: tf.Graph) -> Iterator[None]:
    """Within it, operations are traced in the graph `around` the loops `graphs`, if there are."""
    with around.as_default() if graphs else contextlib.nullcontext():
        yield
