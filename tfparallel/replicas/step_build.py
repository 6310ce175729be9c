"""Variables of a model whose step is the user's: the step itself is traced once, which makes them.

Keras builds a model under a strategy by calling `model(x)` with the shapes of the first batch. That
says nothing of a model that is never called so: one without `call` (a GAN, a VAE), one of data that
is not (x, y, sample_weight), or one whose `compute_loss` has layers. Its `train_step` says all. It
is traced in a graph that is thrown away, as one replica sees it:

    variables        made outside of the graph, under the strategy, as in its scope
    assignments      operations of the graph, which never run
    optimizers       built, and not applied
    other replicas   there are none: what would be reduced is returned as it is

So every variable is there before the first step, the same on all workers, and no trace is left.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from types import MethodType

import keras
import tensorflow as tf

from tfparallel.internals import (
    FuncGraph,
    Functional,
    distribute_lib,
    is_stock_step,
    is_train_step,
)
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.gradients_asked_for import has_own_gradients
from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.internals.keras_layers import (
    call_takes_training,
    clear_added_losses,
    functional_graph,
    inputs_structure,
    layers_of,
    outputs_structure,
)
from tfparallel.internals.keras_trainer import (
    build_as_keras_does,
    has_stock_loss,
    strategy_of,
)
from tfparallel.internals.traced_values import read_as_assigned
from tfparallel.replicas import checks
from tfparallel.replicas.assigned_weights import check_assigned_weights
from tfparallel.replicas.batch import Batch, num_rows
from tfparallel.replicas.build_context import BuildContext
from tfparallel.replicas.code_of_keras import is_code_of_keras
from tfparallel.replicas.gradient_noise import tell_of_noise
from tfparallel.replicas.layer_gradients import check_layer_gradients
from tfparallel.replicas.model_optimizers import optimizers_of
from tfparallel.replicas.own_step import RefusedStepError, StepOfOwnRows
from tfparallel.replicas.remat_scopes import without_remat_of_keras
from tfparallel.replicas.replica_step import ReplicaStep
from tfparallel.replicas.row_seeds import drawn_by_row
from tfparallel.replicas.rows_apart import check_rows_apart, rows_never_meet
from tfparallel.replicas.step_gradients import check_gradients
from tfparallel.replicas.step_losses import check_losses, is_declared
from tfparallel.replicas.step_outputs import numbers_of_metrics_noted, tell_of_outputs
from tfparallel.replicas.weighted_losses import weighted_losses
from tfparallel.replicas.whole_batch_layers import calls_of_layers_told

_by_row: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by model: as of a `ReplicaStep`
_traced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by model: {step: optimizers}


def build(model: keras.Model, method: str, data_batch: object) -> None:
    """Makes all variables that the step of `method` needs and that are not there yet.

    Args:
        model: compiled, with or without a strategy, in whose scope it is called.
        method: of the model: `fit`, `evaluate`, `train_on_batch` or `test_on_batch`.
        data_batch: nest of arrays, tensors or `TypeSpec`s: what a step gets.

    Raises:
        ValueError: for a step that is a `tf.function` itself, or assigns what depends on a
            replica's own rows to a weight.
        Exception: what the step raises, for a step that would.
    """
    name = _name_of_step(method)
    step = getattr(model, name)
    checks.check_is_method(step)
    is_stock = is_stock_step(step) and has_stock_loss(model)
    if is_stock:
        with without_remat_of_keras(model), _known_outputs(model):
            build_as_keras_does(model, data_batch)
    known, optimizers = _traced.setdefault(model, {}), optimizers_of(model)
    before = known.get(name)
    if before is not None and [*map(id, before)] == [*map(id, optimizers)]:
        return
    try:
        if is_stock:
            _check_own_layers(model, step, data_batch)
        else:
            _trace(model, step, data_batch)
    except RefusedStepError:
        raise
    except Exception:
        if not model.run_eagerly:
            raise
        # Only Python can run such a step; if it is wrong, the first step says so.
    known[name] = optimizers_of(model)


def check_own_step(model: keras.Model, method: str, data_batch: object) -> None:
    """Refuses what of a step of a user's own, of a model that is built, would not be one device's.

    For strategies that build a model as Keras does.

    Args:
        model, method, data_batch: as `build` takes them.

    Raises:
        ValueError: as `build`.
    """
    name = _name_of_step(method)
    step, known = getattr(model, name), _traced.setdefault(model, {})
    checks.check_is_method(step)
    if num_replicas(strategy_of(model)) == 1 or name in known:
        return
    if is_stock_step(step):
        _check_own_layers(model, step, data_batch, is_cut=False)
        known[name] = optimizers_of(model)
        return
    traced = _traced_for_any_rows(model, step, data_batch)
    if traced is not None:
        check_assigned_weights(model, traced, lambda: traced)
    if _is_tried(model, step):
        _check_tried(model, step, data_batch, traced)
    known[name] = optimizers_of(model)


def _name_of_step(method: str) -> str:
    return "train_step" if method in ("fit", "train_on_batch") else "test_step"


def _known_outputs(model: keras.Model) -> contextlib.AbstractContextManager:
    """Within it, `model` is not traced for the shapes of its outputs where its graph says them."""
    runs_graph = type(model).call in (Functional.call, keras.Sequential.call)
    is_built = all(layer.built for layer in layers_of(model))
    graph = functional_graph(model) if runs_graph and is_built else None
    if graph is None:
        return contextlib.nullcontext()
    inputs, outputs = inputs_structure(model), outputs_structure(graph)

    def known(call: Callable, given: object, *args: object, **kwargs: object) -> tf.Tensor:
        if not _are_alike(given, inputs):
            return call(given, *args, **kwargs)
        made = keras.tree.map_structure(_placeholder_like, outputs)
        return made[0] if isinstance(made, list | tuple) and len(made) == 1 else made

    return shadowed(
        model,
        "call",
        wrapped(model, "call", known),
        during="the symbolic build of a built model",
        why="A functional model's graph says what it gives: it is not traced once more to ask it.",
    )


def _are_alike(given: object, inputs: object) -> bool:
    """Whether tensors are as a functional model's inputs, in structure and shapes."""
    if isinstance(inputs, list) and len(inputs) == 1 and tf.is_tensor(given):
        given = [given]
    try:
        keras.tree.assert_same_structure(given, inputs)
    except ValueError:
        return False
    leaves, specs = keras.tree.flatten(given), keras.tree.flatten(inputs)
    return all(
        isinstance(leaf, tf.Tensor) and leaf.shape.is_compatible_with(spec.shape)
        for leaf, spec in zip(leaves, specs, strict=True)
    )


