"""Gradients that layers say how to compute, in Keras's own step: those of rows, each of its own.

A layer may say what its backward pass is (`tf.custom_gradient`): straight through, reversed,
clipped by row. Replicas have some rows each, and their gradients are added up. That is the gradient
of one device, unless the backward pass couples rows: `gradient / tf.norm(gradient)` is another one
for parts of a batch, and nothing of the forward pass, or of the loss, would tell.

So a model whose call says how a gradient is computed has its step traced for any rows, as steps of
a user's own are (`step_build.py`), and the gradients of random rows are computed, all at once and
in two parts. The loss of a part is weighed by its rows there, as it is when the step runs: what
comes back to a row is what comes back on one device, so parts have to add up, however large the
loss is. They do so at one scale that a norm of random rows is below, and at one that it is above.
"""

import keras
import tensorflow as tf

from tfparallel.replicas.own_step import RefusedStepError, StepOfOwnRows, few_digits_of
from tfparallel.replicas.row_trial import UntriableError
from tfparallel.replicas.step_gradients import numbers_of_gradients

_DRAWS = 2  # each computes the model's gradients three times
_LOSS_SCALES = 1.0, 2.0**20  # powers of two round nothing
_LOSS_SCALES_OF_FLOAT16 = 2.0**-6, 1.0
_UNDER_SCALED_LOSS = 2.0**-15, 2.0**-9  # an optimizer begins with 2^15, by which squares overflow


def check_layer_gradients(model: keras.Model, step: StepOfOwnRows | None) -> None:
    """Refuses layers whose backward pass couples rows.

    Args:
        model: with Keras's own `train_step`, which is not said to be right for parts of a batch.
        step: as it was traced for any rows, weighing its loss; None if it could not be.

    Raises:
        RefusedStepError: naming the model.
    """
    if step is None or step.is_coupled_by_layers():
        return
    computed_in, numbers_and_sizes = few_digits_of(model), numbers_of_gradients(step)
    with step.graph.as_default():
        numbers = tf.stack(numbers_and_sizes)
    if not step.is_of_own_rows(numbers):
        return
    scales: tuple[float, ...] = (
        _LOSS_SCALES_OF_FLOAT16 if computed_in == "float16" else _LOSS_SCALES
    )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        scales = *_UNDER_SCALED_LOSS, *scales
    try:
        kinds = step.kinds_of(numbers, computed_in, _DRAWS, loss_scales=scales)
    except UntriableError as error:
        tf.get_logger().warning(
            "What a tf.custom_gradient in model '%s' does to gradients cannot be tried on random "
            "rows (%r). It is taken for right for each row; if it couples rows, as a norm over the "
            "batch does, the weights would not be those of one device. To say that it is right, "
            "declare the model by tfparallel.mean_loss.",
            model.name,
            error.__cause__,
        )
        return
    if "sum" not in kinds:
        raise RefusedStepError(
            "Each replica has some rows of a batch, and what a layer says of gradients must be "
            "right for those of some rows: computed for each row, or linear. Received: "
            f"{type(step.context.strategy).__name__}, and model '{model.name}' "
            f"({type(model).__name__}), in which a tf.custom_gradient gives a part of the rows "
            "another gradient than among all, as one that is divided by its norm over the batch, "
            "or clipped by it. Compute norms for each row (axis=1), or let the optimizer clip "
            "(clipnorm, global_clipnorm). Or let each replica do that to its own rows, if that is "
            "meant: tfparallel.mean_loss(model)."
        )
