"""What `fit`, `evaluate` and `predict` call where all workers share each batch.

Keras would read a batch and use it in one function: who loses the function loses the batch. These
read it first, so that it can be used again.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.parameter_server.keras_functions import as_tensors
from tfparallel.parameter_server.repeated_steps import RepeatedSteps


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
        steps: RepeatedSteps,
        model: keras.Model,
        step: Callable,
        chief_device: str,
    ):
        self.steps, self._model, self._chief_device = steps, model, chief_device
        self._function = tf.function(
            steps.guarded(lambda batch: self._on_chief(step(batch))),
            reduce_retracing=True,
            autograph=False,
        )
        self._known: set[str] = set()

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
        """Runs the step on a batch; `specs` are those of the dataset that it is from.

        What is known of shapes matters: Keras weighs a batch by its rows where it knows them.
        """
        batch = as_tensors(batch)
        specs = keras.tree.map_structure(_spec, batch if specs is None else specs)
        if str(specs) not in self._known:
            generation = tf.TensorSpec((), tf.int64)
            self.steps.cover(self._function.get_concrete_function(generation, specs).graph)
            self._known.add(str(specs))
        return self.steps.run(self._function, batch)

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
