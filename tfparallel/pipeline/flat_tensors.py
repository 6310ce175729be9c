"""Nests of tensors of all kinds, with Keras masks, as the dense tensors that a function takes."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals import set_keras_mask
from tfparallel.internals.logits import Origin, with_origin

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


def with_origins(tensors: Sequence, origins: Sequence[Origin | None], logits: Sequence) -> list:
    """These, of which those with an origin get the next of `logits`."""
    rest = iter(logits)
    pairs = zip(tensors, origins, strict=True)
    return [x if origin is None else with_origin(x, origin, next(rest)) for x, origin in pairs]


def as_often_as(like: Sequence, tensors: Sequence) -> list:
    """These `tensors`, the same object in several places where `like` has one in them."""
    first = dict(zip(map(id, reversed(like)), reversed(tensors), strict=True))
    return [first[id(x)] for x in like]


def present(masks: Sequence) -> list:
    """Those that are not None."""
    return [mask for mask in masks if mask is not None]


def split_at(values: Sequence, at: int) -> tuple[Sequence, Sequence]:
    """The first `at` of `values`, and the others."""
    return values[:at], values[at:]
