"""Carries a schedule out inside one traced step: TensorFlow's own executor is the engine.

While the step is traced, every stage's computation is a function that is traced once and called for
each microbatch. Its calls, and their backward calls, are placed on the stage's device. At the end
control dependencies put the calls on each device into the schedule's order. When the step runs, an
operation starts as soon as its inputs are there and its device has come to it: that is the
pipeline.

                        traced once              called for every microbatch
    stage 0  device A   forward_0, backward_0    F0 F1 F2    B0 F3 B1 ...
    stage 1  device B   forward_1, backward_1       F0 F1 B0 F2 B1 ...

Source: GPipe, Huang et al., https://arxiv.org/abs/1811.06965; PipeDream, Narayanan et al.,
https://arxiv.org/abs/2006.09503, for 1F1B.
"""

import collections
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import (
    has_one_tape,
    record,
    run_independently,
    unique_number,
    variable_accessed,
)
from tfparallel.internals.graphs import place, run_after
from tfparallel.pipeline.clock import add_clock
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.rematerialization import Rematerialization
from tfparallel.pipeline.rounds import Rounds
from tfparallel.segments.segment_function import StageFunction, inference_function

Pass = tuple[int, Action]  # in which round

_MOST_BETWEEN = 4  # operations from a gradient back to the call that has made it


