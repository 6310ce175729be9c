"""Graphs of segments, which are differentiated as graphs: no gradient tape looks into them.

What code records on tapes in them counts for nothing. So what is a loop or a branch in such a graph
is one for the graph, not for the step around it.
"""

import weakref

_graphs: weakref.WeakSet = weakref.WeakSet()


def note_segment(graph: object) -> None:
    """Tells that `graph`, of a function under construction, is a segment's."""
    _graphs.add(graph)


def is_of_segment(graph: object) -> bool:
    """Whether `graph` is a segment's."""
    return graph in _graphs
