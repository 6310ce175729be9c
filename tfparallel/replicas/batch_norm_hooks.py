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

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import ReduceOp, distribute_lib
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.internals.keras_layers import has_stock_moments, reduction_axes
from tfparallel.replicas.replica_step import all_reduce_gradients


def hook_batch_norm(layer: Any) -> None:
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


def _moments(layer: Any, moments: Callable, inputs: tf.Tensor, mask: Any) -> tuple:
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
    along_channels = [1] * inputs.shape.rank
    along_channels[layer.axis] = -1

    def kept(tensor: tf.Tensor) -> tf.Tensor:
        return tensor if mask is None else tf.where(tf.cast(mask, tf.bool)[..., None], tensor, 0)

    def own_sums(x: tf.Tensor) -> tf.Tensor:
        """`[3, channels]`: this replica's part of `W`, `S` and `Q`."""
        total = tf.reduce_sum(kept(x), reduction_axes(layer))
        count = _count_by_channel(mask, x, total)
        mean = tf.math.divide_no_nan(total, tf.cast(count, x.dtype))
        deviations = kept(tf.math.squared_difference(x, tf.reshape(mean, along_channels)))
        squares = tf.cast(tf.reduce_sum(deviations, reduction_axes(layer)), tf.float64)
        mean = tf.cast(mean, tf.float64)
        return tf.stack([tf.fill(mean.shape, count), count * mean, squares + count * mean * mean])

    @tf.custom_gradient
    def joined(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        """`[3, channels]`: mean, variance and `W`."""
        total, sums, squares = tf.unstack(context.all_reduce(ReduceOp.SUM, own_sums(x)))
        mean = tf.math.divide_no_nan(sums, total)
        variance = tf.maximum(tf.math.divide_no_nan(squares, total) - mean * mean, 0)
        statistics = tf.cast(tf.stack([mean, variance, total]), x.dtype)

        def backward(gradients: tf.Tensor) -> tf.Tensor:
            (gradients,) = all_reduce_gradients(context, [gradients])
            mean, _, total = tf.unstack(statistics)
            of_mean, of_variance, _ = tf.unstack(tf.math.divide_no_nan(gradients, total))
            deviation = x - tf.reshape(mean, along_channels)
            slope = tf.reshape(2 * of_variance, along_channels) * deviation
            return kept(tf.reshape(of_mean, along_channels) + slope)

        return statistics, backward

    mean, variance, total = tf.unstack(joined(inputs))
    return (mean, variance) if mask is None else _as_masked(mean, variance, total)


def _count_by_channel(mask: Any, x: tf.Tensor, channels: tf.Tensor) -> tf.Tensor:
    """How many values of each channel of `x` count, a float64; all channels have as many."""
    if mask is not None:
        return tf.cast(tf.math.count_nonzero(mask), tf.float64)
    return tf.cast(tf.size(x, tf.int64), tf.float64) / channels.shape[0]


def _as_masked(mean: tf.Tensor, variance: tf.Tensor, total: tf.Tensor) -> tuple:
    """What Keras gives for masked inputs: it divides by a little more than their number."""
    share = total / (total + keras.backend.epsilon())
    return share * mean, share * (variance + tf.square((share - 1) * mean))
