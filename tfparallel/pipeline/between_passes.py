"""Where operations run that belong to no pass, but stand between passes."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfparallel.internals.graphs import place
from tfparallel.pipeline.passes import Passes

_MOST_BETWEEN = 4  # operations from a gradient back to the call that has made it


def place_sums(passes: Passes, device: str, gradients: Iterable) -> None:
    """Puts sums of a tensor's gradients, which the tape makes just anywhere, on its stage.

    So the gradient of a skip connection goes straight to where the tensor comes from.
    """
    stack = [gradient.op for gradient in gradients if isinstance(gradient, tf.Tensor)]
    while stack:
        operation = stack.pop()
        if operation.type in ("AddN", "AddV2") and operation not in passes.action_of:
            place(operation, device)
            stack += [tensor.op for tensor in operation.inputs]


def place_behind_call(
    passes: Passes, groups: Sequence[Sequence[str]], gradient: tf.Tensor | tf.IndexedSlices
) -> int | None:
    """The stage whose call has made `gradient`, if one has; what is between gets its device.

    That is a sum with the gradient of a penalty, a weight.

    Args:
        groups: of each stage its devices, the first of which calls its functions.
    """
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    operation = (gradient.values if is_sparse else gradient).op
    between: list[tf.Operation] = []
    while operation not in passes.action_of:
        if len(between) == _MOST_BETWEEN or not operation.inputs:
            return None
        between.append(operation)
        operation = next(
            (x.op for x in operation.inputs if x.op in passes.action_of), operation.inputs[0].op
        )
    stage = passes.action_of[operation].stage
    for each in between:
        if each.device not in groups[stage]:
            place(each, groups[stage][0])
    return stage


def place_shapes(graph: tf.Graph) -> None:
    """Asks for a tensor's shape where the tensor is, which else would be sent for no more.

    Keras's own step asks for that of the inputs where it computes the loss.
    """
    for operation in graph.get_operations():
        if operation.type == "Shape" and (device := operation.inputs[0].device):
            place(operation, device)
