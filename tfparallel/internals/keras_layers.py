"""What models, layers, losses, metrics and optimizers of Keras keep to themselves."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

# The cells of recurrent layers that draw masks.
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

# `Mean.update_state` and `Sum.update_state`: the metrics a train step feeds with scalar losses; and
# that of metrics of functions, which may be of a whole batch.
from keras.src.metrics import reduction_metrics

# The class of functional models, whose graph of layers a pipeline cuts into stages.
from keras.src.models.functional import Functional

# The class of every optimizer, also of those that are not `keras.optimizers.Optimizer`.
from keras.src.optimizers.base_optimizer import BaseOptimizer

# The method by which they draw masks `[rows, features]`.
MASKS_OF_CELL = "_create_dropout_mask"

Mean, Sum = reduction_metrics.Mean, reduction_metrics.Sum
MeanMetricWrapper = reduction_metrics.MeanMetricWrapper

__all__ = [
    "BaseOptimizer",
    "DropoutRNNCell",
    "Functional",
    "Mean",
    "MeanMetricWrapper",
    "MASKS_OF_CELL",
    "RematMode",
    "Sum",
    "add_loss_again",
    "added_losses",
    "all_accumulated_gradients",
    "apply_without_replicas",
    "behind",
    "call_takes_training",
    "clear_added_losses",
    "compile_loss_of",
    "compiled_metrics_of",
    "direct_layers",
    "drop_added_losses",
    "dropout_of_scores",
    "embedding_table",
    "flat_losses",
    "function_of_metric",
    "functional_graph",
    "functional_of",
    "has_stock_moments",
    "inputs_structure",
    "kept_losses",
    "layers_of",
    "moments_method",
    "moments_of",
    "loss_tracker_of",
    "losses_asked_for",
    "nodes_by_depth",
    "operation_of_node",
    "options_of_loss",
    "outputs_structure",
    "own_losses",
    "own_state",
    "own_variables",
    "own_weights",
    "projections_of",
    "reduction_axes",
    "remat_mode_of",
    "seed_generators_of",
    "stock_own_losses",
    "set_behind",
    "step_counter_of",
    "trained_by",
]

# ---- layers --------------------------------------------------------------------------------------


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """A model or layer and all layers in it, also those in attributes of layers, each once.

    The public `layers` of a model has its direct ones only.
    """
    return list(layer._flatten_layers())


def direct_layers(model: keras.Layer) -> list[keras.Layer]:
    """The layers that `model` itself has, subclassed models' attributes too."""
    return list(model._flatten_layers(include_self=False, recursive=False))


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The layer's own, not those of layers in it; trainable or not as they were created."""
    return layer._trainable_variables + layer._non_trainable_variables


class RematMode(Protocol):
    """What a `keras.RematScope` says of the layers that are made in it."""

    mode: str
    output_size_threshold: int
    layer_names: Collection[str]


def remat_mode_of(layer: keras.Layer) -> RematMode | None:
    """That of the scope in which the layer was made; None outside of one, or of one that is off."""
    mode = layer._remat_mode
    return None if mode is None or mode.mode is None else mode


def own_state(layer: keras.Layer) -> list[keras.Variable]:
    """Those of `own_variables` that were created not trainable."""
    return layer._non_trainable_variables


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Those of `own_variables` that were created trainable."""
    return layer._trainable_variables


def seed_generators_of(layer: keras.Layer) -> list[keras.random.SeedGenerator]:
    """The layer's own, not those of layers in it."""
    return layer._seed_generators


def behind(variable: keras.Variable) -> Any:
    """The variable of TensorFlow behind one of Keras; None as long as it is not created.

    The public `value` may be a tensor, cast to the dtype that a layer computes in.
    """
    return variable._value


def set_behind(variable: keras.Variable, value: tf.Variable) -> None:
    """Has `variable` be kept by another variable of TensorFlow, of the same shape and value."""
    variable._value = value


