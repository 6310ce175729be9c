"""Synchronised BatchNorm reduces the statistics of a layer at once, and as precisely as one device.

Keras sums `x`, `x**2` and a count over replicas, in three all-reduces forward and three backward,
and takes the variance as `mean(x**2) - mean(x)**2`, of which little is left where the mean is
large. What is masked it does not synchronise. Here every replica computes as one device does, and
one all-reduce forward and one backward join, for each channel,

    W = sum_i w_i                               w_i: replica i's values, but for masked ones
    S = sum_i w_i mean_i
    Q = sum_i w_i (variance_i + mean_i^2)

    mean = S / W        variance = Q / W - (S / W)^2

These few numbers are float64, where that difference is as exact as the input's own statistics.

Source: Chan, Golub, LeVeque 1983, https://doi.org/10.1080/00031305.1983.10483115
"""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.internals import ReduceOp, distribute_lib, has_one_tape, record
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.internals.keras_layers import has_stock_moments
from tfparallel.replicas.weighed_gradients import all_reduce_gradients


def hook_batch_norm(layer: object) -> None:
    """Makes `layer` reduce its statistics at once, if it synchronises. Twice changes nothing."""
    stock = keras.layers.BatchNormalization
    if not isinstance(layer, stock) or not layer.synchronized or "_moments" in vars(layer):
        return
    if has_stock_moments(layer):
        hook_once(
            layer,
            "_moments",
            wrapped(layer, "_moments", functools.partial(_moments, layer)),
            why="Synchronised BatchNorm takes one all-reduce of float64 numbers, also with masks.",
        )


def _moments(layer: keras.Layer, moments: Callable, inputs: tf.Tensor, mask: object) -> tuple:
    """`BatchNormalization._moments`: mean and variance, `[channels]`, of the rows of all replicas.

    Args:
        layer: which is called.
        moments: its own method.
        inputs: `[rows, ..., channels, ...]`.
        mask: `[rows, ...]`, of inputs whose channels come last; or None.
    """
    context = distribute_lib.get_replica_context()
    if context is None or num_replicas(context.strategy) == 1:
        return moments(inputs, mask)
    functions = _functions(layer, inputs, mask)
    kept = [] if mask is None else [mask]
    masked_total: list = []

    @tf.custom_gradient
    def joined(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        """`[2, channels]`: mean and variance."""
        once = has_one_tape([x])  # then nobody asks for the gradient of what is in here
        with record.stop_recording() if once else contextlib.nullcontext():
            count = _count_by_channel(mask, x, inputs.shape[layer.axis])
            sums = context.all_reduce(ReduceOp.SUM, functions.own_sums(x, count, *kept))
            statistics, total = functions.join(sums)
        statistics.set_shape([2, inputs.shape[layer.axis]])
        masked_total.append(total)

        def backward(gradients: tf.Tensor) -> tf.Tensor:
            (gradients,) = all_reduce_gradients(context, [gradients])
            gradient = functions.backward(x, statistics, total, gradients, *kept)
            gradient.set_shape(x.shape)
            return gradient

        return statistics, backward

    mean, variance = tf.unstack(joined(inputs))
    return (mean, variance) if mask is None else _as_masked(mean, variance, masked_total[0])


class _Functions(NamedTuple):
    """What is computed for one layer, as functions: a call of one is one operation to trace.

    Attributes:
        own_sums: of a replica's inputs and its part of `W`, one number (and a mask): `[3,
            channels]`, its parts of `W`, `S` and `Q`.
        join: of their sum over replicas: `[2, channels]`, mean and variance; and `W`, `[channels]`.
        backward: of inputs, `join`'s results and the gradients of mean and variance (and a mask):
            the inputs' gradient.
    """

    own_sums: Callable
    join: Callable
    backward: Callable


def _functions(layer: keras.Layer, inputs: tf.Tensor, mask: tf.Tensor | None) -> _Functions:
    mask_spec = None if mask is None else tf.TensorSpec([None] * mask.shape.rank, mask.dtype)
    return _traced(inputs.dtype, inputs.shape.rank, layer.axis, mask_spec)


@functools.cache
def _traced(dtype: tf.DType, rank: int, axis: int, mask_spec: tf.TensorSpec | None) -> _Functions:
    """For inputs of any size: layers that differ in sizes share them."""
    axis %= rank
    reduced = [i for i in range(rank) if i != axis]
    along_channels = [1] * rank
    along_channels[axis] = -1

    def kept(tensor: tf.Tensor, mask: tuple) -> tf.Tensor:
        return tf.where(tf.cast(mask[0], tf.bool)[..., None], tensor, 0) if mask else tensor

    def own_sums(x: tf.Tensor, count: tf.Tensor, *mask: tf.Tensor) -> tf.Tensor:
        total = tf.reduce_sum(kept(x, mask), reduced)
        mean = tf.math.divide_no_nan(total, tf.cast(count, x.dtype))
        deviations = kept(tf.math.squared_difference(x, tf.reshape(mean, along_channels)), mask)
        squares = tf.cast(tf.reduce_sum(deviations, reduced), tf.float64)
        mean = tf.cast(mean, tf.float64)
        counts = tf.fill(tf.shape(mean), count)
        return tf.stack([counts, count * mean, squares + count * mean * mean])

    def join(all_sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        total, sums, squares = tf.unstack(all_sums)
        mean = tf.math.divide_no_nan(sums, total)
        variance = tf.maximum(tf.math.divide_no_nan(squares, total) - mean * mean, 0)
        return tf.cast(tf.stack([mean, variance]), dtype), tf.cast(total, dtype)

    def backward(
        x: tf.Tensor,
        statistics: tf.Tensor,
        total: tf.Tensor,
        gradients: tf.Tensor,
        *mask: tf.Tensor,
    ) -> tf.Tensor:
        of_mean, of_variance = tf.unstack(tf.math.divide_no_nan(gradients, total))
        deviation = x - tf.reshape(statistics[0], along_channels)
        slope = tf.reshape(2 * of_variance, along_channels) * deviation
        return kept(tf.reshape(of_mean, along_channels) + slope, mask)

    masks = [] if mask_spec is None else [mask_spec]
    x, rows = tf.TensorSpec([None] * rank, dtype), tf.TensorSpec([2, None], dtype)
    sums, total = tf.TensorSpec([3, None], tf.float64), tf.TensorSpec([None], dtype)
    return _Functions(
        _function(own_sums, x, tf.TensorSpec([], tf.float64), *masks),
        _function(join, sums),
        _function(backward, x, rows, total, rows, *masks),
    )


def _function(body: Callable, *specs: tf.TensorSpec) -> Callable:
    return tf.function(body, autograph=False).get_concrete_function(*specs)


def _count_by_channel(mask: object, x: tf.Tensor, channels: int) -> tf.Tensor:
    """How many values of each channel of `x` count, a float64; all channels have as many.

    Where sizes are known when tracing it is a constant, which no device has to be sent.
    """
    if mask is not None:
        return tf.cast(tf.math.count_nonzero(mask), tf.float64)
    return tf.cast(tf.size(x, tf.int64), tf.float64) / channels


def _as_masked(mean: tf.Tensor, variance: tf.Tensor, total: tf.Tensor) -> tuple:
    """What Keras gives for masked inputs: it divides by a little more than their number."""
    share = total / (total + keras.backend.epsilon())
    return share * mean, share * (variance + tf.square((share - 1) * mean))
