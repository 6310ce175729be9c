"""Nests of tensors of all kinds, with Keras masks, as the dense tensors that a function takes."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import get_keras_mask, set_keras_mask
from tfparallel.internals.probabilities import Origin, with_origin

TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)


def flat_tensors(tensors: Sequence) -> list[tf.Tensor]:
    """The dense tensors that these are made of."""
    return tf.nest.flatten(tensors, expand_composites=True)


def filled(tensors: Sequence, flat: Sequence) -> list:
    """Tensors like these, made of the first of `flat`."""
    num = len(flat_tensors(tensors))
    return tf.nest.pack_sequence_as(list(tensors), flat[:num], expand_composites=True)


def set_masks(tensors: Sequence, like: Sequence, masks: Sequence) -> None:
    """Gives the first of `masks` to those tensors that have one in `like`."""
    rest = iter(masks)
    for tensor, mask in zip(tensors, like, strict=True):
        if mask is not None:
            set_keras_mask(tensor, next(rest))


def as_often_as(like: Sequence, tensors: Sequence) -> list:
    """These `tensors`, the same object in several places where `like` has one in them."""
    first = dict(zip(map(id, reversed(like)), reversed(tensors), strict=True))
    return [first[id(x)] for x in like]


def present(masks: Sequence) -> list:
    """Those that are not None."""
    return [mask for mask in masks if mask is not None]


class Arguments:
    """Tensors of a call, with their masks and logits, as the dense tensors that a function takes.

    Args:
        tensors: of all kinds.
        origins: what the function is to know of each of them.

    Attributes:
        flat: the dense tensors.
        key: equal for calls whose functions are given as many of them, for the same.
    """

    def __init__(self, tensors: Sequence, origins: Sequence[Origin | None]):
        self._tensors, self._origins = tensors, origins
        self._masks = [get_keras_mask(x) for x in tensors]
        masks, logits = present(self._masks), [x for x, _ in present(origins)]
        self.flat = [*flat_tensors(tensors), *masks, *logits]
        self._num_masks, self._num_logits = len(masks), len(logits)
        of_masks = tuple(mask is not None for mask in self._masks)
        self.key = of_masks, tuple(origin and (origin.operation,) for origin in origins)

    def filled(self, flat: Sequence) -> list:
        """The tensors within the function, of what it is given for `self.flat`."""
        rest, logits = split_at(flat, len(flat) - self._num_logits)
        _, masks = split_at(rest, len(rest) - self._num_masks)
        own, own_logits = filled(self._tensors, flat), iter(logits)
        pairs = zip(own, self._origins, strict=True)
        own = [with_origin(x, origin, origin and next(own_logits)) for x, origin in pairs]
        set_masks(own, self._masks, masks)
        return as_often_as(self._tensors, own)


def split_at(values: Sequence, at: int) -> tuple[Sequence, Sequence]:
    """The first `at` of `values`, and the others."""
    return values[:at], values[at:]
