"""Workers that take some steps alone, and then go on from the mean of their weights."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfparallel.communication.local_sgd import LocalSGD, outer_step
from tfparallel.internals import BaseOptimizer, ResourceVariable
from tfparallel.internals.keras_layers import behind, trained_by
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.local_copies import copies_here, first_copy


class RoundsExtended(Protocol):
    """What a round needs of `strategy.extended`.

    Attributes:
        _statistics: what layers of the model that trains assign of the rows they see (BatchNorm);
            averaged as weights are.
    """

    _statistics: Sequence[tf.Variable]

    def _sum_list_across_workers(self, tensors: list) -> list:
        """Sums of the workers' tensors, in one all-reduce for each dtype."""


class LocalRounds(tf.Module):
    """The rounds of one optimizer, on this worker.

    Args:
        spec: how long a round is, and how the next one begins.
        optimizer: built; its variables, and those that it trains, differ by worker within a round.
        extended: sums what the workers have.
    """

    def __init__(self, spec: LocalSGD, optimizer: BaseOptimizer, extended: RoundsExtended):
        super().__init__(name="local_rounds")
        self.compressor = spec
        self._extended = extended
        self._trained = [behind(variable) for variable in trained_by(optimizer)]
        self._slots = [behind(variable) for variable in optimizer.variables]
        with tf.init_scope():
            self._steps = ResourceVariable(0, name="rounds/steps")
            self._weight = ResourceVariable(0.0, dtype=tf.float64, name="rounds/weight")
            anchored = self._trained if spec.has_anchor else []
            self._anchors = [
                ResourceVariable(_wide(first_copy(v)), name="anchor") for v in anchored
            ]
            self._momenta = [ResourceVariable(tf.zeros_like(v), name="m") for v in self._anchors]

    @property
    def _averaged(self) -> list[tf.Variable]:
        return [*self._trained, *self._extended._statistics]

    def count_step(self, weight: tf.Tensor) -> tf.Tensor:
        """Counts a step of this worker, and ends the round after the last one.

        Args:
            weight: this worker's rows over all workers' rows in this step.

        Returns:
            Whether the round has ended, a scalar bool that is alike on all workers.
        """
        self._steps.assign_add(1)
        self._weight.assign_add(tf.cast(weight, tf.float64))
        is_over = self._steps >= self.compressor.every
        self._end_if(is_over)
        return is_over

    @tf.function
    def end_now(self) -> None:
        """Ends a round before its time, where there is one; all workers call it."""
        self._end_if(self._steps > 0)

    def _end_if(self, is_over: tf.Tensor) -> None:
        tf.cond(is_over, self._end, lambda: tf.constant(False))

    def _end(self) -> tf.Tensor:
        own = [_mean_of_copies(v) for v in self._averaged]
        weighted = [v * tf.cast(self._weight, v.dtype) for v in own]
        weight = self._weight.read_value()
        total, *sums = self._extended._sum_list_across_workers([weight, *weighted])
        self._go_on_from([each / tf.cast(total, each.dtype) for each in sums])
        return tf.constant(True)

    def _go_on_from(self, means: list[tf.Tensor]) -> None:
        """The next round begins where the mean of the workers' weights leads to."""
        for i, anchor in enumerate(self._anchors):
            means[i], momentum = outer_step(self.compressor, anchor, means[i], self._momenta[i])
            self._momenta[i].assign(momentum)
            anchor.assign(means[i])
        for variable, mean in zip(self._averaged, means, strict=True):
            _assign(variable, mean)
        self._steps.assign(0)
        self._weight.assign(0.0)

    # ---- state, which differs by worker as that of a compression does ----------------------------

    def state(self) -> dict[str, np.ndarray]:
        """What this worker has that others have not, by name; its weights and slots too."""
        named = self._named().items()
        return {name: np.asarray(first_copy(variable).numpy()) for name, variable in named}

    def set_state(self, states: Sequence[Mapping[str, np.ndarray]], world_size: int) -> None:
        """Sets what `state` returned.

        Args:
            states: this worker's own; or, where another number of workers saved them, those of all:
                their round ends then, and slots get their mean.
            world_size: how many workers there are now.

        Raises:
            KeyError, ValueError: if `states` are of another model, optimizer or kind of rounds.
        """
        del world_size
        for name, variable in self._named().items():
            values = [state[name] for state in states]
            is_mean = len(values) > 1 and np.issubdtype(values[0].dtype, np.floating)
            _assign(variable, tf.constant(np.mean(values, 0) if is_mean else values[0]))
        if len(states) > 1 and states[0]["steps"] > 0:
            weights = [float(state["weight"]) for state in states]
            names = [n for n in self._named() if n.startswith(("trained/", "statistics/"))]
            self._go_on_from(
                [
                    _wide(tf.constant(np.average([s[name] for s in states], 0, weights)))
                    for name in names
                ]
            )

    def shared_variables(self) -> list[tf.Variable]:
        """What a worker that joins takes from the others; rounds have none that is theirs alone."""
        return [*self._anchors, *self._momenta]

    def _named(self) -> dict[str, tf.Variable]:
        kinds = {
            "trained": self._trained,
            "statistics": self._extended._statistics,
            "slot": self._slots,
            "anchor": self._anchors,
            "momentum": self._momenta,
        }
        named = {f"{kind}/{i}": v for kind, vs in kinds.items() for i, v in enumerate(vs)}
        return {**named, "steps": self._steps, "weight": self._weight}


def scaled(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> tf.Tensor:
    """`gradient * factor`; rows stay rows."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _mean_of_copies(variable: tf.Variable) -> tf.Tensor:
    """Copies of weights are alike; statistics are of each replica's rows within a step."""
    copies = [_wide(copy) for copy in copies_here(variable)]
    return copies[0] if len(copies) == 1 else sum_in_order(copies) / len(copies)


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    """In at least 32 bits, in which sums are taken."""
    tensor = tf.convert_to_tensor(tensor)
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    for copy in copies_here(variable):
        copy.assign(tf.cast(value, copy.dtype))
