"""What `fit`, `evaluate` and `predict` call where all workers share each batch.

Keras would read a batch and use it in one function: who loses the function loses the batch. These
take it first, so that it can be used again.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.parameter_server.batch_arguments import BatchArguments, Hosts, ReadByChief
from tfparallel.parameter_server.repeated_steps import RepeatedSteps
from tfparallel.parameter_server.steps_once import StepsOnce


class SharedStep:
    """What Keras calls with an iterator, to train or test on `steps_per_execution` batches.

    Args:
        steps: runs them.
        model: whose steps they are.
        step: a function of a batch, which is traced.
        chief_device: where outputs are wanted.
        hosts: take each step together.
    """

    def __init__(
        self,
        steps: RepeatedSteps | StepsOnce,
        model: keras.Model,
        step: Callable,
        chief_device: str,
        hosts: Hosts,
    ):
        self.steps, self._model, self._step = steps, model, step
        self._chief_device, self._hosts = chief_device, hosts
        self._functions: dict[Callable, Any] = {}  # by recipe
        self._known: set[tuple] = set()  # recipes and specs

    def __call__(self, iterator: Iterator) -> object:
        outputs = None
        for number in range(self._model.steps_per_execution):
            batch = next(iterator, None)
            if batch is None and number == 0:
                raise StopIteration
            if batch is None:
                break
            outputs = self._run(batch, getattr(iterator, "element_spec", None))
        return outputs

    def experimental_get_tracing_count(self) -> int:
        """As of a `tf.function`: how often the step was traced."""
        return len(self._known)

    def _run(self, batch: object, specs: object = None) -> object:
        """Runs the step on a batch; `specs` are those of the dataset that it is from."""
        arguments = batch if isinstance(batch, BatchArguments) else ReadByChief(batch, specs)
        recipe, specs = arguments.recipe, arguments.specs
        if recipe not in self._functions:
            self._functions[recipe] = self._make_function(recipe)
        function = self._functions[recipe]
        if (recipe, str(specs)) not in self._known:
            generation = tf.TensorSpec((), tf.int64)
            self.steps.cover(function.get_concrete_function(generation, specs).graph)
            self._known.add((recipe, str(specs)))
        return self.steps.run(function, functools.partial(arguments.tensors, self._hosts))

    def _make_function(self, recipe: Callable) -> object:
        step = self.steps.guarded(lambda tensors: self._on_chief(self._step(recipe(tensors))))
        return tf.function(step, reduce_retracing=True, autograph=False)

    def _on_chief(self, outputs: object) -> object:
        """Tensors that are still there when a worker is gone."""
        with tf.device(self._chief_device):
            return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)


class SharedPredictStep(SharedStep):
    """What Keras calls with a list of batches, to get all their predictions in order."""

    def __call__(self, data: Iterable) -> object:
        outputs = [self._run(batch) for batch in data]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
