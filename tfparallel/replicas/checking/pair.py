"""Two models that are alike, one under a strategy and one on one device, and steps of both."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import GLOBAL_SEED_GENERATOR, global_state
from tfparallel.replicas.checking.report import Difference
from tfparallel.replicas.checking.step import (
    StepOutcome,
    TracedStep,
    kind_of,
    values_of,
    variables_of,
)
from tfparallel.replicas.checking.traces import put_back_seeds
from tfparallel.replicas.random_states import random_state
from tfparallel.replicas.training import training_of

_NUDGES = 3  # steps with weights moved in their last digit, to see what rounding does
_MARGIN = 10  # rounding is up to this times what a nudge did


class Pair:
    """A model under a strategy, and one like it on one device.

    Attributes:
        one_device, distributed: the models; alike, variable by variable.
        state: values of their variables, from which every step begins.
        random: of the global generators, from which it begins, too.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        one_device: keras.Model,
        distributed: keras.Model,
        batch: object,
    ):
        self.strategy, self.batch = strategy, batch
        self.one_device, self.distributed = one_device, distributed
        self.state = values_of(distributed)
        self.random = random_state()
        shapes = [tuple(variable.shape) for variable in variables_of(one_device)]
        if shapes != [value.shape for value in self.state]:
            raise ValueError(
                "check compares two models with the same variables, in the same order. Received: "
                f"{len(self.state)} under the strategy and {len(shapes)} in the second model, or "
                "other shapes. Pass `build=`, a function that returns the model as it is now."
            )

    @property
    def rank(self) -> int | None:
        """Of this process; None if there is one only."""
        agreement = training_of(self.strategy).agreement()
        return None if agreement is None else agreement.rank

    def all_ranks(self, flag: bool) -> bool:
        """Whether `flag` is true on all ranks, which have to take the same steps."""
        agreement = training_of(self.strategy).agreement()
        return flag if agreement is None else all(agreement.exchange("check a step", flag))

    def differences(self) -> tuple[Difference, ...]:
        """Between the two after a step, traced anew."""
        step = TracedStep(self.one_device)
        expected = self.step_on_one_device(step)
        nudged = [self.step_on_one_device(step, self._nudged(seed)) for seed in range(_NUDGES)]
        put_back_seeds(self.random, self.strategy)
        received = TracedStep(self.distributed).run(self.state, self.batch)
        return tuple(self._compared(expected, nudged, received))

    def step_on_one_device(
        self, step: TracedStep, state: Sequence[np.ndarray] | None = None
    ) -> StepOutcome:
        """A step there, which draws the random numbers that the strategy's will draw.

        Args:
            step: of `one_device`.
            state: where to begin, if elsewhere than at `self.state`.
        """
        put_back_seeds(self.random, self.strategy)
        if self.random["keras"] is not None:  # in a variable of the strategy, perhaps
            plain = keras.random.SeedGenerator(0)
            plain.state.assign(self.random["keras"])
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, plain)
        return step.run(self.state if state is None else state, self.batch)

    def _nudged(self, seed: int) -> list[np.ndarray]:
        """The state, with each weight moved up or down in its last digit."""
        rng = np.random.default_rng(seed)
        variables = variables_of(self.one_device)
        return [
            _nudge(value, rng) if kind_of(variable, self.one_device) == "weight" else value
            for variable, value in zip(variables, self.state, strict=True)
        ]

    def _compared(
        self, expected: StepOutcome, nudged: list[StepOutcome], received: StepOutcome
    ) -> list:
        found = []
        for i, variable in enumerate(variables_of(self.distributed)):
            kind = kind_of(variable, self.distributed)
            if kind is not None:
                one = expected.copies[i][0]
                others = [outcome.copies[i][0] for outcome in nudged]
                found.append(
                    Difference(
                        variable.path,
                        kind,
                        _largest(self.state[i], one),
                        max(_largest(one, copy) for copy in received.copies[i]),
                        _rounding(one, others),
                    )
                )
        for name, one in expected.logs.items():
            others = [outcome.logs[name] for outcome in nudged]
            difference = _largest(one, received.logs[name]) if name in received.logs else np.inf
            found.append(Difference(name, "log", 0.0, difference, _rounding(one, others)))
        order = ("weight", "state", "optimizer", "log")
        return sorted(found, key=lambda each: order.index(each.kind))


def _nudge(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`value`, each number moved by its last digit, and zeros by that of the largest."""
    wide = value.astype("float64")
    largest = np.max(np.abs(wide), initial=0.0) or 0.01
    sizes = np.where(wide == 0, largest, np.abs(wide)) * _epsilon(value)
    return (wide + rng.choice([-1.0, 1.0], value.shape) * sizes).astype(value.dtype)


def _rounding(one: np.ndarray, others: Sequence[np.ndarray]) -> float:
    moved = max(_largest(one, other) for other in others)
    size = np.max(np.abs(one.astype("float64")), initial=0.0)
    return float(_MARGIN * max(moved, _epsilon(one) * size))


def _epsilon(value: np.ndarray) -> float:
    """The relative size of the last digit."""
    if value.dtype == np.float64:
        return float(np.finfo("float64").eps)
    return float(tf.experimental.numpy.finfo(value.dtype).eps)


def _largest(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference; infinite if only one of them is not a number."""
    if one.shape != other.shape:
        return float("inf")
    one, other = one.astype("float64"), other.astype("float64")
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    distance = np.where(same, 0.0, np.abs(one - other))
    return float(np.max(np.where(np.isnan(distance), np.inf, distance), initial=0.0))
