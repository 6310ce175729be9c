"""The global norm of accumulated gradients, known before any replica updates.

Replicas that share a copy of one weight have copies of their own of another. Both count in the
norm, and the first replica clears what was accumulated for the shared one when it has updated:

                 0  squares of pieces     1  updates                      2  updates
    replica 0         once, for both         the pieces, clears them         -
    replica 1                                -                               its bias, by the norm
                                                                             of pieces too
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import BaseOptimizer, distribute_lib
from tfparallel.internals.keras_layers import accumulated_gradient, behind, trained_by
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.replicas.clipping import sum_of_numbers, sum_of_squares, widest
from tfparallel.replicas.optimizer_hooks import build_optimizer
from tfparallel.sharded.shard_view import GlobalNumbers, current_numbers, shard_view
from tfparallel.sharded.update import is_clipped, scale_before_clipping
from tfparallel.tensor_parallel.clipping_parts import clipped_in_parts, squares_in_parts
from tfparallel.tensor_parallel.split_variable import SplitVariable


def with_known_norm(
    optimizer: BaseOptimizer, gradients: Sequence, variables: Sequence | None
) -> contextlib.AbstractContextManager:
    """Within it, `optimizer` clips by the norm of all accumulated gradients on every replica.

    Called by all replicas, with gradients of all rows; `variables` as `apply` gets them.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not (inner.gradient_accumulation_steps and inner.global_clipnorm):
        return contextlib.nullcontext()
    own = list(variables or trained_by(optimizer))
    pairs = [(g, v) for g, v in zip(gradients, own, strict=True) if is_clipped(g, v)]
    shared = [_is_shared(variable) for _, variable in pairs]
    if not any(shared) or all(shared):  # of none or of all the first replica's norm counts
        return contextlib.nullcontext()
    build_optimizer(optimizer, own)
    in_pieces = [pair for pair, is_shared in zip(pairs, shared, strict=True) if is_shared]

    def merge(
        strategy: tf.distribute.Strategy, *gradients: tf.distribute.DistributedValues
    ) -> tf.Tensor:
        firsts = [strategy.experimental_local_results(gradient)[0] for gradient in gradients]
        scale = scale_before_clipping(inner, optimizer)
        squares = [
            _accumulated_squares(inner, gradient, variable, scale)
            for gradient, (_, variable) in zip(firsts, in_pieces, strict=True)
        ]
        dtype = widest(squares)
        return tf.stack([tf.cast(square, dtype) for square in squares])

    context = distribute_lib.get_replica_context()
    known = iter(tf.unstack(context.merge_call(merge, args=[g for g, _ in in_pieces])))
    return shard_view(GlobalNumbers([next(known) if each else None for each in shared], None))


def _is_shared(variable: keras.Variable) -> bool:
    value = behind(variable)
    return isinstance(value, SplitVariable) and value.shards > 1


def _accumulated_squares(
    inner: BaseOptimizer, gradient: Gradient, variable: keras.Variable, scale: tf.Tensor
) -> tf.Tensor:
    """Of what an update at the end of an accumulation uses; each piece is squared where it is."""
    weight, before = behind(variable), behind(accumulated_gradient(inner, variable))
    squares = []
    pieces = weight.pieces(tf.convert_to_tensor(gradient))
    for piece, stored in zip(pieces, before.parts[0], strict=True):
        with tf.device(stored.device):
            unscaled = piece / tf.cast(scale, piece.dtype)
            total = unscaled + stored.read_value()
            squares.append(sum_of_squares(total / inner.gradient_accumulation_steps))
    return sum_of_numbers(squares)


def clipping_by_known_norm(
    optimizer: BaseOptimizer, others: Mapping[str, Callable]
) -> Mapping[str, Callable]:
    """`others`, hooks of `optimizer`, of which the one that clips uses a known norm."""
    if "_clip_gradients" not in others:
        return others
    otherwise = others["_clip_gradients"]

    def clip(original: Callable, gradients: Sequence) -> list:
        numbers = current_numbers()
        if numbers is None or numbers.squares is None:
            return otherwise(original, gradients)
        gradients = list(gradients)
        squares = [
            squares_in_parts(gradient) if known is None else known
            for gradient, known in zip(gradients, numbers.squares, strict=True)
        ]
        return clipped_in_parts(optimizer, gradients, squares)

    return {**others, "_clip_gradients": clip}
