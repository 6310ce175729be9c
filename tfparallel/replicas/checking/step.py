"""One training step of a model from a given state, and what it left."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from tfparallel.replicas.device_names import devices_here
from tfparallel.replicas.local_copies import copies_of
from tfparallel.replicas.model_optimizers import optimizers_of


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Weights, states and seeds of the layers, then those of the optimizers; no metric's."""
    of_metrics = {id(variable) for variable in model.metrics_variables}
    of_optimizers = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    unique = {id(v): v for v in [*model.variables, *of_optimizers]}
    return [variable for key, variable in unique.items() if key not in of_metrics]


def value_of(copy: object) -> np.ndarray:
    """The value of one of `copies_of`."""
    return np.array(tf.convert_to_tensor(copy))


def values_of(model: keras.Model) -> list[np.ndarray]:
    """The values of `variables_of`, of their first copies."""
    return [value_of(copies_of(variable)[0]) for variable in variables_of(model)]


def kind_of(variable: keras.Variable, model: keras.Model) -> str | None:
    """The kind of a `Difference`; None of seeds, which are not compared."""
    if not tf.as_dtype(variable.dtype).is_floating:
        return None
    if any(variable is own for own in model.trainable_variables):
        return "weight"
    return "state" if any(variable is own for own in model.variables) else "optimizer"


@dataclass
class StepOutcome:
    """What a step left.

    Attributes:
        copies: for each of `variables_of`, the values of its copies.
        logs: what the step returned, by name.
    """

    copies: list[list[np.ndarray]]
    logs: dict[str, np.ndarray] = field(default_factory=dict)


class TracedStep:
    """The training step of `model` as `fit` runs it, traced anew; `model` keeps its own."""

    def __init__(self, model: keras.Model):
        self.model = model
        kept = {name: getattr(model, name) for name in ("train_function", "steps_per_execution")}
        model.train_function, model.steps_per_execution = None, 1
        model.make_train_function()
        self._function = model.train_function
        for name, value in kept.items():
            setattr(model, name, value)

    def repeat(self, batch: object) -> int:
        """The step from where the model is, until all is done; one, which all workers share."""
        tf.nest.map_structure(np.asarray, self._function(iter([batch])))  # waits for it
        for gpu in devices_here("GPU"):  # they go on when the logs are there
            with tf.device(gpu.name):
                tf.raw_ops.SyncDevice()
        return 1

    def run(self, state: Sequence[np.ndarray], batch: object) -> StepOutcome:
        """The step from `state`, values of `variables_of`, on `batch`."""
        for variable, value in zip(variables_of(self.model), state, strict=True):
            variable.assign(value)
        self.model.reset_metrics()
        logs = self._function(iter([batch]))
        copies = [[value_of(c) for c in copies_of(v)] for v in variables_of(self.model)]
        return StepOutcome(copies, dict(_flat_logs(logs)))


def _flat_logs(logs: object, prefix: str = "") -> list[tuple[str, np.ndarray]]:
    if not isinstance(logs, dict):
        return [(prefix or "returned", np.asarray(logs))]
    return [item for name, value in logs.items() for item in _flat_logs(value, f"{prefix}{name}")]
