"""Layers that keep a state which depends on the rows of a batch, computed on those of all replicas.

A codebook that moves to the mean of the rows that chose a code assigns a ratio of two sums over
rows: of a replica's own rows that is another number, and the mean of such numbers is not that of
one device. So the layer is called with the rows of all replicas, on each of them, and each goes on
with its own rows of what comes out:

    x_i  --all_rows-->  x  --layer-->  y, state  --own rows-->  y_i

State, losses that the layer adds and its metrics are those of one device then; a gradient goes back
to the rows that it is of. It costs what `all_rows` sends, and each replica computes the layer for
all rows.

A layer is asked whether it is such a layer by tracing its call once more, in a graph that is thrown
away: it is, if what it assigns there depends on its arguments. Only layers are asked of which a
class that is not Keras's mentions an assignment, or that own a state. Not those of Keras:
BatchNorm has rules of its own, and what others assign is the same for any rows.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfparallel.internals import (
    FuncGraph,
    distribute_lib,
    get_keras_mask,
    in_stateless_scope,
    in_symbolic_scope,
    set_keras_mask,
)
from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import behind, kept_losses, layers_of, own_state
from tfparallel.internals.probabilities import origin_of, with_origin
from tfparallel.replicas.all_rows import rows_and_place
from tfparallel.replicas.assigning_code import class_mentions_assignment
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.dependence import reaches
from tfparallel.replicas.local_copies import copies_here
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step

_found: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by layer: {arguments: TracedCall}


@contextlib.contextmanager
def computed_on_all_rows(model: keras.Model) -> Iterator[None]:
    """Within it, layers of `model` whose state depends on rows get the rows of all replicas."""
    with contextlib.ExitStack() as hooks:
        for layer in layers_of(model):
            if may_keep_state(layer):
                hooks.enter_context(
                    shadowed(
                        layer,
                        "call",
                        functools.partial(_call, layer, layer.call),
                        during="a step on replicas",
                        why="A layer whose state depends on all rows gets those of all replicas.",
                    )
                )
        yield


@contextlib.contextmanager
def calls_of_layers_told(model: keras.Model, graph: tf.Graph, made: set[int]) -> Iterator[None]:
    """Within it, `made` gets the ids of operations of `graph` that calls of such layers make.

    So it does for calls of BatchNorm.
    """

    def told(call: Callable, *args: object, **kwargs: object) -> object:
        before = len(graph.get_operations())
        outputs = call(*args, **kwargs)
        made.update(map(id, graph.get_operations()[before:]))
        return outputs

    with contextlib.ExitStack() as hooks:
        for layer in layers_of(model):
            if may_keep_state(layer) or isinstance(layer, keras.layers.BatchNormalization):
                hooks.enter_context(
                    shadowed(
                        layer,
                        "call",
                        functools.partial(told, layer.call),
                        during="the trace of a step that makes its variables",
                        why="What a layer assigns in its call is told from what a step assigns.",
                    )
                )
        yield


@dataclass(frozen=True)
class TracedCall:
    """What the call of a layer does.

    Attributes:
        assigns_rows: it assigns what depends on its arguments.
        are_rows: for each tensor that it returns, whether it has as many rows, or a multiple; None
            where the call could not be traced.
    """

    assigns_rows: bool
    are_rows: Sequence[bool] | None = None


def _call(layer: keras.Layer, call: Callable, *args: object, **kwargs: object) -> object:
    step = current_replica_step()
    if step is None or step.has_all_rows or in_stateless_scope() or in_symbolic_scope():
        return call(*args, **kwargs)
    arguments = LayerArguments(args, kwargs)
    if not arguments.rows:
        return call(*args, **kwargs)
    known = _found.setdefault(layer, {})
    if arguments.key not in known:
        known[arguments.key] = _trace(layer, call, arguments, step)
    if not known[arguments.key].assigns_rows:
        return call(*args, **kwargs)
    return _of_all_rows(layer, call, arguments, known[arguments.key], step)


class LayerArguments:
    """What a layer is called with.

    Attributes:
        rows: the places of tensors `[rows, ...]` among the leaves; the first tensor has rows.
        key: equal for calls that are alike but for the values of tensors.
    """

    def __init__(self, args: tuple, kwargs: dict):
        self._nest = args, kwargs
        self.leaves = keras.tree.flatten(self._nest)
        dense = [i for i, x in enumerate(self.leaves) if isinstance(x, tf.Tensor) and x.shape.rank]
        first = self.leaves[dense[0]].shape[0] if dense else None
        self.rows = [i for i in dense if self.leaves[i].shape[0] in (first, None)]
        self.key = tuple(
            (leaf.dtype.name, str(leaf.shape)) if isinstance(leaf, tf.Tensor) else repr(leaf)
            for leaf in self.leaves
        )

    def tensors(self) -> list[tf.Tensor]:
        """Those with rows, and their Keras masks."""
        return [self.leaves[i] for i in self.rows] + self._masks()

    def _masks(self) -> list[tf.Tensor]:
        masks = [get_keras_mask(self.leaves[i]) for i in self.rows]
        return [mask for mask in masks if mask is not None]

    def placeholders(self) -> list[tf.Tensor]:
        """In the place of `tensors()`, of any number of rows."""
        return [
            tf.compat.v1.placeholder(tensor.dtype, [None, *tensor.shape[1:]])
            for tensor in self.tensors()
        ]

    def filled(self, tensors: Sequence) -> tuple[tuple, dict]:
        """The arguments with others for `tensors()`."""
        leaves, masks = list(self.leaves), iter(tensors[len(self.rows) :])
        for i, tensor in zip(self.rows, tensors, strict=False):
            if get_keras_mask(self.leaves[i]) is not None:
                set_keras_mask(tensor, next(masks))
            leaves[i] = tensor
        args, kwargs = keras.tree.pack_sequence_as(self._nest, leaves)
        return args, kwargs


# ---- computing on all rows -----------------------------------------------------------------------


def _of_all_rows(
    layer: keras.Layer,
    call: Callable,
    arguments: LayerArguments,
    found: TracedCall,
    step: ReplicaStep,
) -> object:
    own = arguments.tensors()
    try:
        every, start = rows_and_place(own)
    except RuntimeError as error:
        raise RuntimeError(
            f"Layer '{layer.name}' assigns what depends on all rows of a batch, and has to be "
            "called where the step itself is traced. Received: a call in a tf.function, a branch "
            "or a loop. Move it out, or set run_eagerly=True."
        ) from error
    args, kwargs = arguments.filled(every)
    with step.with_all_rows():
        outputs = call(*args, **kwargs)
    count, total = tf.shape(own[0])[0], tf.shape(every[0])[0]

    def own_part(output: tf.Tensor, are_rows: bool) -> object:
        if not are_rows:
            return output
        origin = origin_of(output)
        logits = None if origin is None else own_part(origin.logits, are_rows)
        times = tf.math.floordiv(tf.shape(output)[0], tf.maximum(total, 1))
        part = output[start * times : (start + count) * times]
        rows = own[0].shape[0] if output.shape[0] == every[0].shape[0] else None
        return with_origin(tf.ensure_shape(part, [rows, *output.shape[1:]]), origin, logits)

    flat = keras.tree.flatten(outputs)
    are_rows = found.are_rows or [_has_as_many(x, every[0]) for x in flat]
    parts = [own_part(x, each) for x, each in zip(flat, are_rows, strict=True)]
    return keras.tree.pack_sequence_as(outputs, parts)


# ---- finding the layers --------------------------------------------------------------------------


def may_keep_state(layer: keras.Layer) -> bool:
    """Whether a class that is not Keras's has a state, or mentions an assignment."""
    own_class = type(layer)
    if own_class.__module__.startswith(("keras.src.", "tfparallel.")):
        return False
    return bool(own_state(layer)) or class_mentions_assignment(own_class)


