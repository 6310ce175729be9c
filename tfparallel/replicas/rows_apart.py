"""What a model gives for a row, in Keras's own step: it has to be computed of that row alone.

A layer that compares the rows of a batch (a standard deviation over it, a capacity of experts, a
row of another's neighbours) has those of a replica where it had all. Nothing of the loss tells: a
mean over rows is what it is. So the model is traced for any rows, and its graph looked at. Where
rows may meet in it, its outputs are computed for random rows, all at once and in two parts
(`row_trial.py`), and refused if a row's is another one among other rows. Not asked are BatchNorm,
which has rules of its own, and layers that get the rows of all replicas.
"""

from collections.abc import Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import Functional
from tfparallel.internals.keras_layers import layers_of
from tfparallel.replicas.own_step import RefusedStepError, StepOfOwnRows, few_digits_of
from tfparallel.replicas.row_trial import UntriableError

_DRAWS = 2  # each computes the model three times
# Of what Keras computes of tensors without a layer, what is of numbers in the same place.
_ELEMENTWISE = frozenset(
    (
        *("Absolute", "Add", "Cast", "Divide", "Exp", "Log", "Maximum", "Minimum", "Multiply"),
        *("Negative", "Power", "Rsqrt", "Sqrt", "Square", "Subtract", "TrueDivide"),
        *("Elu", "Gelu", "LeakyRelu", "Relu", "Relu6", "Sigmoid", "Silu", "Softplus", "Tanh"),
    )
)
# Layers of Keras's that always compute with the whole batch: with a histogram of its pixels.
_OF_THE_BATCH = frozenset(("Equalization",))
# What takes a tensor's sizes, and no numbers of it.
_OF_SIZES = frozenset(("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"))
# Operations along the first dim that give as many rows: where the place of that dim is among their
# inputs, None where it is the first dim alone.
_ALONG_A_DIM = {
    **dict.fromkeys(("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"), 1),
    "Roll": 2,
    "GatherV2": 2,
    "ConcatV2": -1,
    **dict.fromkeys(("GatherNd", "ScatterNd", "StridedSlice", "Slice", "RandomShuffle"), None),
    **dict.fromkeys(("Unique", "UniqueV2", "UnsortedSegmentSum", "UnsortedSegmentMax"), None),
    **dict.fromkeys(("TensorScatterUpdate", "TensorScatterAdd", "ReverseSequence"), None),
}


def rows_never_meet(model: keras.Model) -> bool:
    """Whether `model` is of layers of Keras that compute each row of its own, as far as is known.

    A model whose code is Keras's: what a functional one computes without layers may be anything.
    """
    plain = [
        op for each in layers_of(model) if isinstance(each, Functional) for op in each.operations
    ]
    return all(map(_is_known, [*layers_of(model), *plain]))


def check_rows_apart(model: keras.Model, forward: StepOfOwnRows) -> None:
    """Refuses a model in which a row's outputs depend on the other rows of its batch.

    Args:
        model: with Keras's own `train_step`, which is not said to be right for parts of a batch.
        forward: its call, traced for any rows.

    Raises:
        RefusedStepError: naming the model, and operations in which rows may have met.
    """
    if forward.is_coupled_by_layers():
        return
    outputs = [x for x in keras.tree.flatten(forward.outputs) if _has_rows(x)]
    outputs = [x for x in outputs if forward.has(x) and forward.is_of_own_rows(x)]
    of_the_batch = [x.name for x in layers_of(model) if type(x).__name__ in _OF_THE_BATCH]
    if of_the_batch:
        raise _refused(model, forward, of_the_batch)
    meeting = list(_where_rows_may_meet(forward, outputs))
    if not meeting:
        return
    for output in outputs:
        with forward.graph.as_default():
            value = tf.reshape(output, [tf.shape(forward.rows()[0])[0], -1])
        try:
            kinds = forward.kinds_of(value, few_digits_of(model), _DRAWS)
        except UntriableError as error:
            tf.get_logger().warning(
                "Whether an output of model '%s' depends on other rows of the batch cannot be "
                "tried on random rows (%r). It is taken for computed of its row alone; if it is "
                "not, the weights would not be those of one device. To say that it is right, "
                "declare the model by tfparallel.mean_loss.",
                model.name,
                error.__cause__,
            )
            continue
        if "rows" not in kinds:
            raise _refused(model, forward, meeting)


