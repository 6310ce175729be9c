"""Where a gradient would pass a loop or a branch, which knows nothing of what tapes record.

The body of a loop (every RNN of Keras has one) is differentiated as a graph. In it, each part of a
variable would count for the part alone. So what a tape watches is read in the graph of the step,
before the loop, and the loop takes the whole as an input.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfparallel.internals import FuncGraph, distribute_lib, record
from tfparallel.segments.differentiated_graphs import is_of_segment


def is_in_loop() -> bool:
    """Whether a gradient would pass a loop, a branch or a function around the caller."""
    return record.could_possibly_record() and _default_graph() is not _recording_graph()[0]


@contextlib.contextmanager
def before_loops() -> Iterator[None]:
    """Within it, operations are made where the step is traced, before the loops around the caller.

    Raises:
        NotImplementedError: in a `tf.function` inside of the step: it may be called in another step
            than it was traced in, and cannot take what is read before it.
    """
    if not is_in_loop():
        yield
        return
    graph, is_reached = _recording_graph()
    if not is_reached:
        raise NotImplementedError(
            "A variable in parts gets its gradient where the step itself, a loop or a branch reads "
            "it. Received: a read in a tf.function within the step. Remove the @tf.function: the "
            "step is compiled as a whole."
        )
    with graph.as_default():
        yield


def _default_graph() -> tf.Graph:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _recording_graph() -> tuple[tf.Graph, bool]:
    """The outermost graph that loops lead to, and whether the step's own is not further out."""
    graph: Any = _default_graph()
    step = _step_graph()
    while graph is not step and getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    if graph is step or is_of_segment(graph) or step not in _outer_graphs(graph):
        return graph, True
    return step, False


def _step_graph() -> tf.Graph:
    """The graph that is traced for the caller's replica; contexts and threads know it."""
    knows: tuple[Any, ...] = (distribute_lib.get_replica_context(), threading.current_thread())
    return next((each.graph for each in knows if getattr(each, "graph", None) is not None), None)


def _outer_graphs(graph: object) -> Iterator[tf.Graph]:
    while isinstance(graph, FuncGraph):
        graph = graph.outer_graph
        yield graph
