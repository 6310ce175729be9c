"""Which tensors of a computation have to be kept for its gradient."""

from collections.abc import Callable, Container, Mapping, Sequence

import tensorflow as tf

from tfparallel.internals.graphs import is_stateful
from tfparallel.segments.graph_copy import depended_on

_COMPARISONS = {"Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"}
_OF_COMPARED = {*_COMPARISONS, "Const", "ZerosLike", "OnesLike"}


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def kept_for(
    needed: Sequence, handles: Sequence, recomputes: Callable[[tf.Operation], bool]
) -> list[tf.Tensor]:
    """What has to be kept for `needed` to be there, or be computed, in the backward pass."""
    kept: dict[int, tf.Tensor] = {}
    without = {id(handle) for handle in handles}
    visited = list(needed)
    seen = set(map(id, needed))
    for tensor in visited:  # grows
        operation = tensor.op
        if id(tensor) in without or operation.type == "Const":
            continue
        is_argument = operation.type == "Placeholder"
        if is_argument or is_stateful(operation) or not recomputes(operation):
            kept[id(tensor)] = tensor
            continue
        new = [x for x in operation.inputs if id(x) not in seen]
        seen.update(map(id, new))
        visited += new
    return _without_integers(_without_comparisons(kept))


def _without_comparisons(kept: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    """What is kept less what comes of comparing the rest with one another, or with constants.

    A loss of logits asks which are positive. Of another type, it would be a copy of its own.
    """
    rest = {key: x for key, x in kept.items() if x.op.type not in _COMPARISONS}
    for key, tensor in kept.items():
        if key not in rest:
            operations = depended_on([tensor], lambda x: id(x) in rest)
            if not all(op.type in _OF_COMPARED for op in operations):
                rest[key] = tensor
    return rest


def _without_integers(kept: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
    """What is kept less the int32 that are computed again from the rest: shapes, sizes, indices.

    A GPU would send each to the host and back, where most of them are computed and used.
    """
    rest = {key: x for key, x in kept.items() if x.dtype != tf.int32}
    for key, tensor in kept.items():
        if tensor.dtype == tf.int32:
            arguments = _integer_arguments(tensor, rest)
            rest |= {key: tensor} if arguments is None else {id(x): x for x in arguments}
    return list(rest.values())


def _integer_arguments(tensor: tf.Tensor, given: Container[int]) -> list[tf.Tensor] | None:
    """The integers among a function's arguments that `tensor` is computed from, beside `given`.

    None if it is computed from anything else.
    """
    operations = depended_on([tensor], lambda x: id(x) in given)
    arguments = [op.outputs[0] for op in operations if op.type == "Placeholder"]
    others = [op for op in operations if op.type != "Placeholder"]
    is_made_of_integers = all(x.dtype.is_integer for x in arguments) and not any(
        is_stateful(op) or any(is_differentiable(y) for y in op.outputs) for op in others
    )
    return arguments if is_made_of_integers and tensor.op.type != "Placeholder" else None


def is_made_of_weights(operation: tf.Operation) -> bool:
    """Whether an operation's results depend on weights and constants alone."""
    todo, seen, has_weight = [operation], {operation}, False
    while todo:
        each = todo.pop()
        if each.type == "ReadVariableOp":
            has_weight = True
        elif is_stateful(each) or each.type == "Placeholder":
            return False
        else:
            new = [x.op for x in each.inputs if x.op not in seen]
            seen.update(new)
            todo += new
    return has_weight and not is_stateful(operation)


def is_weight(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a variable's value."""
    return tensor.op.type == "ReadVariableOp"
