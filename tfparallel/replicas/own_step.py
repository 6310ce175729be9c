"""A step of a user's own, traced before it runs: what it would do is read off, and tried, there."""

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals.gradients_asked_for import has_own_gradients, is_of_gradient
from tfparallel.internals.graphs import FuncGraph
from tfparallel.internals.keras_layers import layers_of
from tfparallel.internals.traced_values import (
    computed_from,
    draws_otherwise,
    rows_drawn_behind,
    state_of_later_behind,
)
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.dependence import Assignment, assignments, reaches
from tfparallel.replicas.replica_step import ReplicaStep
from tfparallel.replicas.row_trial import (
    NUM_ROWS,
    TrialOutcome,
    UntriableError,
    found_for,
    trial,
)

_FEW_DIGITS = "float16", "bfloat16"
_SCALES = 0.0, 1.0, 2.0**10, 2.0**20  # powers of two round nothing
_SCALES_OF_FLOAT16 = 0.0, 0.25, 1.0, 4.0  # which has few of them
_OF_ROUNDING = 1e-5  # relative, of a gradient that is zero but for that
_OF_LINES = 0.1  # relative; what is on none is several times as large, or as small


class RefusedStepError(ValueError):
    """A step would train to other weights than on one device."""


@dataclass
class StepOfOwnRows:
    """A step of a user's own, traced as one replica sees it.

    Attributes:
        graph: of the step.
        context: in which it was traced.
        data: the batch there, a nest of tensors.
        weight: of the replica, a placeholder of the graph; None if it is 1.
        scale: of gradients by variables, a placeholder of the graph; None if it is 1.
        of_layers: the ids of the operations that calls of layers with rules of their own have made.
        losses: what the step takes gradients of with respect to variables.
        replica: of the trace; None if it is for a part of a batch.
        outputs: what the step returns.
        given_to_metrics: numbers, by the names of the metrics.
    """

    graph: FuncGraph
    context: BuildContext
    data: object = None
    weight: tf.Tensor | None = None
    scale: tf.Tensor | None = None
    of_layers: set[int] = field(default_factory=set)
    losses: list[tf.Tensor] = field(default_factory=list)
    replica: ReplicaStep | None = None
    outputs: object = None
    given_to_metrics: dict[str, tf.Tensor] = field(default_factory=dict)

    def rows(self) -> list[tf.Tensor]:
        """The dense tensors of the batch."""
        return [x for x in tf.nest.flatten(self.data, expand_composites=True) if x is not None]

    def own_operations(self) -> list[tf.Operation]:
        """Those of the step itself."""
        return [x for x in self.graph.get_operations() if id(x) not in self.of_layers]

    def all_assignments(self) -> list[Assignment]:
        """What the step and its layers assign."""
        return list(assignments(self.graph, set(map(id, self.rows())), self.context.met))

    def assignments(self) -> list[Assignment]:
        """What the step itself assigns."""
        return [x for x in self.all_assignments() if id(x.operation) not in self.of_layers]

    def has(self, value: object) -> bool:
        """Whether `value` is a tensor of the step itself, of no branch, loop or function in it."""
        return isinstance(value, tf.Tensor) and getattr(value, "graph", None) is self.graph

    def is_coupled_by_layers(self) -> bool:
        """Whether layers have a state of all rows, which they get when the step runs."""
        made = [x for x in self.all_assignments() if id(x.operation) in self.of_layers]
        return any(each.depends for each in made)

    def is_of_own_rows(self, value: tf.Tensor) -> bool:
        """Whether `value` depends on rows, and on none of other replicas.

        Also if it is computed of random numbers that a trial leaves to chance it tells nothing.
        """
        own = set(map(id, self.rows()))
        return reaches(value, own) and not (self.is_of_others(value) or draws_otherwise(value))

    def is_of_others(self, value: tf.Tensor) -> bool:
        """Whether `value` is computed of rows of other replicas, or as if it were."""
        return reaches(value, self.context.met)

    def chooses_rows_by_chance(self, value: tf.Tensor) -> bool:
        """Whether random numbers choose, or shuffle, rows of which `value` is computed."""
        own = set(map(id, self.rows()))
        drawn = rows_drawn_behind(value)
        return any(reaches(x, own) and not self.is_of_others(x) for x in drawn)

    def depends_on_scale(self, value: tf.Tensor) -> bool:
        """Whether `value` is computed of gradients by variables."""
        return value.op.name in self._of_scale

    def is_of_tape(self, gradient: tf.Tensor) -> bool:
        """Whether a tape was asked for `gradient` by variables, and nobody has changed it."""
        name = gradient.op.name
        return name in self._of_scale and name not in self._of_changed

    def has_backward_of_its_own(self) -> bool:
        """Whether the user says how some gradient is computed, or what it begins with."""
        is_begun = self.replica is not None and self.replica.has_output_gradients
        return is_begun or has_own_gradients(self.graph)

    @functools.cached_property
    def _of_scale(self) -> set[str]:
        """The names of the operations that compute of gradients by variables."""
        scale: tf.Tensor | None = self.scale
        return set() if scale is None else _computed_of([scale.op])

    @functools.cached_property
    def _of_changed(self) -> set[str]:
        """Of these, the names of what is computed of such a gradient by anything but a tape."""
        found = map(self.graph.get_operation_by_name, self._of_scale)
        return _computed_of(x for x in found if x.inputs and not is_of_gradient(x))

    def kinds_of(
        self,
        value: tf.Tensor,
        computed_in: str | None = None,
        at_most: int | None = None,
        is_scaled: bool = False,
        loss_scales: Sequence[float] = (),
    ) -> frozenset[str]:
        """What `value`, of floating point, is to parts of a batch: tried on random ones.

        Now, and as far as it can be computed with what counters and other scalars may be later.

        Args:
            value: of the graph, in no branch, loop or function.
            computed_in, at_most: as `row_trial.found_for` takes them.
            is_scaled: tries it for gradients by variables of several sizes, too.
            loss_scales: what the loss is multiplied with, one after the other, in a step that
                weighs it. `value` is `[2, numbers]` then: numbers, and the size of what each is of.

        Returns:
            As `row_trial.Found.kinds`; none if gradients times s do not make a + b s of it.

        Raises:
            UntriableError: it cannot be computed on any, or the batch is not of dense tensors.
        """
        tried = functools.partial(self._kinds_of, value, computed_in)
        kinds = tried(at_most, is_scaled, loss_scales)
        later = state_of_later_behind(value)
        if not later:
            return kinds
        with contextlib.suppress(UntriableError):
            kinds &= tried(1, is_scaled, loss_scales, later)
        return kinds

    def _kinds_of(
        self,
        value: tf.Tensor,
        computed_in: str | None,
        at_most: int | None,
        is_scaled: bool,
        loss_scales: Sequence[float],
        state: Mapping[str, float] | None = None,
    ) -> frozenset[str]:
        leaves = tf.nest.flatten(self.data)
        if not all(leaf is None or isinstance(leaf, tf.Tensor) for leaf in leaves):
            raise UntriableError from TypeError("the batch has ragged or sparse tensors")
        parts = self.data if isinstance(self.data, tuple) else ()  # x, y and weights, as Keras has
        roles = [*parts, None][:3] if len(parts) in (2, 3) else [self.data, None, None]
        data, targets, weights = (tf.nest.map_structure(_spec, part) for part in roles)
        of_replica = [x for x in (self.weight, self.scale) if x is not None]
        compute = computed_from(self.graph, [*self.rows(), *of_replica], value, state)
        scales = _SCALES_OF_FLOAT16 if computed_in == "float16" else _SCALES
        at_scales: list[np.ndarray] = []

        def outcome(*given: object) -> TrialOutcome:
            targets, data, weights = given
            leaves = [x for x in tf.nest.flatten([data, targets, weights]) if x is not None]

            def computed(scale: float = 1.0, loss_scale: float = 1.0) -> tf.Tensor:
                weight = loss_scale * len(leaves[0]) / NUM_ROWS
                numbers = tf.constant([weight, scale], tf.float64)
                return compute([*leaves, *tf.unstack(numbers)[: len(of_replica)]])

            if loss_scales:
                of_scales = [computed(loss_scale=scale) for scale in loss_scales]
                numbers, sizes = tf.unstack(tf.stack(of_scales, axis=1))  # [loss scales, numbers]
                return TrialOutcome(numbers, numbers, sizes=_sizes(sizes.numpy(), computed_in))
            number = computed()
            if is_scaled and not at_scales and np.all(np.isfinite(number)):
                values = [number if scale == 1.0 else computed(scale) for scale in scales]
                at_scales.extend(each.numpy() for each in values)  # of one rows drawn: enough
            return TrialOutcome(number, number)

        with trial():
            found = found_for(outcome, targets, data, weights, computed_in, True, at_most)
        return found.kinds if _are_on_a_line(scales, at_scales) else frozenset()


