"""What a step of a user's own takes gradients of: a loss of which parts of a batch make the whole.

Replicas' gradients are added up, weighted by rows. That is the gradient of one device for a mean
over rows, and for values of single rows, which a tape adds up. Any other loss, a correlation over
the batch for one, would train to other weights. So the step is traced for any rows before it runs
(`step_build.py`), its losses are computed from that graph for random rows, all and in parts
(`row_trial.py`), and a step of which they do not fit is refused.

What a loss has from the other replicas, by `all_rows` or a reduction, a trial on one device does
not know: a loss that is computed of such is not tried.
"""

import keras
import tensorflow as tf

from tfparallel.replicas.computed_losses import declared_kind_of
from tfparallel.replicas.loss_kinds import declared_kind
from tfparallel.replicas.own_step import RefusedStepError, StepOfOwnRows, few_digits_of
from tfparallel.replicas.row_trial import UntriableError


def check_losses(model: keras.Model, step: StepOfOwnRows | None) -> None:
    """Refuses a step whose loss is not put together by parts of the batch.

    Args:
        model: whose `train_step` has been traced.
        step: as it was, for any number of rows, with what layers couple (BatchNorm) left out; None
            if it could not be.

    Raises:
        RefusedStepError: naming the model.
    """
    if step is None or step.is_coupled_by_layers():
        return
    computed_in = few_digits_of(model)
    losses = [*filter(step.has, step.losses)]
    if any(map(step.chooses_rows_by_chance, losses)):
        tf.get_logger().warning(
            "The loss of which the train_step of model '%s' takes gradients is of rows that random "
            "numbers choose or shuffle, as mixup does. Each replica does so with its own "
            "rows: of two rows of different replicas none meets the other. Of those of all: x, y = "
            "strategy.all_rows((x, y)), and random numbers of a seed that is the same everywhere.",
            model.name,
        )
    for loss in losses:
        if step.is_of_own_rows(loss):
            _check(model, step, loss, computed_in)


def is_declared(model: keras.Model) -> bool:
    """Whether the loss of `model`, or of its `train_step`, is said to be made of parts."""
    return declared_kind(model.train_step) is not None or declared_kind_of(model) is not None


def _check(
    model: keras.Model, step: StepOfOwnRows, loss: tf.Tensor, computed_in: str | None
) -> None:
    """Tries one loss; the tape adds up one that is no number."""
    is_by_row = bool(loss.shape.rank) and loss.shape[0] is None
    with step.graph.as_default():
        number = tf.reduce_sum(loss)
    try:
        kinds = step.kinds_of(number, computed_in, is_scaled=step.depends_on_scale(loss))
    except UntriableError as error:
        tf.get_logger().warning(
            "The loss of which the train_step of model '%s' takes gradients cannot be tried on "
            "random rows (%r). It is taken for a mean over rows, or values of single rows; of one "
            "that couples rows in another way the weights would not be those of one device. To say "
            "that it is no such, declare the model by tfparallel.mean_loss.",
            model.name,
            error.__cause__,
        )
        return
    if ("sum" if is_by_row else "mean") not in kinds:
        raise RefusedStepError(
            "Each replica has some rows of a batch, and the loss of which a train_step takes "
            "gradients must be a mean over rows, or have a value for each row, which is computed "
            f"of that row alone. Received: {type(step.context.strategy).__name__}, and model "
            f"'{model.name}' ({type(model).__name__}), whose loss of a batch is another one than "
            "that of its parts. Compute it of the rows of all replicas: "
            "strategy.all_rows(y_pred). Or let it be one loss for each replica's rows, if that is "
            "meant: tfparallel.mean_loss(model)."
        )