def _placeholder_like(output: keras.KerasTensor) -> tf.Tensor:
    return tf.compat.v1.placeholder(output.dtype, output.shape)


def _trace(model: keras.Model, step: MethodType, data_batch: object) -> None:
    traced = _traced_once(model, step, data_batch)
    if traced is None or num_replicas(traced.context.strategy) == 1:
        return
    of_any_rows = functools.cache(lambda: _traced_for_any_rows(model, step, data_batch))
    check_assigned_weights(model, traced, of_any_rows)
    if _is_tried(model, step):
        _check_tried(model, step, data_batch, of_any_rows())


def _check_own_layers(
    model: keras.Model, step: MethodType, data_batch: object, is_cut: bool = True
) -> None:
    """Has Keras's own step tried where layers couple rows, or say how a gradient is computed.

    That is seen in a call of the model for any rows; or, if it can be called for those of this
    batch only, in a replica's part of it, if it `is_cut` here, or all of it.
    """
    strategy = strategy_of(model)  # None in a training without one that takes backups
    if strategy is None or num_replicas(strategy) == 1:
        return
    is_of_keras = is_code_of_keras(model)
    if not _is_tried(model, step) or (is_of_keras and rows_never_meet(model)):
        return
    called = functools.partial(_called, model)
    try:
        forward = _traced_once(model, called, _of_any_rows(data_batch), is_cut=False)
    except Exception as error:
        tf.get_logger().warning(
            "Model '%s' cannot be called for any number of rows (%r), by which it would be seen "
            "whether rows of a batch meet in it, as in a mean over them: it is taken for one in "
            "which they do not. Write keras.ops.shape(x)[0] for x.shape[0].",
            model.name,
            error,
        )
        forward = None if is_of_keras else _traced_once(model, called, data_batch, is_cut)
    else:
        if forward is not None:
            check_rows_apart(model, forward)
    if forward is not None and has_own_gradients(forward.graph, is_stopped=False):
        check_layer_gradients(model, _traced_for_any_rows(model, step, data_batch, True))


