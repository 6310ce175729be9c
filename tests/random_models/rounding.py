"""What rounding alone may change of a training of low precision.

A model that diverges within two steps makes of one rounding what no tolerance allows for: its
predictions are differences of large numbers. So what differs is asked twice: in float64, where it
must be equal, and whether it differs by no more than one device does from itself, once its first
weights are moved by one place of the dtype that it computes in.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tests.random_models.spec import Trial

# By what a number of each policy is rounded, relatively, at most.
UNIT = {
    "float32": 2.0**-24,
    "mixed_float16": 2.0**-11,
    "mixed_bfloat16": 2.0**-8,
}
SEEDS = (0, 1, 2)  # of directions in which weights are moved
FACTOR = 2.0  # what the largest of so few may fall short of


def in_double_precision(trial: Trial) -> Trial:
    """The same training in float64."""
    model = dataclasses.replace(trial.model, policy="float64", head_policy="float64")
    return dataclasses.replace(trial, model=model)


def move_weights(model: keras.Model, policy: str, seed: int) -> None:
    """Moves each trainable number to a neighbour, one place of `policy` up or down."""
    rng = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        value = weight.numpy()
        weight.assign(value * (1.0 + 2 * UNIT[policy] * rng.choice((-1.0, 1.0), value.shape)))


def beyond_rounding(
    expected: Mapping[str, np.ndarray],
    received: Mapping[str, np.ndarray],
    moved: Sequence[Mapping[str, np.ndarray]],
    atol: float,
) -> dict[str, tuple[float, float]]:
    """What differs by more than `atol` and by more than rounding explains.

    Args:
        expected: what one device has trained to.
        received: what is judged.
        moved: what one device has trained to from weights that were moved.
        atol: as in `assert_same_training`.

    Returns:
        By name the largest difference, and what rounding may make of it.
    """
    found = {}
    for name, value in expected.items():
        if np.allclose(received[name], value, rtol=atol, atol=atol, equal_nan=True):
            continue
        difference = _largest(received[name], value)
        allowed = FACTOR * max(_largest(each[name], value) for each in moved)
        if not difference <= allowed:
            found[name] = difference, allowed
    return found


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(a, "float64") - np.asarray(b, "float64"))))
