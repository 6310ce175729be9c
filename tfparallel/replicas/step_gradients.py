"""What a step of a user's own gives optimizers: gradients that those of parts of a batch make.

Replicas' gradients are added up, weighted by rows, when an optimizer gets them. What a step does to
them before, it does to those of a replica's own rows: that is right for what is linear (a factor, a
mean of several, a decay of weights), and for nothing else. Gradients that are clipped, normalised
or projected by hand are other ones for parts of a batch. So what optimizers were given in the trace
of a step for any rows (`step_build.py`) is tried in two ways:

    in parts            on random rows, as losses are (`step_losses.py`)
    at several scales   all gradients by variables times s must make a + b s

The second finds a norm, too, which those of random rows are not above, or are all far above.
Gradients that are as a tape has made them are not tried, which costs seconds for large models,
unless they begin with what the step gives (`output_gradients`), or are not those of what the loss
is computed by (`tf.custom_gradient`, `tf.stop_gradient`): `loss / tf.stop_gradient(loss)` is 1.
"""

import keras
import tensorflow as tf

from tfparallel.replicas.own_step import RefusedStepError, StepOfOwnRows, few_digits_of
from tfparallel.replicas.row_trial import UntriableError

_DRAWS = 2  # each computes the model's gradients three times


def check_gradients(model: keras.Model, step: StepOfOwnRows | None) -> None:
    """Refuses a step that gives an optimizer what is no sum of the gradients of parts.

    Args:
        model: whose `train_step` has been traced.
        step: as `step_losses.check_losses`, which has found nothing, takes it.

    Raises:
        RefusedStepError: naming the model.
    """
    if step is None or step.is_coupled_by_layers():
        return
    if _are_as_of_tape(step):
        return
    number, _ = numbers_of_gradients(step)
    if not step.is_of_own_rows(number):
        return
    losses = filter(step.has, step.losses)
    if any(step.depends_on_scale(loss) or step.is_of_others(loss) for loss in losses):
        return  # a loss of gradients, which do not grow as it does; or one that parts do not make
    try:
        kinds = step.kinds_of(number, few_digits_of(model), _DRAWS, is_scaled=True)
    except UntriableError as error:
        tf.get_logger().warning(
            "What the train_step of model '%s' does to gradients cannot be tried on random rows "
            "(%r). It is taken for linear; if it is not, as clipping is not, the weights would not "
            "be those of one device. To say that it is right, declare the model by "
            "tfparallel.mean_loss.",
            model.name,
            error.__cause__,
        )
        return
    if "mean" not in kinds:
        raise RefusedStepError(
            "Each replica has some rows of a batch, and what a train_step does to gradients must "
            "be right for those of some rows: what is linear, such as a factor. Received: "
            f"{type(step.context.strategy).__name__}, and model '{model.name}' "
            f"({type(model).__name__}), whose train_step gives an optimizer something else, such "
            "as gradients that are clipped or normalised by hand, or by a tf.custom_gradient, or "
            "sums over rows. Let the optimizer clip them "
            "(clipnorm, global_clipnorm or clipvalue), which does so with those of all rows; or "
            "compute them of all rows: strategy.all_rows((x, y)). Or let each replica do that to "
            "its own, if that is meant: tfparallel.mean_loss(model)."
        )


def numbers_of_gradients(step: StepOfOwnRows) -> tuple[tf.Tensor, tf.Tensor]:
    """Of each gradient that optimizers get a number, and its largest one: `[gradients]`, float64.

    The number is linear: those of parts of a batch make that of all rows as the gradients do.
    """
    with step.graph.as_default():
        numbers, sizes = [tf.zeros((), tf.float64)], [tf.zeros((), tf.float64)]  # if there are none
        for values in given_to_optimizers(step):
            sizes.append(tf.cast(tf.reduce_max(tf.abs(values)), tf.float64))
            if values.shape.rank != 0:  # with other factors, as those of a softmax add up to zero
                columns = tf.range(tf.shape(values)[-1])
                values *= tf.cast(tf.cos(tf.cast(columns, tf.float32)), values.dtype)
            numbers.append(tf.cast(tf.reduce_sum(values), tf.float64))
        return tf.stack(numbers), tf.stack(sizes)


def given_to_optimizers(step: StepOfOwnRows) -> list[tf.Tensor]:
    """The gradients that optimizers get, of sparse ones the values."""
    given = step.context.gradients
    of_rows = [each.values if isinstance(each, tf.IndexedSlices) else each for each in given]
    return [x for x in of_rows if step.has(x) and x.dtype.is_floating]


def _are_as_of_tape(step: StepOfOwnRows) -> bool:
    """Whether the step has changed none of them, and says of none how it is computed."""
    are_of_tape = all(
        step.is_of_tape(x) or not step.is_of_own_rows(x) for x in given_to_optimizers(step)
    )
    return are_of_tape and not step.has_backward_of_its_own()
