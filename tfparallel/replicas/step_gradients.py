"""What a step of a user's own gives optimizers: gradients that those of parts of a batch make.

Replicas' gradients are added up, weighted by rows, when an optimizer gets them. What a step does to
them before, it does to those of a replica's own rows: that is right for what is linear (a factor, a
mean of several, a decay of weights), and for nothing else. Gradients that are clipped, normalised
or projected by hand are other ones for parts of a batch. So what optimizers were given in the trace
of a step for any rows (`step_build.py`) is tried in two ways:

    in parts            on random rows, as losses are (`step_losses.py`)
    at several scales   all gradients by variables times s must make a + b s

The second finds a norm, too, which those of random rows are not above, or are all far above.
Gradients that are as a tape has made them are not tried, which costs seconds for large models.
"""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals.gradients_asked_for import is_as_asked_for
from tfparallel.replicas.own_step import RefusedStepError, StepOfOwnRows, few_digits_of
from tfparallel.replicas.row_trial import UntriableError

_SCALES = 0.0, 1.0, 2.0**10, 2.0**20  # powers of two round nothing
_SCALES_OF_FLOAT16 = 0.0, 0.25, 1.0, 4.0  # which has few of them
_OF_LINES = 0.1  # relative; what is on none is several times as large, or as small
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
    number = _number_of_all(step)
    if number is None or not step.is_of_own_rows(number):
        return
    losses = filter(step.has, step.losses)
    if any(step.depends_on_scale(loss) or step.is_of_others(loss) for loss in losses):
        return  # a loss of gradients, which do not grow as it does; or one that parts do not make
    computed_in = few_digits_of(model)
    scales = _SCALES_OF_FLOAT16 if computed_in == "float16" else _SCALES
    at_scales: list[np.ndarray] = []

    def watch(at_scale: Callable[[float], tf.Tensor], at_one: tf.Tensor) -> None:
        if not at_scales and np.all(np.isfinite(at_one)):  # one of the rows drawn is enough
            values = [at_one if scale == 1.0 else at_scale(scale) for scale in scales]
            at_scales.extend(value.numpy() for value in values)

    try:
        kinds = step.found_for(number, computed_in, _DRAWS, watch).kinds
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
    if "mean" not in kinds or not _are_on_a_line(scales, at_scales):
        raise RefusedStepError(
            "Each replica has some rows of a batch, and what a train_step does to gradients must "
            "be right for those of some rows: what is linear, such as a factor. Received: "
            f"{type(step.context.strategy).__name__}, and model '{model.name}' "
            f"({type(model).__name__}), whose train_step gives an optimizer something else, such "
            "as gradients that are clipped or normalised by hand. Let the optimizer clip them "
            "(clipnorm, global_clipnorm or clipvalue), which does so with those of all rows; or "
            "compute them of all rows: strategy.all_rows((x, y)). Or let each replica do that to "
            "its own, if that is meant: tfparallel.mean_loss(model)."
        )


def _number_of_all(step: StepOfOwnRows) -> tf.Tensor | None:
    """One number for each gradient, float64: that of all rows is the mean of those of parts.

    None if the step has changed none of them.
    """
    given = step.context.gradients
    of_rows = [each.values if isinstance(each, tf.IndexedSlices) else each for each in given]
    known = [x for x in of_rows if step.has(x) and x.dtype.is_floating]
    if all(map(is_as_asked_for, known)):
        return None
    numbers = []
    with step.graph.as_default():
        for values in known:
            if values.shape.rank != 0:  # with other factors, as those of a softmax add up to zero
                columns = tf.range(tf.shape(values)[-1])
                values *= tf.cast(tf.cos(tf.cast(columns, tf.float32)), values.dtype)
            numbers.append(tf.cast(tf.reduce_sum(values), tf.float64))
        return tf.stack(numbers)


def _are_on_a_line(scales: Sequence[float], values: Sequence[np.ndarray]) -> bool:
    """Whether `values`, the first at 0, are a + b s for each of `scales`, as far as they go."""
    if not np.all(np.isfinite(values[0])):
        return False  # divided by the norm of gradients
    known = [(s, v) for s, v in zip(scales, values, strict=True) if np.all(np.isfinite(v))]
    last, of_last = known[-1]
    for scale, value in known[1:]:
        expected = values[0] + (of_last - values[0]) * (scale / last)
        largest = max(np.max(np.abs(value)), np.max(np.abs(expected)))
        if np.max(np.abs(value - expected)) > _OF_LINES * largest:
            return False
    return True
