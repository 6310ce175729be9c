"""What layers assign in a step, kept apart for each microbatch and assigned once per batch.

On one device a layer that counts its calls, or normalises its own kernel, does so once per batch.
In a pipeline every microbatch calls it. So nothing is assigned on the way: a microbatch computes
with the state of the step's beginning and with what it would have assigned itself. When all have
passed, and before an optimizer looks at a gradient, each variable is assigned once:

    what would be assigned                         what is
    ---------------------------------------------  -----------------------------------------------
    a value that no row has a part in: a counter,  that of the last microbatch, as all are equal
    the kernel of SpectralNormalization
    what a layer makes of its rows                 what it makes of all (`CallOfAllRows`)
    another value that depends on rows: a moving   the mean of the microbatches' values, weighted by
    average of means                               rows: one device's, where it is a mean over rows
    the same, of whole numbers                     refused, as they have no mean

Metrics and seeds are not concerned: microbatches change them one after another. Nor are BatchNorm's
averages, for which `DeferredBatchNorm` and the order of microbatches are rules of their own.

Note: whether a value depends on rows
-------------------------------------
is read off the graph that was traced for it, by going back from the value. Going back meets either
the tensors of the microbatch (what a stage's function is given, or the microbatch itself) or only
constants and variables. That needs no run, no data and no second trace, and is exact where a trial
on some rows could miss what other rows show. What calls a branch or a loop takes counts as what its
results depend on, so the answer errs to "depends" only. Eagerly there is no graph: values that are
equal for all microbatches are taken as they are.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfparallel.internals.keras_layers import behind, layers_of, own_variables
from tfparallel.replicas.dependence import Reached
from tfparallel.replicas.joined_values import means_by_rows
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.row_trial import is_trial


@dataclass(frozen=True)
class Change:
    """What a microbatch would assign.

    Attributes:
        variable: a variable of `tfparallel.pipeline.stage_variables`.
        value: a tensor.
        depends: whether it depends on the microbatch's rows.
        layers: the ids of the layers in whose call it was assigned; none outside of layers.
        assigned: the tensor that was assigned, of which `value` is a copy; None from elsewhere.
    """

    variable: Any
    value: tf.Tensor
    depends: bool
    layers: frozenset[int] = frozenset()
    assigned: tf.Tensor | None = None


class CallOfAllRows(Protocol):
    """A call of a layer whose state is to be computed from the rows of all microbatches."""

    def changes_of_all(self, changes: "StateChanges", parts: Sequence[Sequence]) -> list[tuple]:
        """Variables, and what they become by the tensors of all microbatches."""
        ...


@dataclass
class Noted:
    """What was noted while a function was traced.

    Attributes:
        changed: what it assigns.
        calls: that are to be made of all rows, with the tensors of the microbatch.
    """

    changed: list[Change] = field(default_factory=list)
    calls: list[tuple[CallOfAllRows, list]] = field(default_factory=list)


@dataclass
class _Function:
    """A function that a thread traces.

    Attributes:
        graph: of the function.
        arguments: its tensors of a microbatch.
        changes: what is assigned, by the ids of the variables.
        noted: what it does.
        has_rows: whether the microbatch has rows; None until that is asked.
        reached: what is known of the operations of `graph`.
    """

    graph: Any
    arguments: Sequence[tf.Tensor]
    changes: dict[int, Change]
    noted: Noted = field(default_factory=Noted)
    has_rows: bool | tf.Tensor | None = None
    reached: Reached = field(default_factory=Reached)


class StateChanges:
    """The changes of one step.

    Args:
        model: whose step it is.
        current_microbatch: gives the calling thread's microbatch, or None outside of microbatches.
        current_inputs: gives the tensors of the calling thread's microbatch.
        shares: for each microbatch its number of rows, and its share of the batch's rows; known
            when all have passed.
        sum_over_workers: of tensors, each of which is a sum over this process's microbatches.
    """

    def __init__(
        self,
        model: keras.Model,
        current_microbatch: Callable,
        current_inputs: Callable,
        shares: Mapping[int, tuple],
        sum_over_workers: Callable[[list], list] = list,
    ):
        self._model, self._shares, self._sum_over_workers = model, shares, sum_over_workers
        self._current_microbatch, self._current_inputs = current_microbatch, current_inputs
        self._graph = tf.compat.v1.get_default_graph()
        self._changes: dict[int, dict[int, Change]] = collections.defaultdict(dict)
        self._calls: dict[int, list[tuple]] = collections.defaultdict(list)
        self._reached: dict[int | None, Reached] = collections.defaultdict(Reached)
        self._thread = threading.local()

    @property
    def _function(self) -> "_Function | None":
        """What the calling thread traces."""
        return getattr(self._thread, "function", None)

    # ---- asked by variables ----------------------------------------------------------------------

    def seen(self, variable: tf.Variable) -> tf.Tensor | None:
        """What the calling thread has assigned to `variable`; None if nothing, or in a trial."""
        change = self._own().get(id(variable))
        return None if change is None or is_trial() else change.value

    def take(self, variable: tf.Variable, value: tf.Tensor) -> bool:
        """Takes note of an assignment, but for a trial's; whether it is thereby dealt with."""
        if is_trial():
            return True
        graph = self._graph if self._function is None else self._function.graph
        is_in_branch = tf.compat.v1.get_default_graph() is not graph
        is_outside = self._current_microbatch() is None and not self.is_recomputing
        if is_outside or self._is_applying() or is_in_branch:
            return False
        assigned = tf.convert_to_tensor(value, variable.dtype)
        value = tf.stop_gradient(assigned)
        value.shape.assert_is_compatible_with(variable.shape)
        step = current_replica_step()
        is_of_part = step is None or not step.has_all_rows
        depends = is_of_part and tf.is_symbolic_tensor(value) and self._depends(value)
        own = self._own()
        if id(variable) in own:  # no search ends any more at the value before
            self._known_to_reach().forget()
        own[id(variable)] = Change(variable, value, depends, assigned=assigned)
        return True

    def leave(self, call: CallOfAllRows, tensors: list) -> None:
        """Leaves a call that the calling thread makes of a microbatch, to be made of all rows."""
        own = self._function
        calls = self._calls[self._current_microbatch()] if own is None else own.noted.calls
        calls.append((call, tensors))

    @property
    def is_recomputing(self) -> bool:
        """Whether the calling thread makes a call that has been left."""
        return getattr(self._thread, "is_recomputing", False)

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Within it, the calling thread is, for what layers assign; metrics have counted before."""
        self._thread.is_recomputing = True
        try:
            yield
        finally:
            self._thread.is_recomputing = False

    @property
    def is_in_layer(self) -> bool:
        """Whether a layer is being traced."""
        return self._function is not None

    def check_is_outside_of_layers(self, variable: object) -> None:
        """Refuses what `take` does not take, in a layer.

        Raises:
            ValueError: naming the variable and its layer.
        """
        if self._function is not None:
            raise ValueError(
                "In a pipeline a layer must assign its variables by assign, assign_add or "
                "assign_sub, outside of branches and loops of TensorFlow: every microbatch calls "
                "it, and the variable is assigned once. Received: an assignment of another kind, "
                f"or in tf.cond or tf.while_loop, of {self._name(variable)}. Compute the value "
                "there and assign it behind."
            )

    def _own(self) -> dict[int, Change]:
        """The changes of the function that is being traced, or of the calling microbatch."""
        if self._function is not None:
            return self._function.changes
        microbatch = self._current_microbatch()
        return {} if microbatch is None else self._changes[microbatch]

    def _depends(self, value: tf.Tensor) -> bool:
        known = self._own().values()
        rows = {id(change.value) for change in known if change.depends}
        rows |= self._given()
        ends = {id(change.value) for change in known}
        return self._known_to_reach().reaches(value, rows, ends)

    def _known_to_reach(self) -> Reached:
        """Of the function that is being traced, or of the calling microbatch."""
        own = self._function
        return self._reached[self._current_microbatch()] if own is None else own.reached

    def _given(self) -> set[int]:
        """The ids of the tensors that come with the microbatch."""
        function = self._function
        if function is None:
            return set(map(id, self._current_inputs()))
        captures = getattr(function.graph, "captures", ())
        taken = {
            id(inner)
            for outer, inner in captures
            if tf.is_symbolic_tensor(outer) and inner.dtype != tf.resource
        }
        return taken | set(map(id, function.arguments))

    def has_rows(self) -> bool | tf.Tensor:
        """Whether the calling thread's microbatch has rows, by the tensors that come with it."""
        own = self._function
        if own is None:
            return _have_rows(self._current_inputs())
        if own.has_rows is None:
            with own.graph.as_default():  # a branch may ask first
                own.has_rows = _have_rows(own.arguments)
        return own.has_rows

    # ---- asked by calls of stages ----------------------------------------------------------------

    def needed_by(self, layers: Iterable) -> list[Change]:
        """What the calling thread's microbatch has assigned, and a call of `layers` may read."""
        microbatch = self._current_microbatch()
        if not self._changes.get(microbatch):
            return []
        layers = _flat_layers(layers)
        own = {id(behind(variable)) for layer in layers for variable in layer.variables}
        ids = frozenset(map(id, layers))
        return [
            change
            for key, change in self._changes[microbatch].items()
            if not change.layers or key in own or change.layers & ids
        ]

    @contextlib.contextmanager
    def in_function(
        self, arguments: Sequence, given: Sequence[Change], values: Sequence
    ) -> Iterator[Noted]:
        """Within it, a stage's function is traced, and what it does is noted.

        Args:
            arguments: of the function, tensors of a microbatch.
            given: what the microbatch has assigned before, as `needed_by` tells.
            values: the function's arguments that stand for these.
        """
        around, pairs = self._function, zip(given, values, strict=True)
        before = {id(c.variable): Change(c.variable, v, c.depends) for c, v in pairs}
        graph = tf.compat.v1.get_default_graph()
        own = _Function(graph, arguments, dict(before))
        self._thread.function = own
        try:
            yield own.noted
            changed = [c for key, c in own.changes.items() if before.get(key) is not c]
            own.noted.changed += changed
        finally:
            self._thread.function = around

    def add(self, changed: Sequence[Change], values: Sequence, layers: Iterable) -> None:
        """Adds what a call of a stage's function has returned for the calling microbatch."""
        if not changed:
            return
        ids = frozenset(map(id, _flat_layers(layers)))
        own = self._changes[self._current_microbatch()]
        for change, value in zip(changed, values, strict=True):
            own[id(change.variable)] = Change(change.variable, value, change.depends, ids)

    # ---- asked by the step -----------------------------------------------------------------------

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        """Within it, the calling thread's assignments are an optimizer's, and done at once."""
        self._thread.is_applying = True
        try:
            yield
        finally:
            self._thread.is_applying = False

    def _is_applying(self) -> bool:
        return getattr(self._thread, "is_applying", False)

    def _of_all_rows(self) -> set[int]:
        """Assigns what the calls that were left make of all rows; the ids of the variables."""
        calls = [self._calls[microbatch] for microbatch in sorted(self._calls)]
        self._calls.clear()
        assigned = set()
        for call_of_each in zip(*calls, strict=True):
            call = call_of_each[0][0]
            for variable, value in call.changes_of_all(self, [part for _, part in call_of_each]):
                _assign_all(variable, value)
                assigned.add(id(variable))
        return assigned

    def assign(self) -> None:
        """Assigns what all microbatches have assigned so far; called outside of microbatches.

        Raises:
            ValueError: naming a variable whose values have no mean.
        """
        by_variable: dict[int, dict[int, Change]] = collections.defaultdict(dict)
        for microbatch in sorted(self._changes):
            for key, change in self._changes[microbatch].items():
                by_variable[key][microbatch] = change
        self._changes.clear()
        self._reached.clear()
        done = self._of_all_rows()
        means: dict[tuple, list] = collections.defaultdict(list)
        for changes in (by_variable[key] for key in by_variable if key not in done):
            last = changes[max(changes)]
            if self._is_mean(changes, last.variable):
                means[_together(last.variable, changes)].append(changes)
            else:
                _assign_all(last.variable, last.value)
        for group in means.values():
            self._assign_means(group)

    def _is_mean(self, changes: Mapping[int, Change], variable: tf.Variable) -> bool:
        """Whether `variable` becomes the mean of microbatches' values; else all are alike."""
        values = [change.value for change in changes.values()]
        if not any(change.depends for change in changes.values()) and _are_alike(values):
            return False
        if not variable.dtype.is_floating:
            raise ValueError(
                "What a layer assigns to a variable of whole numbers must not depend on the rows "
                "of the batch in a pipeline, where each microbatch has some of them. Received: "
                f"{self._name(variable)} of type {variable.dtype.name}. Use a metric such as "
                "keras.metrics.Sum to add up over rows, or a floating-point mean over rows."
            )
        return True

    def _assign_means(self, group: Sequence[Mapping[int, Change]]) -> None:
        """Assigns variables of one device and dtype, which the same microbatches have changed."""
        microbatches = list(group[0])
        variables = [changes[microbatches[0]].variable for changes in group]
        values = [[changes[i].value for changes in group] for i in microbatches]
        with tf.device(variables[0].device):
            means = means_by_rows(variables, values, [self._shares[i] for i in microbatches])
            for variable, mean in zip(variables, self._sum_over_workers(means), strict=True):
                _assign_all(variable, mean)

    def _name(self, variable: tf.Variable) -> str:
        for layer in layers_of(self._model):
            for own in own_variables(layer):
                if behind(own) is variable:
                    return f"variable '{own.name}' of layer '{layer.name}'"
        return f"variable '{variable.name}'"


