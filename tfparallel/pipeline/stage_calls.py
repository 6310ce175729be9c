"""Calls of the executor by the thread of each microbatch, with all that comes along.

That is masks and losses of layers, what BatchNorm has averaged, and what other layers assign.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals.numbers_in_shapes import from_shape, in_shape
from tfparallel.pipeline.deferred_batch_norm import DeferredBatchNorm
from tfparallel.pipeline.executors import Executors
from tfparallel.pipeline.flat_tensors import Arguments, flat_tensors, split_at
from tfparallel.pipeline.known_logits import origins_for
from tfparallel.pipeline.masks import as_on_one_device
from tfparallel.pipeline.parts import Calls
from tfparallel.pipeline.rematerialization import Rematerialization
from tfparallel.pipeline.traced_result import TracedResult, losses_apart
from tfparallel.replicas.all_rows import RowsNeededInFunctionError
from tfparallel.replicas.row_seeds import RowSeeds
from tfparallel.replicas.state_changes import StateChanges


class StageCalls:
    """Calls of the executor by the thread of each microbatch."""

    def __init__(
        self,
        executor: Executors,
        current_microbatch: Callable,
        deferred: DeferredBatchNorm,
        changes: StateChanges,
        rematerialization: Rematerialization,
        row_seeds: RowSeeds | None = None,
    ):
        self._executor, self._current_microbatch = executor, current_microbatch
        self._row_seeds = row_seeds
        self._deferred, self._changes = deferred, changes
        self._rematerialization = rematerialization
        self.last_stage = executor.num_stages - 1
        self._graph = tf.compat.v1.get_default_graph()
        self._thread = threading.local()
        self._results: dict[Any, TracedResult] = {}
        self._of_all_rows: set[object] = set()  # names of computations

    @property
    def around(self) -> Calls:
        """By which graphs' calls the thread has come to where it is."""
        return getattr(self._thread, "around", ())

    @contextlib.contextmanager
    def entered(self, around: Calls) -> Iterator[None]:
        """Within it, `around` is that."""
        before, self._thread.around = self.around, around
        try:
            yield
        finally:
            self._thread.around = before

    @property
    def is_in_step(self) -> bool:
        """Whether the thread is a microbatch's, and in no part and no branch of the step."""
        in_graph = tf.compat.v1.get_default_graph() is self._graph
        return in_graph and self._current_microbatch() is not None

    @property
    def is_in_part(self) -> bool:
        """Whether the thread traces a part of a stage."""
        return getattr(self._thread, "is_in_part", False)

    @contextlib.contextmanager
    def _in_part(self) -> Iterator[None]:
        self._thread.is_in_part = True
        try:
            yield
        finally:
            self._thread.is_in_part = False

    def call(
        self,
        stage: int,
        name: object,
        layers: Sequence,
        function: Callable,
        inputs: Sequence,
        **options: bool,
    ) -> Any:
        """`function(inputs)` on `stage`, or on a later stage if the inputs are made there.

        Args:
            name: of the computation. Its n-th call is the same computation in all microbatches.
            layers: that it calls; losses that they add are carried out of the stage's function.
            function: takes a list of tensors, returns a nest of tensors; both may have Keras masks.
            inputs: tensors, sparse and ragged ones too.
            **options: of `Executor.call`.

        Raises:
            RowsNeededInFunctionError: if one of several layers gathers the rows of all
                microbatches. That layer is to be called alone.
        """
        counts = vars(self._thread).setdefault("counts", collections.Counter())
        counts[name] += 1
        inputs = as_on_one_device(inputs)
        arguments = Arguments(inputs, origins_for(layers, inputs))
        given = self._changes.needed_by(layers)
        assigned = tuple(id(change.variable) for change in given)
        key = (name, counts[name], arguments.key, assigned)

        def flat_function(*flat: tf.Tensor) -> list:
            own, rest = split_at(flat, len(arguments.flat))
            state, own_place = split_at(list(rest), len(given))
            own_inputs = arguments.filled(own)
            apart = self._changes.in_function(own, given, state)
            draws = self._draws(own_place, key[:2])
            with self._in_part(), draws, self._deferred.collected() as statistics, apart as noted:
                outputs, losses = losses_apart(function, layers, own_inputs)
            owners = [layer for layer, _ in losses]
            deferred = [v for v, _ in statistics]
            result = TracedResult(own_inputs, outputs, owners, deferred, noted)
            self._results[key] = result
            # Identities: TensorFlow would hand back an input that is returned, and its mask.
            values = flat_tensors(result.tensors)
            tensors = [*values, *result.masks, *result.logits]
            tensors += [x for _, x in [*losses, *statistics]]
            tensors += [change.value for change in noted.changed]
            tensors += [tensor for _, left in noted.calls for tensor in left]
            return [tf.identity(tensor) for tensor in tensors]

        microbatch = self._current_microbatch()
        given_tensors = [*arguments.flat, *(change.value for change in given), *self._place()]
        stage = self._executor.stage_of_call(stage, microbatch, given_tensors)
        try:
            if name in self._of_all_rows:
                return self._call_as_it_is(stage, key, layers, function, inputs)
            flat = self._executor.call(
                stage, microbatch, key, flat_function, given_tensors, **options
            )
        except RowsNeededInFunctionError:
            if len(layers) != 1 or name in self._of_all_rows:
                raise
            self._of_all_rows.add(name)
            return self._call_as_it_is(stage, key, layers, function, inputs)
        return self._handed_out(self._results[key], inputs, flat, microbatch, layers)

    def _handed_out(
        self,
        result: TracedResult,
        inputs: Sequence,
        flat: Sequence,
        microbatch: int,
        layers: Sequence,
    ) -> object:
        """What the function returned; what else it carried out goes where it belongs."""
        flat, left = split_at(flat, len(flat) - result.num_left)
        for call, tensors in result.calls(left):
            self._changes.leave(call, tensors)
        flat, values = split_at(flat, len(flat) - len(result.changed))
        self._changes.add(result.changed, values, layers)
        flat, values = split_at(flat, len(flat) - len(result.statistics))
        self._deferred.add(microbatch, result.statistics, values)
        return result.filled(inputs, flat)

    def _call_as_it_is(
        self, stage: int, key: tuple, layers: Sequence, function: Callable, inputs: list
    ) -> object:
        """`function(inputs)` in the graph of the step, where microbatches can exchange rows."""
        microbatch, given = self._current_microbatch(), self._changes.needed_by(layers)
        place = self._place()

        def called() -> tuple:
            state = [change.value for change in given]
            apart = self._changes.in_function(flat_tensors(inputs), given, state)
            draws = self._draws(place, key[:2])
            with self._in_part(), draws, self._deferred.collected() as statistics, apart as noted:
                return function(inputs), statistics, noted

        outputs, statistics, noted = self._executor.call(
            stage, microbatch, key, called, [], as_it_is=True
        )
        for call, tensors in noted.calls:
            self._changes.leave(call, tensors)
        self._changes.add(noted.changed, [change.value for change in noted.changed], layers)
        variables, values = [v for v, _ in statistics], [value for _, value in statistics]
        self._deferred.add(microbatch, variables, values)
        return outputs

    def _place(self) -> list[tf.Tensor]:
        """Where random numbers are those of rows: which rows, as the shape of a tensor."""
        place = None if self._row_seeds is None else self._row_seeds.place()
        return [] if place is None else [in_shape(place)]

    def _draws(self, place: Sequence, part: tuple) -> contextlib.AbstractContextManager:
        """In a part that is traced: where random numbers are those of rows."""
        if self._row_seeds is None or not place:
            return contextlib.nullcontext()
        return self._row_seeds.placed(from_shape(place[0], tf.TensorShape([2])), part)

    @contextlib.contextmanager
    def traced(self, stage: int, name: str) -> Iterator[None]:
        """Within it, a layer of `stage` is traced; errors say which.

        Those of operations when they run have both names in the name of the operation.
        """
        try:
            with self._rematerialization.traced(name):
                yield
        except Exception as error:
            end = "of the pipeline."
            is_told = any(note.endswith(end) for note in getattr(error, "__notes__", ()))
            if hasattr(error, "add_note") and not is_told:  # Python 3.11
                error.add_note(f"In layer '{name}' on stage {stage} {end}")
            raise
