"""Random numbers that a step adds to gradients, as for differential privacy: how many are drawn.

One device draws them once for a batch. Replicas that draw each for itself have numbers that are
weighed by rows and added up, as gradients are, and their mean varies less than each of them:

    one device                         g + z                    variance s^2
    two replicas, draws of their own   g + (z_0 + z_1) / 2                  s^2 / 2
    two replicas, the same draws       g + z                                s^2

Which of them one meant nobody can tell, and no weight is wrong but by chance: so it is said.
"""

from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.internals.gradients_asked_for import is_of_gradient
from tfparallel.internals.keras_layers import behind, layers_of, seed_generators_of
from tfparallel.internals.traced_values import draws
from tfparallel.replicas.dependence import reaches
from tfparallel.replicas.local_copies import copies_here
from tfparallel.replicas.own_step import StepOfOwnRows
from tfparallel.replicas.step_gradients import given_to_optimizers


def tell_of_noise(model: keras.Model, step: StepOfOwnRows | None) -> None:
    """Warns of numbers that each replica draws for itself, and adds to gradients.

    Args:
        model: whose `train_step` has been traced.
        step: as `step_losses.check_losses`, which has found nothing, takes it.
    """
    if step is None:
        return
    rows, seeds = set(map(id, step.rows())), _seeds(model, step)
    drawn = [x for given in given_to_optimizers(step) for x in _behind(given) if draws(x)]
    if any(_is_own(x, seeds) and not reaches(x.outputs[0], rows) for x in drawn):
        tf.get_logger().warning(
            "The train_step of model '%s' changes gradients by random numbers that each replica "
            "draws for itself. What is added up of them varies less than what one device draws, by "
            "about the number of replicas in variance, and noise for differential privacy is too "
            "small. Draw the same numbers on all replicas: tf.random.stateless_normal with a seed "
            "that is the same everywhere, such as [seed, optimizer.iterations].",
            model.name,
        )


def _seeds(model: keras.Model, step: StepOfOwnRows) -> set[int]:
    """The ids of tensors of the graph that stand for states of Keras's seeds."""
    states = [each.state for layer in layers_of(model) for each in seed_generators_of(layer)]
    handles = {id(copy.handle) for state in states for copy in copies_here(behind(state))}
    return {id(inner) for outer, inner in step.graph.captures if id(outer) in handles}


def _is_own(operation: tf.Operation, seeds: set[int]) -> bool:
    """Whether replicas draw other numbers by `operation`."""
    is_stateless = operation.type.startswith("Stateless")
    return not is_stateless or any(reaches(x, seeds) for x in operation.inputs)


def _behind(value: tf.Tensor) -> Iterator[tf.Operation]:
    """What the step itself has computed `value` by, of gradients that a tape has given."""
    stack, seen = [value.op], {value.op.name}
    while stack:
        operation = stack.pop()
        if is_of_gradient(operation):
            continue
        yield operation
        behind_it = {x.op.name: x.op for x in operation.inputs if x.op.name not in seen}
        seen |= behind_it.keys()
        stack += behind_it.values()
