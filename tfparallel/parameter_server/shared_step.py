"""What `fit`, `evaluate` and `predict` call where all workers share each batch.

Keras would read a batch and use it in one function: who loses the function loses the batch. These
take it first, so that it can be used again.
"""

from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfparallel.parameter_server.keras_functions import as_tensors
from tfparallel.parameter_server.repeated_steps import RepeatedSteps
from tfparallel.parameter_server.steps_once import StepsOnce


class SharedArguments(Protocol):
    """What one step is called with."""

    @property
    def specs(self) -> Any:
        """`TypeSpec`s of `tensors`."""

    @property
    def recipe(self) -> Callable[[Any], Any]:
        """Makes the batch of `tensors`, in the step; equal for all that are traced alike."""

    def tensors(self) -> Any:
        """A nest of tensors, on the workers or here; called again where the step is."""


class ReadByChief:
    """A batch that the chief has read: TensorFlow sends each worker its rows with the step.

    What is known of shapes matters: Keras weighs a batch by its rows where it knows them.

    Args:
        batch: as Keras hands it to its functions.
        specs: of the dataset that it is from, if it is.
    """

    def __init__(self, batch: Any, specs: Any = None):
        self._batch = as_tensors(batch)
        self.specs = keras.tree.map_structure(_spec, self._batch if specs is None else specs)

    def tensors(self) -> Any:
        """The batch."""
        return self._batch

    @staticmethod
    def recipe(batch: Any) -> Any:
        """The batch itself."""
        return batch


class SharedStep:
    """What Keras calls with an iterator, to train or test on `steps_per_execution` batches.

    Args:
        steps: runs them.
        model: whose steps they are.
        step: a function of a batch, which is traced.
        chief_device: where outputs are wanted.
    """

    def __init__(
        self,
        steps: RepeatedSteps | StepsOnce,
        model: keras.Model,
        step: Callable,
        chief_device: str,
    ):
        self.steps, self._model, self._step = steps, model, step
        self._chief_device = chief_device
        self._functions: dict[Callable, Any] = {}  # by recipe
        self._known: set[tuple] = set()  # recipes and specs

    def __call__(self, iterator: Any) -> Any:
        outputs = None
        for number in range(self._model.steps_per_execution):
            batch = next(iterator, None)
            if batch is None and number == 0:
                raise StopIteration
            if batch is None:
                break
            outputs = self._run(batch, getattr(iterator, "element_spec", None))
        return outputs

    def _run(self, batch: Any, specs: Any = None) -> Any:
        """Runs the step on a batch; `specs` are those of the dataset that it is from."""
        arguments: Any = batch if hasattr(batch, "recipe") else ReadByChief(batch, specs)
        recipe, specs = arguments.recipe, arguments.specs
        if recipe not in self._functions:
            self._functions[recipe] = self._make_function(recipe)
        function = self._functions[recipe]
        if (recipe, str(specs)) not in self._known:
            generation = tf.TensorSpec((), tf.int64)
            self.steps.cover(function.get_concrete_function(generation, specs).graph)
            self._known.add((recipe, str(specs)))
        return self.steps.run(function, arguments)

    def _make_function(self, recipe: Callable) -> Any:
        step = self.steps.guarded(lambda tensors: self._on_chief(self._step(recipe(tensors))))
        return tf.function(step, reduce_retracing=True, autograph=False)

    def _on_chief(self, outputs: Any) -> Any:
        """Tensors that are still there when a worker is gone."""
        with tf.device(self._chief_device):
            return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)


class SharedPredictStep(SharedStep):
    """What Keras calls with a list of batches, to get all their predictions in order."""

    def __call__(self, data: Any) -> Any:
        outputs = [self._run(batch) for batch in data]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)


def _spec(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.OptionalSpec):
        return None
    return leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)
