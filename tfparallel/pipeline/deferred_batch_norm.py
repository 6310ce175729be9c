"""BatchNorm whose moving averages take in a batch once, by the statistics of all its rows.

Each microbatch is normalised by its own mean and variance, as ever. What it would assign to the
moving averages is carried out of its stage instead; when all microbatches have passed, the layer's
averages are assigned once:

    mean      = sum_i w_i mean_i                                  w_i: share of the batch's rows
    variance  = sum_i w_i variance_i + sum_i w_i (mean_i - mean)^2

Source: `DeferredBatchNorm` of torchgpipe, Kim et al. 2020, https://arxiv.org/abs/2004.09910, which
has the weights w_i all equal.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals.keras_layers import behind
from tfparallel.internals.ordered_sums import sum_in_order


class DeferredBatchNorm:
    """The BatchNorm layers of one model in one step.

    Attributes:
        shares: for each microbatch its number of rows, an int or a tensor, and its share of the
            batch's rows; to be filled in by who knows them.

    Args:
        layers: BatchNormalization layers with moving averages in variables of
            `tfparallel.pipeline.stage_variables`.
        sum_over_workers: of tensors, each of which is a sum over this process's microbatches.
    """

    def __init__(
        self,
        layers: Sequence[keras.layers.BatchNormalization],
        sum_over_workers: Callable[[list], list] = list,
    ):
        self._sum_over_workers = sum_over_workers
        self.shares: dict[int, tuple[Any, tf.Tensor]] = {}
        self._layers = list(layers)
        self._thread = threading.local()
        self._collecting = 0  # threads: one may wait for others within what is collected
        self._values: dict[int, list[tuple]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[tuple[tf.Variable, tf.Tensor]]]:
        """Within it, the calling thread's assignments are put into the list, and not done."""
        self._thread.collected = []
        self._collecting += 1
        variables = [v for layer in self._layers for v in _averages(layer)]
        for variable in variables:
            variable.deferred_to = self._take
        try:
            yield self._thread.collected
        finally:
            self._collecting -= 1
            for variable in variables:
                variable.deferred_to = self._take if self._collecting else None
            self._thread.collected = None

    def _take(self, variable: object, value: tf.Tensor) -> bool:
        collected = getattr(self._thread, "collected", None)
        if collected is None:
            return False
        collected.append((variable, tf.stop_gradient(value)))
        return True

    def add(self, microbatch: int, variables: Sequence, values: Sequence) -> None:
        """Adds what one call of a stage has collected for a microbatch, in order."""
        if variables:  # none in evaluate and predict
            self._values[microbatch] += zip(map(id, variables), values, strict=True)

    def assign(self) -> None:
        """Assigns the moving averages; called once, when all microbatches are traced."""
        microbatches = sorted(self._values)
        by_variable = [_grouped(self._values[m]) for m in microbatches]
        shares = [self.shares[m] for m in microbatches]
        for layer in self._layers:
            mean, variance = _averages(layer)
            own = [zip(each[id(mean)], each[id(variance)], strict=True) for each in by_variable]
            calls = list(zip(*own, strict=True))
            if calls:
                with tf.device(mean.device):
                    _assign_once(
                        layer.momentum, mean, variance, calls, shares, self._sum_over_workers
                    )


def _assign_once(
    momentum: float,
    mean: tf.Variable,
    variance: tf.Variable,
    calls: Sequence,
    shares: Sequence[tuple],
    sum_over_workers: Callable[[list], list],
) -> None:
    """One update of a layer's averages.

    Args:
        momentum: of the layer.
        mean, variance: its variables.
        calls: for each call of the layer in a step, and each microbatch, what that would have
            assigned to both: `momentum * old + (1 - momentum) * statistics`.
        shares: of the microbatches, as `DeferredBatchNorm.shares`.
        sum_over_workers: as `DeferredBatchNorm` has it.
    """
    has_rows = [tf.greater(rows, 0) for rows, _ in shares]
    weights = [tf.cast(weight, mean.dtype) for _, weight in shares]

    def average(tensors: Sequence) -> tf.Tensor:
        own = zip(tensors, weights, has_rows, strict=True)
        local = sum_in_order([weight * tf.where(ok, x, 0) for x, weight, ok in own])
        return sum_over_workers([local])[0]

    old = new = mean.read_value(), variance.read_value()
    for of_microbatches in calls:
        means, variances = zip(*of_microbatches, strict=True)
        assigned = average(means)
        # Assigned means differ by (1 - momentum) times what the microbatches' means differ by.
        between = average([tf.square(x - assigned) for x in means])
        between *= 1 / (1 - momentum) if momentum < 1 else 0.0
        # A layer's later call finds the averages as its earlier one leaves them.
        new = (
            assigned + momentum * (new[0] - old[0]),
            average(variances) + between + momentum * (new[1] - old[1]),
        )
    for variable, value in zip((mean, variance), new, strict=True):
        for copy in variable.values:
            copy.assign(value)


def _averages(layer: keras.Layer) -> tuple[tf.Variable, tf.Variable]:
    return behind(layer.moving_mean), behind(layer.moving_variance)


def _grouped(values: Sequence[tuple]) -> Mapping[int, list[tf.Tensor]]:
    grouped: dict[int, list] = collections.defaultdict(list)
    for key, value in values:
        grouped[key].append(value)
    return grouped
