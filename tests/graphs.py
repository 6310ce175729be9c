"""What operations of a graph wait for."""

import graphlib

import tensorflow as tf


def waited_for(graph: tf.Graph) -> dict[tf.Operation, set[tf.Operation]]:
    """For each operation all that it waits for, directly or not."""
    needs = {
        operation: {*(x.op for x in operation.inputs), *operation.control_inputs}
        for operation in graph.get_operations()
    }
    waits: dict[tf.Operation, set[tf.Operation]] = {}
    for operation in graphlib.TopologicalSorter(needs).static_order():
        waits[operation] = needs[operation].union(*(waits[each] for each in needs[operation]))
    return waits
