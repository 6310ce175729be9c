"""A step of a user's own, traced before it runs: what it would do is read off, and tried, there."""

from collections.abc import Callable
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfparallel.internals.graphs import FuncGraph
from tfparallel.internals.keras_layers import layers_of
from tfparallel.internals.traced_values import computed_from, draws_otherwise
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.dependence import Assignment, assignments, reaches
from tfparallel.replicas.row_trial import (
    NUM_ROWS,
    Found,
    TrialOutcome,
    UntriableError,
    found_for,
    trial,
)

_FEW_DIGITS = "float16", "bfloat16"


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
    """

    graph: FuncGraph
    context: BuildContext
    data: object = None
    weight: tf.Tensor | None = None
    scale: tf.Tensor | None = None
    of_layers: set[int] = field(default_factory=set)
    losses: list[tf.Tensor] = field(default_factory=list)

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

    def depends_on_scale(self, value: tf.Tensor) -> bool:
        """Whether `value` is computed of gradients by variables."""
        return self.scale is not None and reaches(value, {id(self.scale)})

    def found_for(
        self,
        value: tf.Tensor,
        computed_in: str | None = None,
        at_most: int | None = None,
        watch: Callable[[Callable[[float], tf.Tensor], tf.Tensor], None] = lambda *_: None,
    ) -> Found:
        """What `value`, of floating point, is to parts of a batch: tried on random ones.

        Args:
            value: of the graph, in no branch, loop or function.
            computed_in, at_most: as `row_trial.found_for` takes them.
            watch: is given, for each rows that it is computed of, what computes it at a `scale`,
                and what that gave at 1.

        Raises:
            UntriableError: it cannot be computed on any, or the batch is not of dense tensors.
        """
        leaves = tf.nest.flatten(self.data)
        if not all(leaf is None or isinstance(leaf, tf.Tensor) for leaf in leaves):
            raise UntriableError from TypeError("the batch has ragged or sparse tensors")
        parts = self.data if isinstance(self.data, tuple) else ()  # x, y and weights, as Keras has
        roles = [*parts, None][:3] if len(parts) in (2, 3) else [self.data, None, None]
        data, targets, weights = (tf.nest.map_structure(_spec, part) for part in roles)
        of_replica = [x for x in (self.weight, self.scale) if x is not None]
        compute = computed_from(self.graph, [*self.rows(), *of_replica], value)

        def outcome(*given: object) -> TrialOutcome:
            targets, data, weights = given
            leaves = [x for x in tf.nest.flatten([data, targets, weights]) if x is not None]

            def at_scale(scale: float) -> tf.Tensor:
                numbers = tf.constant([len(leaves[0]) / NUM_ROWS, scale], tf.float64)
                return compute([*leaves, *tf.unstack(numbers)[: len(of_replica)]])

            number = at_scale(1.0)
            watch(at_scale, number)
            return TrialOutcome(number, number)

        with trial():
            return found_for(outcome, targets, data, weights, computed_in, True, at_most)


def few_digits_of(model: keras.Model) -> str | None:
    """The dtype of few digits that layers of `model` compute in, if any does."""
    few = [x.compute_dtype for x in layers_of(model) if x.compute_dtype in _FEW_DIGITS]
    return max(few, default=None)


def _spec(leaf: tf.Tensor | None) -> tf.TensorSpec | None:
    return None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype)
