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
import re
from collections.abc import Callable, Hashable, Sequence

import tensorflow as tf

from tfparallel.pipeline.action import Action
from tfparallel.pipeline.schedule import Schedule
from tfparallel.tf_internals import run_independently

_BACKWARD_NAME = re.compile(r"__backward_tfparallel_stage_(\d+)_")


class Executor:
    """The calls of one step.

    Args:
        schedule: the order of actions on each device.
        device_names: the device of each of `schedule`'s devices.
    """

    def __init__(self, schedule: Schedule, device_names: Sequence[str]):
        self._schedule, self._device_names = schedule, device_names
        self._functions: dict[Hashable, Callable] = {}
        self._microbatches: dict[tf.Operation, int] = {}
        self._num_placed = 0
        self._calls: dict[Action, list[tf.Operation]] = collections.defaultdict(list)

    def device_of(self, stage: int) -> str:
        """The name of the device of `stage`."""
        return self._device_names[self._schedule.device_of[stage]]

    def call(
        self, stage: int, microbatch: int, key: Hashable, function: Callable, inputs: list
    ) -> list:
        """Calls `function(*inputs)` as a part of what `stage` does for `microbatch`.

        Args:
            key: of the computation: `function` is traced at its first call with a key, and for new
                shapes; later calls use the trace of the first function.
            function: takes tensors, returns a list of tensors.
            inputs: tensors.
        """
        with tf.device(self.device_of(stage)):
            if tf.executing_eagerly():
                return function(*inputs)
            key = (stage, key)
            if key not in self._functions:
                self._functions[key] = _traced_once(stage, function)
            outputs = self._functions[key](*inputs)
        operation = next((output.op for output in outputs), None)
        if operation is not None:
            self._add(Action(stage, microbatch, "forward"), operation)
        return outputs

    def place_backward(self, graph: tf.Graph) -> None:
        """Puts the backward calls that gradients have added to `graph` on their stages' devices.

        What a backward call computes from, its forward call at last, tells the microbatch.
        """
        operations = graph.get_operations()
        for operation in operations[self._num_placed :]:
            stage = _backward_stage(operation)
            if stage is None:
                continue
            operation._set_device(self.device_of(stage))
            run_independently(graph, [operation])
            microbatch = self._microbatch_of(operation)
            self._add(Action(stage, microbatch, "backward"), operation)
        self._num_placed = len(operations)

    def order(self, graph: tf.Graph) -> None:
        """Makes each device's calls follow one another as the schedule says.

        Raises:
            ValueError: if the step cannot be done in that order.
        """
        self.place_backward(graph)
        for order in self._schedule.orders:
            calls = [self._calls[action] for action in order if action in self._calls]
            for before, after in itertools.pairwise(calls):
                for operation in after:
                    operation._add_control_inputs(before)
        if _has_cycle(graph):
            raise ValueError(
                f"Under schedule {self._schedule.name!r} a microbatch is on its way back while "
                "others are still on their way forward, so no loss may depend on several "
                "microbatches. Received: a step whose loss does, for example by a mask or by "
                "'mean_with_sample_weight', which divide by a sum over the batch, or a train_step "
                "that computes forward again with what came back. Use schedule='gpipe', or a loss "
                "that is a mean over rows."
            )

    def _add(self, action: Action, operation: tf.Operation) -> None:
        self._calls[action].append(operation)
        self._microbatches[operation] = action.microbatch

    def _microbatch_of(self, operation: tf.Operation) -> int:
        """The microbatch of the nearest call that `operation` depends on."""
        near = [operation]
        for each in near:  # grows
            if each in self._microbatches:
                return self._microbatches[each]
            near += [tensor.op for tensor in each.inputs]
        raise AssertionError(f"{operation.name} is the gradient of no call.")


def _traced_once(stage: int, function: Callable) -> Callable:
    def named(*inputs: tf.Tensor) -> list:
        with tf.name_scope(f"stage_{stage}"):  # names the stage in errors of its operations
            return function(*inputs)

    named.__name__ = f"tfparallel_stage_{stage}"
    return tf.function(named, autograph=False)


def _backward_stage(operation: tf.Operation) -> int | None:
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    match = _BACKWARD_NAME.search(operation.get_attr("f").name)
    return int(match[1]) if match else None


def _has_cycle(graph: tf.Graph) -> bool:
    """Whether some operation waits for itself (Kahn's algorithm)."""
    operations = graph.get_operations()
    waits_for = {op: len({t.op for t in op.inputs} | set(op.control_inputs)) for op in operations}
    successors = collections.defaultdict(list)
    for operation in operations:
        for needed in {t.op for t in operation.inputs} | set(operation.control_inputs):
            successors[needed].append(operation)
    ready = [operation for operation in operations if not waits_for[operation]]
    for operation in ready:  # grows
        for successor in successors[operation]:
            waits_for[successor] -= 1
            if not waits_for[successor]:
                ready.append(successor)
    return len(ready) < len(operations)