def _trace(
    layer: keras.Layer, call: Callable, arguments: LayerArguments, step: ReplicaStep
) -> TracedCall:
    """Traces a call of `layer` in a graph that is thrown away, on replica 0 of one."""
    strategy = distribute_lib.get_replica_context().strategy
    graph = FuncGraph("call_of_layer")
    context = BuildContext(strategy, graph)
    try:
        with graph.as_default(), context, kept_losses(layer), step.with_all_rows():
            given = arguments.placeholders()
            args, kwargs = arguments.filled(given)
            outputs = keras.tree.flatten(call(*args, **kwargs))
    except Exception:  # what only Python can run
        return TracedCall(not context.is_asked)
    if context.is_asked:  # it reduces or gathers by itself
        return TracedCall(False)
    rows = set(map(id, given))
    of_others = _handles_of_others(layer)
    assigns_rows = any(
        reaches(value, rows)
        for handle, values in _assignments(graph)
        if handle not in of_others
        for value in values
    )
    return TracedCall(assigns_rows, [isinstance(x, tf.Tensor) and _has_rows(x) for x in outputs])


def _has_as_many(output: tf.Tensor, rows: tf.Tensor) -> bool:
    is_dense = isinstance(output, tf.Tensor) and output.shape.rank not in (None, 0)
    return is_dense and output.shape[0] == rows.shape[0]


def _has_rows(output: tf.Tensor) -> bool:
    """Whether a tensor computed from placeholders has a number of rows that is not known."""
    return output.shape.rank != 0 and (output.shape.rank is None or output.shape[0] is None)


def _handles_of_others(layer: keras.Layer) -> set[int]:
    """The ids of the handles of variables with rules of their own: metrics, BatchNorm."""
    normalising = keras.layers.BatchNormalization
    inner = [each for each in layers_of(layer) if isinstance(each, normalising)]
    variables = [*layer.metrics_variables, *(v for each in inner for v in own_state(each))]
    copies = [copy for v in variables for copy in copies_here(behind(v))]
    return {id(copy.handle) for copy in copies}


def _assignments(graph: FuncGraph) -> Iterator[tuple[int, list[tf.Tensor]]]:
    """The id of the handle, and the values, of each operation of `graph` that may assign."""
    outer = {id(inner): id(outer) for outer, inner in graph.captures}
    for operation in graph.get_operations():
        resources = [x for x in operation.inputs if x.dtype == tf.resource]
        if resources and operation.op_def.is_stateful and operation.type != "ReadVariableOp":
            values = [x for x in operation.inputs if x.dtype != tf.resource]
            if operation.type != "ResourceGather":
                yield outer.get(id(resources[0]), id(resources[0])), values
