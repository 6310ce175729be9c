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
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.internals import distribute_lib, has_one_tape, record
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.internals.keras_layers import has_stock_moments
from tfparallel.replicas.weighed_gradients import all_reduce, all_reduce_gradients


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
    synchronised = _Synchronised(layer, context, inputs, mask)
    mean, variance = synchronised.statistics(inputs)
    return (mean, variance) if mask is None else _as_masked(mean, variance, synchronised.total)


class _Synchronised:
    """The statistics of one call of a layer, over the rows of all replicas.

    Attributes:
        total: how many values each channel has, `[channels]`; once there are statistics.
    """

    total: tf.Tensor

    def __init__(
        self,
        layer: keras.Layer,
        context: tf.distribute.ReplicaContext,
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
    ):
        self._context = context
        self._channels = inputs.shape[layer.axis]
        self._masks = [] if mask is None else [mask]
        self._functions = _functions(layer, inputs, mask)

    def statistics(self, inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance, `[channels]`."""
        if not has_one_tape([inputs]):
            return tf.custom_gradient(self._with_gradient)(inputs)
        with record.stop_recording():  # nobody asks for the gradient of what is in here
            statistics, backward = self._with_gradient(inputs)
        # `tf.custom_gradient` would pass all of it through operations of its own.
        record.record_operation("Moments", statistics, [inputs], lambda *g: [backward(*g)])
        return statistics

    def _with_gradient(self, x: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable]:
        count = _count_by_channel(self._masks, x, self._channels)
        (sums,) = all_reduce(self._context, [self._functions.own_sums(x, count, *self._masks)])
        mean, variance, self.total = self._functions.join(sums)
        for numbers in (mean, variance):
            numbers.set_shape([self._channels])

        def backward(*gradients: tf.Tensor) -> tf.Tensor:
            (joined,) = all_reduce_gradients(self._context, [tf.stack(gradients)])
            gradient = self._functions.backward(x, mean, self.total, joined, *self._masks)
            gradient.set_shape(x.shape)
            return gradient

        return (mean, variance), backward


class _Functions(NamedTuple):
    """What is computed for one layer, as functions: a call of one is one operation to trace.

    Attributes:
        own_sums: of a replica's inputs and its part of `W`, one number (and a mask): `[3,
            channels]`, its parts of `W`, `S` and `Q`.
        join: of their sum over replicas: mean, variance and `W`, `[channels]`.
        backward: of inputs, mean, `W` and the gradients of mean and variance, `[2, channels]` (and
            a mask): the inputs' gradient.
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

    def along_channels(numbers: tf.Tensor) -> tf.Tensor:
        if axis == rank - 1:
            return numbers
        return tf.reshape(numbers, [-1 if i == axis else 1 for i in range(rank)])

    def kept(tensor: tf.Tensor, mask: tuple) -> tf.Tensor:
        return tf.where(tf.cast(mask[0], tf.bool)[..., None], tensor, 0) if mask else tensor

    def own_sums(x: tf.Tensor, count: tf.Tensor, *mask: tf.Tensor) -> tf.Tensor:
        total = tf.reduce_sum(kept(x, mask), reduced)
        mean = tf.math.divide_no_nan(total, tf.cast(count, x.dtype))
        deviations = kept(tf.math.squared_difference(x, along_channels(mean)), mask)
        squares = tf.cast(tf.reduce_sum(deviations, reduced), tf.float64)
        mean = tf.cast(mean, tf.float64)
        sums = count * mean
        return tf.stack([count * tf.ones_like(mean), sums, squares + sums * mean])

    def join(all_sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        total, sums, squares = tf.unstack(all_sums)
        mean = tf.math.divide_no_nan(sums, total)
        variance = tf.maximum(tf.math.divide_no_nan(squares, total) - mean * mean, 0)
        return tf.cast(mean, dtype), tf.cast(variance, dtype), tf.cast(total, dtype)

    def backward(
        x: tf.Tensor,
        mean: tf.Tensor,
        total: tf.Tensor,
        gradients: tf.Tensor,
        *mask: tf.Tensor,
    ) -> tf.Tensor:
        of_mean, of_variance = tf.unstack(tf.math.divide_no_nan(gradients, total))
        slope = along_channels(2 * of_variance) * (x - along_channels(mean))
        return kept(along_channels(of_mean) + slope, mask)

    masks = [] if mask_spec is None else [mask_spec]
    x, channels = tf.TensorSpec([None] * rank, dtype), tf.TensorSpec([None], dtype)
    sums, gradients = tf.TensorSpec([3, None], tf.float64), tf.TensorSpec([2, None], dtype)
    return _Functions(
        _function(own_sums, x, tf.TensorSpec([], tf.float64), *masks),
        _function(join, sums),
        _function(backward, x, channels, channels, gradients, *masks),
    )


def _function(body: Callable, *specs: tf.TensorSpec) -> Callable:
    return tf.function(body, autograph=False).get_concrete_function(*specs)


def _count_by_channel(masks: list, x: tf.Tensor, channels: int) -> tf.Tensor:
    """How many values of each channel of `x` count, a float64; all channels have as many.

    Where sizes are known when tracing it is a constant, which no device has to be sent.
    """
    if masks:
        return tf.cast(tf.math.count_nonzero(masks[0]), tf.float64)
    if x.shape.is_fully_defined():
        return tf.constant(x.shape.num_elements() / channels, tf.float64)
    return tf.cast(tf.size(x, tf.int64), tf.float64) / channels


def _as_masked(mean: tf.Tensor, variance: tf.Tensor, total: tf.Tensor) -> tuple:
    """What Keras gives for masked inputs: it divides by a little more than their number."""
    share = total / (total + keras.backend.epsilon())
    return share * mean, share * (variance + tf.square((share - 1) * mean))