class Executor:
    """The calls of one step.

    Args:
        schedule: the order of actions on each device.
        device_names: the device of each of `schedule`'s devices.
        rematerialization: what is computed again in the backward pass. Default: nothing.
        hosts: for each of `schedule`'s devices, the one where what the forward pass keeps is until
            the backward pass takes it. Default: the device itself.
    """

    def __init__(
        self,
        schedule: Schedule,
        device_names: Sequence[str],
        rematerialization: Rematerialization | None = None,
        hosts: Sequence[str] | None = None,
    ):
        self._schedule, self._device_names, self._hosts = schedule, device_names, hosts
        self._rematerialization = rematerialization or Rematerialization("none", schedule)
        self._rounds = Rounds()
        self._fetches: dict[Pass, list[tf.Operation]] = collections.defaultdict(list)
        self._traced: dict[Hashable, Any] = {}
        self._functions: dict[Hashable, Any] = {}
        self._trainable: dict[Any, Sequence] = {}
        self._calls: dict[Pass, list[tf.Operation]] = collections.defaultdict(list)
        self._action_of: dict[tf.Operation, Action] = {}
        self._sums: dict[int, list[tf.Operation]] = collections.defaultdict(list)

    @property
    def num_stages(self) -> int:
        """How many stages the schedule has."""
        return self._schedule.num_stages

    def device_of(self, stage: int) -> str:
        """The name of the device of `stage`."""
        return self._device_names[self._schedule.device_of[stage]]

    def stage_of_call(self, stage: int, microbatch: int, inputs: Iterable) -> int:
        """Where `stage`'s part runs for `microbatch`: there, or where the last of `inputs` is made.

        A microbatch goes forward through the stages, once in a round.
        """
        if stage == self.num_stages - 1:
            return stage
        in_round, made_on = self._rounds.latest(inputs)
        return max(stage, made_on) if in_round == self._rounds.current(microbatch) else stage

    def end_round(self, microbatch: int) -> None:
        """Tells that what `microbatch` computes next may need all others' gradients."""
        self._rounds.come_back(microbatch)

    def call(
        self,
        stage: int,
        microbatch: int,
        key: Hashable,
        function: Callable,
        inputs: list,
        *,
        is_shared: bool = True,
        is_result: bool = False,
    ) -> list:
        """Calls `function(*inputs)` as a part of what `stage` does for `microbatch`.

        Gradient tapes record the call. Its backward pass is on the stage's device too, and in the
        schedule's order; a persistent tape or one inside another gets gradients of gradients right,
        but computes them in no particular order.

        Args:
            key: of the computation: `function` is traced at its first call with a key, and for new
                shapes; later calls use the trace of the first function.
            function: takes tensors, returns a list of tensors.
            inputs: tensors.
            is_shared: whether `function` takes nothing else of its microbatch. If that is not sure
                it is called as it is, in no particular order, where it takes tensors of the step.
            is_result: whether `function` is a loss or a metric, of the round its inputs are of.
        """
        with tf.device(self.device_of(stage)):
            if tf.executing_eagerly():
                return function(*inputs)
            if (stage, key) not in self._traced:
                self._traced[stage, key] = _traced_once(stage, function)
            try:
                concrete = self._traced[stage, key].get_concrete_function(*inputs)
            except RuntimeError:
                if is_shared:
                    raise
                return function(*inputs)  # which asks for what other microbatches have
            if not is_shared and any(map(tf.is_symbolic_tensor, concrete.captured_inputs)):
                return function(*inputs)
            for variable in self._watched_variables(concrete):
                variable_accessed(variable)
            arguments = [*inputs, *concrete.captured_inputs]
            action = Action(stage, microbatch, "forward")
            if is_result:
                in_round, _ = self._rounds.latest(inputs)
            else:
                in_round = self._rounds.current(microbatch)
            if has_one_tape(arguments):
                outputs = self._recorded_call(action, concrete, arguments)
            elif record.should_record_backprop(arguments):
                outputs = concrete(*inputs)
            else:
                name = f"tfparallel_stage_{stage}"
                function = self._once((concrete, "inference"), inference_function, name, concrete)
                outputs = function(self.device_of(stage), arguments)[: len(concrete.outputs)]
        if outputs:
            self._add(in_round, action, outputs[0].op)
        for output in outputs:
            self._rounds.note(output.op, in_round, stage)
        return outputs

    def _recorded_call(self, action: Action, concrete: Any, arguments: list) -> list:
        watched = tuple(record.should_record_backprop([x]) for x in arguments)
        device, name = self.device_of(action.stage), f"tfparallel_stage_{action.stage}"
        options: tuple = (name, concrete, watched)
        if self._rematerialization.is_done(action.stage, action.microbatch):
            options = (*options, self._rematerialization.recomputes)
        function = self._once((concrete, watched, len(options)), StageFunction, *options)
        outputs, stash = function.forward(device, arguments)
        stash = self._offloaded(action, function, stash)

        is_split = action._replace(kind="backward_weight") in self._schedule.actions
        run = function.backward_halves if is_split else function.backward
        first = action._replace(kind="backward_input" if is_split else "backward")

        def backward(*output_gradients: Any) -> list:
            in_round = self._rounds.come_back(action.microbatch)
            self._place_sums(device, output_gradients)
            with tf.device(device):
                fetched = self._fetched((in_round, first), function, stash)
                gradients, calls = run(device, arguments, fetched, output_gradients)
            for kind, operation in calls.items():
                self._add(in_round, action._replace(kind=kind), operation)
                self._rounds.note(operation, in_round, action.stage)
            return gradients

        record.record_operation("tfparallel_stage", outputs, arguments, backward)
        return outputs

    def _place_sums(self, device: str, gradients: Iterable) -> None:
        """Puts sums of a tensor's gradients, which the tape makes just anywhere, on its stage.

        So the gradient of a skip connection goes straight to where the tensor comes from.
        """
        stack = [gradient.op for gradient in gradients if isinstance(gradient, tf.Tensor)]
        while stack:
            operation = stack.pop()
            if operation.type in ("AddN", "AddV2") and operation not in self._action_of:
                place(operation, device)
                stack += [tensor.op for tensor in operation.inputs]

    def _offloaded(self, action: Action, function: StageFunction, stash: list) -> list:
        """What the forward pass keeps, on the host: but for weights, which stay where they are."""
        if self._hosts is None:
            return stash
        host = self._hosts[self._schedule.device_of[action.stage]]
        with record.stop_recording(), tf.device(host):
            moved = [tf.identity(x, "offload") for x in stash[: function.num_activations]]
        return [*moved, *stash[function.num_activations :]]

    def _fetched(self, in_pass: Pass, function: StageFunction, stash: list) -> list:
        if self._hosts is None:
            return stash
        with record.stop_recording():
            fetched = [tf.identity(x, "fetch") for x in stash[: function.num_activations]]
        self._fetches[in_pass] += [x.op for x in fetched]
        return [*fetched, *stash[function.num_activations :]]

    def _watched_variables(self, concrete: Any) -> Sequence:
        """Variables that tapes must hear of, and the step's graph at the first call."""
        if concrete in self._trainable:
            return self._trainable[concrete]
        variables = concrete.graph.variables
        self._trainable[concrete] = [x for x in variables if x.trainable]
        return variables

    def _once(self, key: Hashable, build: Callable, *arguments: Any) -> Any:
        if key not in self._functions:
            self._functions[key] = build(*arguments)
        return self._functions[key]

    def order(self, graph: tf.Graph) -> Schedule:
        """Makes each device's calls follow one another as the schedule says.

        Returns:
            The schedule; or, where something of the step depends on several microbatches, that with
            all forward passes first.

        Raises:
            ValueError: if the step cannot be done in that order either.
        """
        unordered = [
            op
            for op, action in self._action_of.items()
            if action.kind != "forward" or all(x.dtype != tf.resource for x in op.inputs)
        ]
        run_independently(graph, [*unordered, *itertools.chain(*self._sums.values())])
        _place_shapes(graph)
        schedule = self._schedule
        if _has_cycle(graph, self._edges(schedule)):
            schedule = schedule.all_forward_first()
        for before, after in self._edges(schedule):
            run_after(after, before)
        self._hide_from_clustering(graph)
        if _has_cycle(graph):
            raise ValueError(
                "A step of a pipeline does the forward passes of all microbatches, then something "
                "of all of them if it must, then their backward passes. Received: a step that "
                "computes forward again with what came of several microbatches. Move what needs "
                "all rows behind the model's last layer, or train in a strategy that does not cut "
                "the model."
            )
        return schedule

    def _edges(self, schedule: Schedule) -> Iterator[tuple[tf.Operation, tf.Operation]]:
        """What `schedule` adds to the order of operations: pairs of one before another."""
        num_rounds = 1 + max((in_round for in_round, _ in self._calls), default=0)
        for actions in schedule.orders:
            order = [(i, action) for i in range(num_rounds) for action in actions]
            calls = [self._calls[each] for each in order if each in self._calls]
            for before, after in itertools.pairwise(calls):
                yield from itertools.product(before, after)
            # What an action takes from the host is copied while the one before it runs.
            for earlier, each in zip(order, order[2:], strict=False):
                if each in self._fetches:
                    yield from itertools.product(self._calls[earlier], self._fetches[each])

    def add_clock(self, graph: tf.Graph, hosts: Sequence[str]) -> dict[Action, tf.Tensor]:
        """After `order`: when each pass of the first round starts and ends, as `clock.add_clock`.

        Args:
            graph: of the step.
            hosts: for each of the schedule's devices a CPU of its machine.
        """
        stages = range(self._schedule.num_stages)
        own = {stage: hosts[self._schedule.device_of[stage]] for stage in stages}
        first = {action: calls for (i, action), calls in self._calls.items() if i == 0}
        return add_clock(graph, first, own)

    def _hide_from_clustering(self, graph: tf.Graph) -> None:
        """Puts all calls behind an operation on a reference, of which XLA's clustering stays clear.

        To find references, a pass of TensorFlow over the step's graph unpacks the bodies of all
        functions at every call of them, unless the call comes behind a reference anyway. For 32
        microbatches of MobileNetV2 that was 11 s. There is nothing to cluster across stages.
        """
        calls: dict[int, list[tf.Operation]] = collections.defaultdict(list)
        for operation, action in self._action_of.items():
            calls[action.stage].append(operation)
        for stage, operations in calls.items():
            operations += self._sums[stage]
            with graph.as_default(), tf.device(self.device_of(stage)):
                name = f"tfparallel_{unique_number()}"
                reference = tf.raw_ops.TemporaryVariable(shape=[], dtype=tf.float32, var_name=name)
                end = tf.raw_ops.DestroyTemporaryVariable(ref=reference, var_name=name)
            run_independently(graph, [reference.op, end.op])
            for operation in operations:
                run_after(operation, end.op)

    def backward_order(self, stage: int) -> list[int]:
        """The microbatches in the order in which their gradients on `stage` come to be there."""
        order = self._schedule.orders[self._schedule.device_of[stage]]
        kinds = ("backward", "backward_weight")
        return [a.microbatch for a in order if a.stage == stage and a.kind in kinds]

    def note_sum(self, stage: int, operation: tf.Operation) -> None:
        """Tells of a call on `stage` that adds up its gradients, as soon as they are there."""
        self._sums[stage].append(operation)

    def stage_of_gradient(self, gradients: Iterable) -> int:
        """The stage that has made these gradients of one variable, the last one if none has.

        Operations between its backward calls and the gradients (a sum with the gradient of a
        penalty, a weight) get its device.
        """
        stages = [self._place_behind_call(gradient) for gradient in gradients]
        return next((stage for stage in stages if stage is not None), self._schedule.num_stages - 1)

    def _place_behind_call(self, gradient: Any) -> int | None:
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        operation = (gradient.values if is_sparse else gradient).op
        between: list[tf.Operation] = []
        while operation not in self._action_of:
            if len(between) == _MOST_BETWEEN or not operation.inputs:
                return None
            between.append(operation)
            operation = next(
                (x.op for x in operation.inputs if x.op in self._action_of), operation.inputs[0].op
            )
        stage = self._action_of[operation].stage
        for each in between:
            place(each, self.device_of(stage))
        return stage

    def _add(self, in_round: int, action: Action, operation: tf.Operation) -> None:
        self._calls[in_round, action].append(operation)
        self._action_of[operation] = action