def projections_of(
    attention: keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention,
) -> list:
    """The layers of a `MultiHeadAttention` or `GroupQueryAttention` that multiply.

    The query's, key's, value's, that of a gate if there is one, and the output's, which is last.
    """
    gate = getattr(attention, "_gate_dense", None)
    to_heads = [attention._query_dense, attention._key_dense, attention._value_dense]
    return [*to_heads, *([] if gate is None else [gate]), attention._output_dense]


def embedding_table(layer: keras.layers.Embedding) -> keras.Variable:
    """The table as it was created; the public property adds what quantisation and LoRA change."""
    return layer._embeddings


def has_stock_moments(layer: keras.layers.BatchNormalization) -> bool:
    """Whether the class of a BatchNorm computes mean and variance as Keras does."""
    return type(layer)._moments is keras.layers.BatchNormalization._moments


def moments_method(layer: keras.layers.BatchNormalization) -> Callable[..., tuple]:
    """What computes `moments_of` a BatchNorm."""
    return layer._moments


def call_takes_training(layer: keras.Layer) -> bool:
    """Whether `layer.call` has an argument `training`."""
    return layer._call_has_training_arg


def moments_of(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple:
    """Mean and variance that a BatchNorm takes of a batch, also where it synchronises them."""
    return layer._moments(inputs, mask)


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """What a BatchNorm takes mean and variance over."""
    return layer._reduction_axes


# ---- losses that layers add ----------------------------------------------------------------------


def added_losses(layer: keras.Layer) -> list[tf.Tensor]:
    """The list itself of what `layer` has added in its calls (`add_loss`, activities)."""
    return layer._losses


def add_loss_again(layer: keras.Layer, loss: tf.Tensor) -> None:
    """Adds what was taken out of `added_losses`."""
    layer._losses.append(loss)


def drop_added_losses(layer: keras.Layer, start: int) -> list:
    """Takes those behind the first `start` out of `added_losses`."""
    losses = list(layer._losses[start:])
    del layer._losses[start:]
    return losses


def own_losses(layer: keras.Layer) -> Callable[[], list]:
    """The method that gives `added_losses` to the loss of the model."""
    return layer._get_own_losses


def stock_own_losses(layer: keras.Layer) -> list:
    """What its class says the layer has added, whatever was put before that method."""
    return type(layer)._get_own_losses(layer)


@contextlib.contextmanager
def kept_losses(layer: keras.Layer) -> Iterator[None]:
    """Puts back what `layer`, and layers in it, have added."""
    before = [(x, list(x._losses), set(x._loss_ids)) for x in layer._flatten_layers()]
    try:
        yield
    finally:
        for each, losses, loss_ids in before:
            each._losses[:] = losses
            each._loss_ids = loss_ids


def clear_added_losses(model: keras.Model) -> None:
    """Forgets what layers have added, as Keras does before each step."""
    model._clear_losses()


# ---- what a model was compiled with --------------------------------------------------------------


def compile_loss_of(model: keras.Model) -> keras.Loss | None:
    """The object that computes the compiled losses from `(y, y_pred, sample_weight)`, or None."""
    return getattr(model, "_compile_loss", None)


def flat_losses(model: keras.Model) -> list:
    """The compiled losses, one entry for each output, with `loss`; empty before the model is built.

    Where they are: the attribute `_flat_losses` of `compile_loss_of(model)`.
    """
    return getattr(compile_loss_of(model), "_flat_losses", None) or []


def losses_asked_for(model: keras.Model) -> list:
    """The compiled losses; before the model is built, what `compile` was given."""
    given = getattr(compile_loss_of(model), "_user_loss", None)
    return [entry.loss for entry in flat_losses(model)] or keras.tree.flatten(given)


def compiled_metrics_of(model: keras.Model) -> keras.Metric | None:
    """The object that updates the compiled metrics, with `metrics`; or None."""
    return model._compile_metrics


def loss_tracker_of(model: keras.Model) -> keras.Metric | None:
    """The metric "loss"."""
    return getattr(model, "_loss_tracker", None)


def function_of_metric(
    metric: keras.metrics.MeanMetricWrapper,
) -> tuple[Callable, dict[str, object]]:
    """The function of a `MeanMetricWrapper`, and what it is called with besides `y`."""
    return metric._fn, metric._fn_kwargs


def options_of_loss(loss: keras.Loss) -> dict[str, Any]:
    """What the function of a Keras loss is called with besides `y`."""
    return getattr(loss, "_fn_kwargs", {})


# ---- optimizers ----------------------------------------------------------------------------------


def trained_by(optimizer: BaseOptimizer) -> list[keras.Variable]:
    """What `optimizer` was built for, in its order; empty before."""
    return optimizer._trainable_variables


def step_counter_of(optimizer: BaseOptimizer) -> keras.Variable:
    """How often it was applied; the public `iterations` counts updates of accumulated gradients."""
    return optimizer._iterations


def apply_without_replicas(
    optimizer: BaseOptimizer,
    grads: Iterable[tf.Tensor],
    trainable_variables: Iterable[keras.Variable] | None,
) -> object:
    """What a `LossScaleOptimizer` does with one gradient for all replicas."""
    return optimizer._common_apply(grads, trainable_variables)


def accumulated_gradient(optimizer: BaseOptimizer, variable: keras.Variable) -> keras.Variable:
    """The sum of gradients that `optimizer` has accumulated for `variable`."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def all_accumulated_gradients(optimizer: BaseOptimizer) -> list[keras.Variable | None]:
    """The sum of gradients that `optimizer` has accumulated for each variable that it trains."""
    return optimizer._accumulated_gradients


def moving_averages(optimizer: BaseOptimizer) -> list[keras.Variable | None]:
    """The moving average (`use_ema`) of each variable that `optimizer` trains."""
    return optimizer._model_variables_moving_average


def gives_scores(
    attention: keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention,
) -> bool:
    """Whether the call of a `MultiHeadAttention` under way is asked for its scores, too."""
    return getattr(attention, "_return_attention_scores", False)


def dropout_of_scores(
    attention: keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention,
) -> keras.layers.Dropout:
    """What drops scores of a `MultiHeadAttention` or `GroupQueryAttention` that has been built."""
    return attention._dropout_layer


# ---- layouts -------------------------------------------------------------------------------------


def layout_map_of(distribution: keras.distribution.ModelParallel) -> keras.distribution.LayoutMap:
    """The `LayoutMap` of a `keras.distribution.ModelParallel`."""
    return distribution._layout_map


# ---- graphs of functional models -----------------------------------------------------------------


def functional_of(model: keras.Sequential) -> Functional:
    """The functional model that a built `Sequential` runs."""
    return model._functional


def functional_graph(model: keras.Model) -> Functional | None:
    """The functional model whose graph `model` runs, or None for a subclassed model."""
    if isinstance(model, keras.Sequential):
        return functional_of(model)
    overrides_call = type(model).call is not Functional.call
    return model if isinstance(model, Functional) and not overrides_call else None


def nodes_by_depth(graph: Functional) -> dict[int, list]:
    """The calls of layers in it; those of the greatest depth run first."""
    return graph._nodes_by_depth


def operation_of_node(graph: Functional, node: object) -> Callable:
    """What Keras calls for `node`, which another model may share."""
    return graph._get_operation_for_node(node)


def inputs_structure(model: keras.Model) -> object:
    """The nest of inputs of a functional or built `Sequential` model; None for another."""
    graph: Any = model
    if isinstance(model, keras.Sequential):
        graph = functional_of(model) if model.built else None
    return graph._inputs_struct if isinstance(graph, Functional) else None


def outputs_structure(graph: Functional) -> object:
    """The nest of its outputs, as it was given."""
    return graph._outputs_struct
