"""Whether operations of a graph wait for one another in a circle."""

import collections
from collections.abc import Iterable

import tensorflow as tf


def has_cycle(graph: tf.Graph, edges: Iterable = ()) -> bool:
    """Whether some operation waits for itself (Kahn's algorithm), with `edges` beside the graph's.

    Args:
        edges: pairs of operations, one before another.
    """
    operations = graph.get_operations()
    needs = {op: {t.op for t in op.inputs} | set(op.control_inputs) for op in operations}
    for before, after in edges:
        needs[after].add(before)
    waits_for = {op: len(needed) for op, needed in needs.items()}
    successors = collections.defaultdict(list)
    for operation in operations:
        for needed in needs[operation]:
            successors[needed].append(operation)
    ready = [operation for operation in operations if not waits_for[operation]]
    for operation in ready:  # grows
        for successor in successors[operation]:
            waits_for[successor] -= 1
            if not waits_for[successor]:
                ready.append(successor)
    return len(ready) < len(operations)
