"""Compares one step of a model under a strategy with the same step on one device."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import GLOBAL_SEED_GENERATOR, global_state
from tfparallel.internals.keras_trainer import build_if_needed
from tfparallel.replicas.checking import causes
from tfparallel.replicas.checking.rebuild import Build, rebuild
from tfparallel.replicas.checking.report import Difference, StepCheck
from tfparallel.replicas.checking.step import (
    StepOutcome,
    TracedStep,
    kind_of,
    values_of,
    variables_of,
)
from tfparallel.replicas.checking.traces import no_trace, put_back_seeds
from tfparallel.replicas.checking.whole_float32 import whole_float32
from tfparallel.replicas.checks import check_model
from tfparallel.replicas.random_states import random_state
from tfparallel.replicas.training import training_of

_NUDGES = 3  # steps with weights moved in their last digit, to see what rounding does
_MARGIN = 10  # rounding is up to this times what a nudge did


@whole_float32()
def check_step(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    batch: object,
    float64: bool,
    build: Build | None,
) -> StepCheck:
    """`KerasStrategy.check`, which explains the arguments."""
    batch = prepared(strategy, model, batch, "check")
    with no_trace(model, strategy):
        one_device = rebuild(model, build, batch, None)
        pair = Pair(strategy, one_device, model, batch)
        differences = pair.differences()
        found: list[str] = []
        is_equal = pair.all_ranks(all(each.is_equal for each in differences))
        if not is_equal:
            found, is_explained = causes.explain(pair)
        if float64:
            exact = _in_float64(strategy, model, batch, build)
            differences = _with_float64(differences, exact)
            if not is_equal and not found and all(each.is_equal for each in exact):
                found, is_explained = ["Rounding: in float64 the step is equal."], True
    verdict = "equal" if is_equal else "explained" if is_explained else "unexplained"
    return StepCheck(
        model.name, type(strategy).__name__, differences, verdict, tuple(found), pair.rank
    )


def prepared(
    strategy: tf.distribute.Strategy, model: keras.Model, batch: object, what: str
) -> object:
    """A batch in tensors, for a model that is built and can take a step outside of `fit`.

    Raises:
        ValueError: inside of a scope, for a model that is not compiled or not this strategy's.
    """
    if tf.distribute.has_strategy():
        raise ValueError(
            f"{what} trains outside of the strategy's scope. Received: a call inside "
            "`with strategy.scope():`. Call it after that block."
        )
    check_model(strategy, model)
    if not model.compiled:
        raise ValueError(
            f"{what} takes a compiled model. Received: model '{model.name}', which is not. Call "
            "its compile() in the strategy's scope."
        )
    batch = _as_tensors(batch, keras.config.floatx())
    build_if_needed(model, batch)
    return batch


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
        batch: Any,
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


def _in_float64(
    strategy: tf.distribute.Strategy, model: keras.Model, batch: object, build: Build | None
) -> tuple:
    """The differences of a pair like `model` with numbers of 64 bits, in the same state."""
    batch, state = _as_tensors(batch, "float64"), values_of(model)
    with strategy.scope():
        distributed = rebuild(model, build, batch, "float64")
    one_device = rebuild(model, build, batch, "float64")
    for variable, value in zip(variables_of(distributed), state, strict=True):
        variable.assign(value)
    return Pair(strategy, one_device, distributed, batch).differences()


def _with_float64(
    differences: Sequence[Difference], exact: Sequence[Difference]
) -> tuple[Difference, ...]:
    pairs = zip(differences, exact, strict=True)
    return tuple(Difference(**{**vars(a), "in_float64": b.difference}) for a, b in pairs)


def _as_tensors(batch: object, floatx: str) -> object:
    def as_tensor(leaf: object) -> object:
        if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        return tf.cast(tensor, floatx) if tensor.dtype.is_floating else tensor

    return keras.tree.map_structure(as_tensor, batch)


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