def few_digits_of(model: keras.Model) -> str | None:
    """The dtype of few digits that layers of `model` compute in, if any does."""
    few = [x.compute_dtype for x in layers_of(model) if x.compute_dtype in _FEW_DIGITS]
    return max(few, default=None)


def _computed_of(operations: Iterable[tf.Operation]) -> set[str]:
    """The names of `operations`, and of all that their graph computes of them."""
    stack = list(operations)
    found = {operation.name for operation in stack}
    while stack:
        users = {x.name: x for value in stack.pop().outputs for x in value.consumers()}
        stack += [users[name] for name in users.keys() - found]
        found |= users.keys()
    return found


def _spec(leaf: tf.Tensor | None) -> tf.TensorSpec | None:
    return None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype)


def _sizes(sizes: np.ndarray, computed_in: str | None) -> np.ndarray:
    """`[loss scales, numbers]` by which to compare; infinite of what is rounding at the first.

    And of what float16 has fewer digits for than others.
    """
    is_rounding = sizes[0] <= _OF_ROUNDING * np.max(sizes[0])
    if computed_in == "float16":
        is_rounding = is_rounding | (sizes < np.finfo(np.float16).smallest_normal)
    return np.where(is_rounding, np.inf, sizes)


def _are_on_a_line(scales: Sequence[float], values: Sequence[np.ndarray]) -> bool:
    """Whether `values`, the first at 0, are a + b s for each of `scales`, as far as they go."""
    if not values:
        return True
    if not np.all(np.isfinite(values[0])):
        return False  # divided by the norm of gradients
    known = [(s, v) for s, v in zip(scales, values, strict=True) if np.all(np.isfinite(v))]
    last, of_last = known[-1]
    for scale, value in known[1:]:
        expected = values[0] + (of_last - values[0]) * (scale / last)
        largest = max(np.max(np.abs(value)), np.max(np.abs(expected)))
        if np.max(np.abs(value - expected)) > _OF_LINES * largest:
            return False
    return True