def _traced_once(stage: int, function: Callable) -> Any:
    def named(*inputs: tf.Tensor) -> list:
        with tf.name_scope(f"stage_{stage}"):  # names the stage in errors of its operations
            return function(*inputs)

    named.__name__ = f"tfparallel_stage_{stage}"
    return tf.function(named, autograph=False)


def _place_shapes(graph: tf.Graph) -> None:
    """Asks for a tensor's shape where the tensor is, which else would be sent for no more.

    Keras's own step asks for that of the inputs where it computes the loss.
    """
    for operation in graph.get_operations():
        if operation.type == "Shape" and (device := operation.inputs[0].device):
            place(operation, device)


def _has_cycle(graph: tf.Graph, edges: Iterable = ()) -> bool:
    """Whether some operation waits for itself (Kahn's algorithm), with `edges` beside the graph's.

    Args:
        edges: pairs of operations, one before another.
    """
    operations = graph.get_operations()
    needs = {op: {t.op for t in op.inputs} | set(op.control_inputs) for op in operations}
    for before, after in edges:
        needs[after].add(before)
    waits_for = {op: len(needed) for op, needed in needs.items()}
    successors = collections.defaultdict(list)
    for operation in operations:
        for needed in needs[operation]:
            successors[needed].append(operation)
    ready = [operation for operation in operations if not waits_for[operation]]
    for operation in ready:  # grows
        for successor in successors[operation]:
            waits_for[successor] -= 1
            if not waits_for[successor]:
                ready.append(successor)
    return len(ready) < len(operations)
