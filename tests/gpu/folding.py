"""Which operations of a graph TensorFlow computes before it runs, of constants and known shapes."""

import tensorflow as tf

_OF_SHAPES = {"Shape", "ShapeN", "Size"}
_LARGEST_BYTES = 100 * 1024  # of a result; grappler folds no larger ones
_NEVER = {"Placeholder", "PlaceholderWithDefault", "StopGradient", "PreventGradient"}


class Folded:
    """Knows of each operation whether grappler makes it a constant.

    Less is taken for one than grappler takes: not what is known of a shape that has unknown
    dimensions, nothing within control flow that is not a function.
    """

    def __init__(self) -> None:
        self._known: dict[tf.Operation, bool] = {}

    def is_constant(self, operation: tf.Operation) -> bool:
        """Whether it is a constant when the graph runs."""
        waiting = [operation]  # and no recursion, which long graphs would exceed
        while waiting:
            latest = waiting[-1]
            if latest not in self._known:
                inputs = [x.op for x in latest.inputs] if _may_be_folded(latest) else []
                unknown = [each for each in inputs if each not in self._known]
                if unknown:
                    waiting += unknown
                    continue
                self._known[latest] = self._is_constant(latest, inputs)
            waiting.pop()
        return self._known[operation]

    def _is_constant(self, operation: tf.Operation, inputs: list[tf.Operation]) -> bool:
        if operation.type == "Const" or _is_of_known_shapes(operation):
            return True
        return bool(inputs) and all(self._known[each] for each in inputs)


def _is_of_known_shapes(operation: tf.Operation) -> bool:
    if operation.type == "Rank":
        return operation.inputs[0].shape.rank is not None
    return operation.type in _OF_SHAPES and all(
        each.shape.is_fully_defined() for each in operation.inputs
    )


def _may_be_folded(operation: tf.Operation) -> bool:
    if operation.type in _NEVER | {"Const"} or operation.op_def.is_stateful:
        return False
    calls = any(each.HasField("func") for each in operation.node_def.attr.values())
    return not calls and all(map(_is_small, operation.outputs))


def _is_small(tensor: tf.Tensor) -> bool:
    count, dtype = tensor.shape.num_elements(), tensor.dtype
    is_value = dtype not in (tf.resource, tf.variant)
    return is_value and count is not None and count * dtype.size <= _LARGEST_BYTES