def _called(model: keras.Model, data: object) -> object:
    """What `model` gives for a batch, as Keras's own step calls it."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return model(x, training=True) if call_takes_training(model) else model(x)


def targets_by_row(model: keras.Model) -> list[bool]:
    """What is known of the targets that a `train_step` takes gradients of: `ReplicaStep.by_row`."""
    return _by_row.get(model, [])


def _check_tried(
    model: keras.Model, step: MethodType, data_batch: object, traced: StepOfOwnRows | None
) -> None:
    if traced is not None:
        shapes = [target.shape for target in traced.losses]
        _by_row[model] = [bool(shape.rank) and shape[0] is None for shape in shapes]
    check_losses(model, traced)
    if not is_stock_step(step):
        check_gradients(model, traced)
        tell_of_noise(model, traced)
        tell_of_outputs(model, traced)
    elif traced is not None and has_own_gradients(traced.graph):  # in its `compute_loss`, maybe
        check_layer_gradients(model, _traced_for_any_rows(model, step, data_batch, True))


def _is_tried(model: keras.Model, step: MethodType) -> bool:
    """Whether parts of a batch have to make what `step` takes gradients of, as far as is known."""
    return is_train_step(step) and not is_declared(model)


def _traced_for_any_rows(
    model: keras.Model, step: MethodType, data_batch: object, weighs_loss: bool = False
) -> StepOfOwnRows | None:
    """Traces a step that has been traced for the rows that it gets; None if it is for these alone.

    An error of the step's own that does not come of the number of rows has come before.
    """
    try:
        traced = _traced_once(model, step, _of_any_rows(data_batch), False, weighs_loss)
    except RefusedStepError:
        raise
    except Exception as error:
        if _is_tried(model, step):
            tf.get_logger().warning(
                "The train_step of model '%s' cannot be traced for any number of rows (%r), by "
                "which its loss would be tried: the loss is taken for a mean over rows. Write "
                "keras.ops.shape(x)[0] for x.shape[0]; or declare the model by "
                "tfparallel.mean_loss.",
                model.name,
                error,
            )
        return None
    if traced is not None:
        read_as_assigned(traced.graph, traced.own_operations())
    return traced


def _traced_once(
    model: keras.Model,
    step: Callable,
    data_batch: object,
    is_cut: bool = True,
    weighs_loss: bool = False,
) -> StepOfOwnRows | None:
    """Traces `step`, for a replica's part of the batch or all of it; None without a strategy.

    Of all of it, losses and their gradients are traced as when the step runs; with the replica's
    weight in the loss, if the step `weighs_loss` as Keras's own does.
    """
    strategy = strategy_of(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_remat_of_keras(model))
        graph = FuncGraph("build")
        stack.enter_context(graph.as_default())
        data, traced = _placeholders(data_batch), None
        stack.enter_context(tf.variable_creator_scope(_create_outside))
        if strategy is not None:
            traced = StepOfOwnRows(graph, BuildContext(strategy, graph), data)
            part = Batch(strategy.extended, data).parts[0] if is_cut else data
            stack.enter_context(traced.context)
            stack.enter_context(_only_replica(traced, is_cut, weighs_loss).active())
            stack.enter_context(drawn_by_row(strategy.extended._row_seeds, model))
            stack.enter_context(calls_of_layers_told(model, graph, traced.of_layers))
            if not is_cut:
                stack.enter_context(_frozen_batch_norm(model))
                stack.enter_context(weighted_losses(model))
                noted = traced.given_to_metrics
                stack.enter_context(numbers_of_metrics_noted(model, noted))
            data = part
        outputs = step(data)
        if traced is not None:
            traced.outputs = outputs
    clear_added_losses(model)
    return traced


def _only_replica(traced: StepOfOwnRows, is_cut: bool, weighs_loss: bool) -> ReplicaStep:
    if is_cut:
        return ReplicaStep(1, tf.ones(()), True, [], first_row=0)
    traced.weight = tf.compat.v1.placeholder(tf.float64, [])
    traced.scale = tf.compat.v1.placeholder(tf.float64, [])
    replica = ReplicaStep(num_rows(traced.data), traced.weight, weighs_loss, [], first_row=0)
    replica.losses, replica.scale = traced.losses, traced.scale
    replica.tries_backward = weighs_loss
    traced.replica = replica
    return replica


def _called_in_inference(call: Callable, *args: object, **kwargs: object) -> tf.Tensor:
    return call(*args, **{**kwargs, "training": False})


@contextlib.contextmanager
def _frozen_batch_norm(model: keras.Model) -> Iterator[None]:
    """Within it, BatchNorm couples no rows: what is asked is whether anything else does."""
    with contextlib.ExitStack() as hooks:
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                hooks.enter_context(
                    shadowed(
                        layer,
                        "call",
                        functools.partial(_called_in_inference, layer.call),
                        during="the trace of a step for any rows",
                        why="Rows that BatchNorm couples do not tell whether what follows does.",
                    )
                )
        yield


def _of_any_rows(batch: object) -> object:
    """The specs of a batch, of any number of rows."""
    return tf.nest.map_structure(
        lambda leaf: (
            leaf and tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
            if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank
            else leaf
        ),
        tf.nest.map_structure(_spec, batch),
    )


def _placeholders(batch: object) -> object:
    """A nest of placeholders for a nest of arrays, tensors or specs."""
    specs = tf.nest.map_structure(_spec, batch)
    flat = [
        leaf if leaf is None else tf.compat.v1.placeholder(leaf.dtype, leaf.shape)
        for leaf in tf.nest.flatten(specs, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(specs, flat, expand_composites=True)


def _spec(leaf: object) -> object:
    if leaf is None or isinstance(leaf, tf.TypeSpec):
        return leaf
    return tf.type_spec_from_value(leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf))


def _create_outside(next_creator: Callable, **kwargs: object) -> tf.Variable:
    """Makes a variable as it is made in the strategy's scope: at once, for all replicas."""
    value = kwargs.get("initial_value")
    if tf.is_tensor(value):
        kwargs["initial_value"] = tf.get_static_value(value)  # a constant of the graph
    context = distribute_lib.get_replica_context()

    def create(_: object = None) -> tf.Variable:
        with tf.init_scope():
            return next_creator(**kwargs)

    return context.merge_call(create) if isinstance(context, BuildContext) else create()
