"""The gradients of all microbatches, summed where their stage is.

A sum grows with every backward pass, so that a stage holds two copies of its gradients and not one
for each microbatch. The additions of a stage are a function, traced once and called for each.
"""

import collections
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tfparallel.communication.joining import add_tensors, tensor_of
from tfparallel.internals import FuncGraph
from tfparallel.pipeline.executor import Executor
from tfparallel.segments.graph_copy import GraphFunction

Functions: TypeAlias = dict[tuple, GraphFunction]


def sum_gradients(
    executor: Executor, gradients: Sequence[Sequence], rows: Sequence, functions: Functions
) -> list:
    """The sum over microbatches of each gradient.

    Args:
        executor: whose stages have made the gradients.
        gradients: for every microbatch the same number of tensors or IndexedSlices.
        rows: of every microbatch, ints or scalar tensors: a gradient of no rows, which is NaN for
            a mean, counts as zeros.
        functions: of additions that were traced for other pipelines; those that are traced here
            are added.
    """
    sums: list = [None] * len(gradients[0])
    by_place: dict[tuple[int, str], list[int]] = collections.defaultdict(list)
    for i, per_microbatch in enumerate(zip(*gradients, strict=True)):
        stage = executor.stage_of_gradient(per_microbatch)
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in per_microbatch):
            with tf.device(executor.device_of(stage)):
                sums[i] = _concat(per_microbatch)
        else:
            by_place[stage, executor.device_of_sum(stage, per_microbatch)].append(i)
    for (stage, device), at in by_place.items():
        additions = _Additions(f"tfparallel_sum_{stage}", device, functions)
        has_rows = _on_device(device, rows)
        total: list = []
        for microbatch in executor.backward_order(stage):
            own = [tf.convert_to_tensor(gradients[microbatch][i]) for i in at]
            total = additions.add(total, own, has_rows[microbatch])
            if additions.last_call is not None:
                executor.note_sum(stage, additions.last_call)
        for i, tensor in zip(at, total, strict=True):
            sums[i] = tensor
    return sums


def sum_over_pipelines(
    sums: Sequence[list], homes: Sequence[str | None] | None, functions: Functions
) -> list:
    """The sum over pipelines of each of their sums, in the order of the pipelines.

    Args:
        sums: for every pipeline, what `sum_gradients` gives.
        homes: of each sum the device that adds it up; None for where the first pipeline's is.
        functions: as of `sum_gradients`.
    """
    totals, others = list(sums[0]), sums[1:]
    homes = homes or [None] * len(totals)
    by_device: dict[str, list[int]] = collections.defaultdict(list)
    for i, (own, home) in enumerate(zip(zip(*sums, strict=True), homes, strict=True)):
        device = home or tensor_of(own[0]).device
        if device and not any(isinstance(each, tf.IndexedSlices) for each in own):
            by_device[device].append(i)
            continue
        with tf.device(device):
            totals[i] = add_tensors(own)
    for device, at in by_device.items():
        additions = _Additions("tfparallel_sum", device, functions)
        total = [totals[i] for i in at]
        for other in others:
            total = additions.add(total, [other[i] for i in at])
        for i, tensor in zip(at, total, strict=True):
            totals[i] = tensor
    return totals


class _Additions:
    """Additions on a device of some gradients to what earlier ones add up to."""

    def __init__(self, name: str, device: str, functions: Functions):
        self._name, self._device, self._functions = name, device, functions
        self.last_call: tf.Operation | None = None

    def add(self, total: list, own: list, has_rows: bool | tf.Tensor = True) -> list:
        """The sums: `own` as it is, where there is no `total` yet and there are rows."""
        if not total and has_rows is True:
            return own
        specs = tuple((tensor.dtype, str(tensor.shape)) for tensor in own)
        asks, unknown = (specs, bool(total), True), []
        key = asks if has_rows is not True or asks in self._functions else (specs, True, False)
        if key is asks:
            with tf.device(self._device):
                unknown = [tf.convert_to_tensor(has_rows)]
        if key not in self._functions:
            self._functions[key] = self._function(total, own, unknown)
        sums = self._functions[key](self._device, [*total, *own, *unknown])
        self.last_call = sums[0].op
        return sums

    def _function(self, total: list, own: list, unknown: list) -> GraphFunction:
        graph = FuncGraph(self._name)
        with graph.as_default():
            before, gradients, given = (
                [tf.compat.v1.placeholder(x.dtype, x.shape) for x in tensors]
                for tensors in (total, own, unknown)
            )
            inputs = [*before, *gradients, *given]
            for has_rows in given:
                gradients = [tf.where(has_rows, gradient, 0) for gradient in gradients]
            pairs = zip(before, gradients, strict=True)  # `+` takes longer to trace
            sums = [tf.raw_ops.AddV2(x=a, y=b) for a, b in pairs] if total else gradients
        return GraphFunction(self._name, graph, inputs, sums)


def _on_device(device: str, rows: Sequence) -> Sequence:
    """Whether there are rows, for each number of them; on `device`, as one tensor to send."""
    if all(isinstance(number, int) for number in rows):
        return [number > 0 for number in rows]
    with tf.device(rows[0].device):
        has_rows = tf.greater(tf.stack(rows), 0)
    with tf.device(device):
        return tf.unstack(tf.identity(has_rows))


def _concat(slices: Sequence) -> tf.IndexedSlices:
    values = [tf.convert_to_tensor(each.values) for each in slices]
    # int64: a GPU puts small integers together on the host.
    indices = [tf.cast(each.indices, tf.int64) for each in slices]
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), slices[0].dense_shape)
