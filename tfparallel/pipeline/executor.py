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

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import tensorflow as tf

from tfparallel.internals import (
    has_one_tape,
    record,
    variable_accessed,
)
from tfparallel.internals.graphs import call_with_captures
from tfparallel.pipeline.arguments_on_tape import ArgumentsOnTape
from tfparallel.pipeline.between_passes import place_behind_call, place_sums
from tfparallel.pipeline.clock import add_clock
from tfparallel.pipeline.execution_order import put_in_order
from tfparallel.pipeline.passes import Pass, Passes
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.rematerialization import Rematerialization
from tfparallel.pipeline.rounds import Rounds
from tfparallel.pipeline.stage_functions import StageFunctions
from tfparallel.replicas.forward_mode import check_is_not_followed
from tfparallel.segments.kept_tensors import is_made_of_weights
from tfparallel.segments.offload import from_host, to_host
from tfparallel.segments.segment_function import (
    StageFunction,
    inference_function,
)
from tfparallel.segments.wide_integers import narrowed, widened


class Executor:
    """The calls of one step.

    Args:
        schedule: the order of actions on each device.
        device_names: the device of each of `schedule`'s devices.
        rematerialization: what is computed again in the backward pass. Default: nothing.
        hosts: for each of `schedule`'s devices, the one where what the forward pass keeps is until
            the backward pass takes it. Default: the device itself.
        functions: of the stages, where several pipelines have them in common.
        own_copy: of a variable that a function has captured, the copy of this pipeline.
        groups: for each of `schedule`'s devices all that compute its stages, itself first. Default:
            it alone.
        gathers: whether functions put weights together, which are put together again in the
            backward pass instead of kept.
    """

    def __init__(
        self,
        schedule: Schedule,
        device_names: Sequence[str],
        rematerialization: Rematerialization | None = None,
        hosts: Sequence[str] | None = None,
        functions: StageFunctions | None = None,
        own_copy: Callable[[tf.Variable], tf.Variable] = lambda variable: variable,
        groups: Sequence[Sequence[str]] | None = None,
        gathers: bool = False,
    ):
        self._gathers = gathers
        self._schedule, self._hosts, self._own_copy = schedule, hosts, own_copy
        self._rematerialization = rematerialization or Rematerialization("none", schedule)
        self._rounds = Rounds()
        self._functions, self._passes = functions or StageFunctions(), Passes()
        device_of, stages = schedule.device_of, range(schedule.num_stages)
        groups = groups or [(name,) for name in device_names]
        self._groups = [groups[device_of[i]] for i in stages]
        self._devices = [group[0] for group in self._groups]

    @property
    def num_stages(self) -> int:
        """How many stages the schedule has."""
        return self._schedule.num_stages

    def device_of(self, stage: int) -> str:
        """The name of the device of `stage`."""
        return self._devices[stage]

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
        as_it_is: bool = False,
    ) -> Sequence:
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
            as_it_is: whether `function` is known to take something else of its microbatch, or of
                others, whatever it returns then.
        """
        with tf.device(self.device_of(stage)):
            if as_it_is or tf.executing_eagerly():
                return function(*inputs)
            try:
                concrete = self._functions.concrete(stage, key, function, inputs)
            except RuntimeError:
                if is_shared:
                    raise
                return function(*inputs)  # which asks for what other microbatches have
            if not is_shared and any(map(tf.is_symbolic_tensor, concrete.captured_inputs)):
                return function(*inputs)
            for variable in self._functions.watched_variables(concrete):
                variable_accessed(self._own_copy(variable))
            latest = self._rounds.latest(inputs)[0] if is_result else None
            in_round = self._rounds.current(microbatch) if latest is None else latest
            action = Action(stage, microbatch, "forward")
            results = self._outputs((in_round, action), concrete, widened(inputs))
            outputs = narrowed(results, self._functions.returned(concrete))
        if results:
            self._passes.add(in_round, action, results[0].op)
        for output in [*results, *outputs]:
            self._rounds.note(output.op, in_round, stage)
        return outputs

    def _outputs(
        self, in_pass: Pass, concrete: tf.types.experimental.ConcreteFunction, inputs: list
    ) -> list:
        """Those of a call, by the cheapest function that gradient tapes allow."""
        _, action = in_pass
        captures = self._functions.captures(concrete, self._own_copy)
        on_tape = ArgumentsOnTape(inputs, captures)
        arguments = on_tape.arguments
        check_is_not_followed(on_tape.seen(), "the stages of a pipeline")
        if has_one_tape(on_tape.seen()):
            return self._recorded_call(in_pass, concrete, on_tape)
        if record.should_record_backprop(on_tape.seen()):
            own = self._functions.traced_here(concrete, inputs)
            on_tape = ArgumentsOnTape(inputs, self._functions.captures(own, self._own_copy))
            return call_with_captures(own, inputs, on_tape.told_apart()[len(inputs) :])
        name, key = f"tfparallel_stage_{action.stage}", (concrete, "inference")
        options = name, concrete, self._functions.places
        function = self._functions.once(key, inference_function, *options)
        return function(self.device_of(action.stage), arguments)[: len(concrete.outputs)]

    def _recorded_call(
        self,
        in_pass: Pass,
        concrete: tf.types.experimental.ConcreteFunction,
        on_tape: ArgumentsOnTape,
    ) -> list:
        _, action = in_pass
        arguments, watched = on_tape.arguments, on_tape.watched()
        device, name = self.device_of(action.stage), f"tfparallel_stage_{action.stage}"
        is_again = self._rematerialization.is_done(action.stage, action.microbatch)
        recomputes, places = self._recomputes(is_again), self._functions.places
        options = name, concrete, watched, recomputes, places, self._left_on(action.stage)
        function = self._functions.once((concrete, watched, is_again), StageFunction, *options)
        outputs, stash = function.forward(device, arguments)
        stash = self._offloaded(in_pass, function, stash)

        is_split = action._replace(kind="backward_weight") in self._schedule.actions
        run = function.backward_halves if is_split else function.backward
        first = action._replace(kind="backward_input" if is_split else "backward")

        def backward(*output_gradients: tf.Tensor) -> list:
            in_round = self._rounds.come_back(action.microbatch)
            place_sums(self._passes, device, output_gradients)
            with tf.device(device):
                fetched = self._fetched((in_round, first), function, stash)
                gradients, calls = run(device, arguments, fetched, output_gradients)
            for kind, operation in calls.items():
                self._passes.add(in_round, action._replace(kind=kind), operation)
                self._rounds.note(operation, in_round, action.stage)
            return on_tape.gradients(gradients)

        record.record_operation("tfparallel_stage", outputs, on_tape.seen(), backward)
        return outputs

    def _left_on(self, stage: int) -> Collection[str]:
        """The devices on which functions of `stage` leave what they have made there.

        None where what is kept goes to the host.
        """
        own = self._groups[stage][1:] if self._hosts is None else ()
        moves = self._functions.places(self.device_of(stage))
        return {*own, *(old for old, new in moves.items() if new in own)}

    def _recomputes(self, is_again: bool) -> Callable[[tf.Operation], bool]:
        """Whether the results of an operation are computed again in the backward pass.

        Args:
            is_again: whether those are that the user has asked for.
        """
        asked = self._rematerialization.recomputes if is_again else lambda operation: False
        if not self._gathers:
            return asked
        return lambda operation: asked(operation) or is_made_of_weights(operation)

    def _offloaded(self, in_pass: Pass, function: StageFunction, stash: list) -> list:
        if self._hosts is None:
            return stash
        stage, count = in_pass[1].stage, function.num_activations
        copies = to_host(stash[:count], self._hosts[self._schedule.device_of[stage]])
        self._passes.copies[in_pass] += [copy.op for copy in copies]
        return [*copies, *stash[count:]]  # weights stay where they are

    def _fetched(self, in_pass: Pass, function: StageFunction, stash: list) -> list:
        if self._hosts is None:
            return stash
        fetched, waiting = from_host(stash[: function.num_activations])
        self._passes.fetches[in_pass] += waiting
        return [*fetched, *stash[function.num_activations :]]

    def order(self, graph: tf.Graph, others: Iterable["Executor"] = ()) -> Schedule:
        """As `put_in_order`, when the step has been traced, with `others` of the same step."""
        pipelines = [(each._passes, each._devices) for each in (self, *others)]
        return put_in_order(graph, self._schedule, pipelines)

    def add_clock(self, graph: tf.Graph, hosts: Sequence[str]) -> dict[Action, tf.Tensor]:
        """After `order`: when each pass of the first round starts and ends, as `clock.add_clock`.

        Args:
            graph: of the step.
            hosts: for each of the schedule's devices a CPU of its machine.
        """
        stages = range(self._schedule.num_stages)
        own = {stage: hosts[self._schedule.device_of[stage]] for stage in stages}
        first = {action: calls for (i, action), calls in self._passes.calls.items() if i == 0}
        return add_clock(graph, first, own)

    def backward_order(self, stage: int) -> list[int]:
        """The microbatches in the order in which their gradients on `stage` come to be there."""
        order = self._schedule.orders[self._schedule.device_of[stage]]
        kinds = ("backward", "backward_weight")
        return [a.microbatch for a in order if a.stage == stage and a.kind in kinds]

    def note_sum(self, stage: int, operation: tf.Operation) -> None:
        """Tells of a call on `stage` that adds up its gradients, as soon as they are there."""
        self._passes.sums[stage].append(operation)

    def device_of_sum(self, stage: int, gradients: Iterable) -> str:
        """Where gradients of one variable on `stage` are added up: where they are, if all agree."""
        found = {getattr(gradient, "device", "") for gradient in gradients}
        own = found & set(self._groups[stage])
        return own.pop() if len(found) == len(own) == 1 else self.device_of(stage)

    def stage_of_gradient(self, gradients: Iterable) -> int:
        """The stage that has made these gradients of one variable, the last one if none has."""
        stages = [place_behind_call(self._passes, self._groups, each) for each in gradients]
        return next((stage for stage in stages if stage is not None), self._schedule.num_stages - 1)