def _together(variable: tf.Variable, changes: Mapping[int, Change]) -> tuple:
    """Equal for variables whose means are computed as one tensor."""
    alone = None if variable.shape.is_fully_defined() else id(variable)
    return variable.device, variable.dtype, tuple(changes), alone


def _assign_all(variable: tf.Variable, value: tf.Tensor) -> None:
    with tf.device(variable.device):
        for copy in variable.values:
            copy.assign(value)


def _have_rows(tensors: Iterable) -> bool | tf.Tensor:
    """Whether all of `tensors` have rows; computed where that is asked, and sent nowhere."""
    with_rows = [each for each in tensors if tf.is_tensor(each) and each.shape.rank]
    if any(each.shape[0] == 0 for each in with_rows):
        return False
    unknown = [each for each in with_rows if each.shape[0] is None]
    found = [tf.reduce_any(tf.fill(tf.shape(each)[:1], True)) for each in unknown]
    return functools.reduce(tf.logical_and, found) if found else True


def _flat_layers(operations: Iterable) -> list[keras.Layer]:
    layers = [each for each in operations if isinstance(each, keras.Layer)]
    return [own for each in layers for own in layers_of(each)]


def _are_alike(values: Sequence[tf.Tensor]) -> bool:
    """Whether all are equal, as far as one can see: what is traced has no values yet."""
    if tf.is_symbolic_tensor(values[0]):
        return True
    return all(bool(tf.reduce_all(tf.equal(value, values[0]))) for value in values)


def current_inputs() -> list[tf.Tensor]:
    """The dense tensors of the calling thread's microbatch."""
    step = current_replica_step()
    return [] if step is None else tf.nest.flatten(step.inputs, expand_composites=True)
