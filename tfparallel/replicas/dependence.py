"""What a tensor of a graph was computed from."""

from collections.abc import Collection

import tensorflow as tf


def reaches(value: tf.Tensor, targets: Collection[int], ends: Collection[int] = ()) -> bool:
    """Whether any of `targets`, ids of tensors, is on the way back from `value`.

    Args:
        ends: ids of tensors behind which not to look.
    """
    stack, seen = [value], set()
    while stack:
        tensor = stack.pop()
        if id(tensor) in targets:
            return True
        if id(tensor) in ends or tensor.op in seen:
            continue
        seen.add(tensor.op)
        stack += tensor.op.inputs
    return False
