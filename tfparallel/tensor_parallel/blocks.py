"""Weights whose last dim is several matrices side by side: those of the gates of an RNN's cell."""

from keras import layers

_GATES: tuple[tuple[type, int], ...] = ((layers.LSTMCell, 4), (layers.GRUCell, 3))


def blocks_of(layer: object) -> int:
    """How many blocks of one size the last dim of a layer's weights has; 1 for nearly all."""
    return next((count for kind, count in _GATES if isinstance(layer, kind)), 1)
