"""A variable in parts is one variable in an exported file: whoever serves it has one device."""

import weakref
from typing import Any

import tensorflow as tf

from tfparallel.internals import ResourceVariable, context

_pieces: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by the graphs that read them


class InOnePiece:
    """A distributed variable that exported functions have as one on the host."""

    distribute_strategy: Any
    trainable: bool
    name: str
    _piece: weakref.ref | None = None

    def _whole_of_files(self) -> tf.Tensor:
        """The whole value; called eagerly, outside of the function that is traced."""
        raise NotImplementedError

    def in_one_piece(self) -> tf.Variable:
        """A copy on the host. It lives as long as the function that reads it."""
        piece = self._piece() if self._piece is not None else None
        host, name = self.distribute_strategy.extended._host_device, self.name.split(":")[0]
        with tf.init_scope(), context.eager_mode(), tf.device(host):
            whole = self._whole_of_files()
            if piece is None:
                piece = ResourceVariable(whole, trainable=self.trainable, name=name)
                self._piece = weakref.ref(piece)
            else:
                piece.assign(whole)
        return piece

    def _exported(self) -> tf.Variable:
        """`in_one_piece()`, for the function that is being traced."""
        piece, graph = self.in_one_piece(), tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None:
            _pieces.setdefault(graph, []).append(piece)
            graph = graph.outer_graph
        return piece

    def _export_to_saved_model_graph(
        self,
        object_map: dict,
        tensor_map: dict,
        options: tf.saved_model.SaveOptions | None = None,
        **kwargs: object,
    ) -> list:
        piece = self.in_one_piece()
        resources = piece._export_to_saved_model_graph(object_map, tensor_map, options, **kwargs)
        object_map[self], tensor_map[self] = object_map[piece], tensor_map[piece.handle]
        return [*resources, self]