def _refused(
    model: keras.Model, forward: StepOfOwnRows, meeting: Sequence[str]
) -> RefusedStepError:
    return RefusedStepError(
        "Each replica has some rows of a batch, and what a model gives for a row must be computed "
        f"of that row alone. Received: {type(forward.context.strategy).__name__}, and model "
        f"'{model.name}' ({type(model).__name__}), whose output for a row is another one among "
        f"other rows. Rows may meet in {', '.join(map(repr, meeting[:3]))}. Compute it of the rows "
        "of all replicas: strategy.all_rows(x) in the layer. Or let each replica take its own rows "
        "for all, if that is meant: tfparallel.mean_loss(model)."
    )


def _is_known(operation: keras.Operation) -> bool:
    if not isinstance(operation, keras.Layer):
        return type(operation).__name__ in _ELEMENTWISE
    if type(operation).__name__ in _OF_THE_BATCH:
        return False
    axes = getattr(operation, "axis", None)
    return 0 not in (axes if isinstance(axes, list | tuple) else [axes])


def _has_rows(value: object) -> bool:
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return False
    return bool(value.shape.rank) and value.shape[0] is None


def _where_rows_may_meet(forward: StepOfOwnRows, outputs: Iterable[tf.Tensor]) -> Iterator[str]:
    """The names of operations that take rows, and give something else than as many of them.

    Each of them may be harmless: a transposition that is turned back.
    """
    of_rows, of_sizes = set(map(id, forward.rows())), set[int]()
    behind = _names_behind(outputs)
    for operation in forward.graph.get_operations():
        if operation.name not in behind:
            continue
        taken = [x for x in operation.inputs if id(x) in of_rows]
        if operation.type in _OF_SIZES or not taken:
            if taken or any(id(x) in of_sizes for x in operation.inputs):
                of_sizes.update(id(x) for x in operation.outputs if x.dtype.is_integer)
                if operation.type == "Cast" and operation.outputs[0].dtype.is_floating:
                    yield operation.name  # computes with the number of rows
            continue
        of_rows.update(map(id, operation.outputs))
        if any(map(_is_of_fewer_rows, operation.outputs)) or _is_along_rows(operation, taken):
            yield operation.name


def _names_behind(values: Iterable[tf.Tensor]) -> set[str]:
    stack, names = [value.op for value in values], set[str]()
    while stack:
        operation = stack.pop()
        if operation.name not in names:
            names.add(operation.name)
            stack += [x.op for x in operation.inputs]
    return names


def _is_of_fewer_rows(output: tf.Tensor) -> bool:
    """Whether its first dim is another than the unknown number of rows."""
    if output.dtype in (tf.variant, tf.resource) or output.shape.rank is None:
        return False
    if output.shape.rank == 0:
        return output.dtype.is_floating  # loops count in whole numbers
    return output.shape[0] is not None


def _is_along_rows(operation: tf.Operation, taken: list[tf.Tensor]) -> bool:
    """Whether an operation that gives as many rows puts others in the place of one."""
    if max(map(_num_unknown, operation.outputs), default=0) > max(map(_num_unknown, taken)):
        return True  # of rows by rows, as in a product with itself
    if operation.type not in _ALONG_A_DIM or not any(x is operation.inputs[0] for x in taken):
        return False
    if operation.type == "StridedSlice":  # x[:, i] and x[..., i] take all rows
        all_rows = operation.get_attr("begin_mask") & operation.get_attr("end_mask")
        return not (all_rows | operation.get_attr("ellipsis_mask")) & 1
    place = _ALONG_A_DIM[operation.type]
    if place is None:
        return True
    dims = tf.get_static_value(operation.inputs[place])
    return dims is None or 0 in np.reshape(dims, -1) % len(operation.inputs[0].shape)


def _num_unknown(tensor: tf.Tensor) -> int:
    return 0 if tensor.shape.rank is None else tensor.shape.as_list().count(None)
