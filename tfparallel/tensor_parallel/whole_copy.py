"""A copy in one piece, which an exported function reads in the place of a variable's parts.

A SavedModel holds whole variables. The copy lives as long as the function that reads it.
"""

import weakref
from collections.abc import Callable

import tensorflow as tf

from tfparallel.internals import ResourceVariable, context
from tfparallel.tensor_parallel.known_parts import put_together
from tfparallel.tensor_parallel.rows import Rows

_pieces: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by the graphs that read them


class OnePiece:
    """The copy of one variable, made when it is first asked for.

    Args:
        read_parts: gives the value of each part.
        rows: how they are parts of the whole.
        device: where the copy is.
    """

    def __init__(self, read_parts: Callable[[], list], rows: Rows, device: str):
        self._read_parts, self._rows, self._device = read_parts, rows, device
        self._piece: weakref.ref | None = None

    def updated(self, name: str, trainable: bool) -> tf.Variable:
        """The copy, a `tf.Variable`, with the value of now."""
        piece = None if self._piece is None else self._piece()
        with tf.init_scope(), context.eager_mode(), tf.device(self._device):
            whole = put_together(self._read_parts(), self._rows)
            if piece is None:
                piece = ResourceVariable(whole, trainable=trainable, name=name)
                self._piece = weakref.ref(piece)
            else:
                piece.assign(whole)
        return piece

    def kept_by_graph(self, name: str, trainable: bool) -> tf.Variable:
        """`updated`, for the function that is traced right now."""
        piece, graph = self.updated(name, trainable), tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None:
            _pieces.setdefault(graph, []).append(piece)
            graph = graph.outer_graph
        return piece
