"""Which operations run: the graphs that are divided between devices, and what a profiler sees."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

# The graphs that run, as they were divided between devices: the profiler names operations only.
from tensorflow.python.eager import context

from tfparallel.internals.profile_planes import Ran, read_profile

__all__ = ["OPTIONS", "Node", "collected_graphs", "profiled"]

OPTIONS = tf.profiler.experimental.ProfilerOptions(
    host_tracer_level=3,  # every operation, however short
    python_tracer_level=0,
)


class Node(NamedTuple):
    """An operation of a graph that was divided between devices.

    Attributes:
        operation: its type.
        device: its full name.
        inputs: names of nodes that it takes something of, or waits for.
        to: of what is sent from device to device, to which.
        tensor: and its name.
    """

    operation: str
    device: str
    inputs: tuple[str, ...]
    to: str = ""
    tensor: str = ""


@contextlib.contextmanager
def collected_graphs() -> Iterator[dict[str, Node]]:
    """Fills the table, by name, with the nodes of all functions that first run within it.

    Where names are the same, that of the larger graph stays.
    """
    nodes: dict[str, Node] = {}
    own = context.context()
    own.enable_graph_collection()
    try:
        yield nodes
        metadata = own.export_run_metadata()
    finally:
        own.disable_graph_collection()
    graphs = [graph for each in metadata.function_graphs for graph in each.partition_graphs]
    for graph in sorted(graphs, key=lambda graph: len(graph.node)):
        nodes.update({node.name: _node(node) for node in graph.node})


def _node(node: tf.compat.v1.NodeDef) -> Node:
    inputs = tuple(each.lstrip("^").partition(":")[0] for each in node.input)
    to, tensor = (node.attr[key].s.decode() for key in ("recv_device", "tensor_name"))
    return Node(node.op, node.device, inputs, to, tensor)


@contextlib.contextmanager
def profiled() -> Iterator[list[Ran]]:
    """Fills the list with what runs within it.

    Raises:
        tf.errors.AlreadyExistsError: while another profiler is running.
    """
    ran: list[Ran] = []
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, OPTIONS)
        try:
            yield ran
        finally:
            tf.profiler.experimental.stop()
        for path in Path(folder).rglob("*.xplane.pb"):
            ran += read_profile(path).ran
