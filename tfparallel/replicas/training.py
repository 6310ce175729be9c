"""What callbacks, backups and checks may ask of the training that a strategy runs."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tfparallel.coordination.agreement import Agreement
from tfparallel.internals import BaseOptimizer


class GradientMemory(Protocol):
    """What compresses the gradients of one optimizer, and remembers what it has left out."""

    @property
    def compressor(self) -> object:
        """What its gradients are compressed with."""

    def state(self) -> dict[str, np.ndarray]:
        """What this process remembers, by name."""

    def set_state(self, states: Sequence[dict[str, np.ndarray]], num_processes: int, /) -> None:
        """Remembers what one process remembered, or what all `num_processes` did together."""


@runtime_checkable
class Training(Protocol):
    """One training, as one of its processes sees it; the `extended` of our strategies is one."""

    def settle(self) -> None:
        """Returns when all steps that were handed out are done."""

    def agreement(self) -> Agreement | None:
        """What its processes agree by; None where one process trains by itself."""

    def compression_of(self, optimizer: BaseOptimizer) -> GradientMemory | None:
        """What compresses the gradients of a built optimizer; None where nothing does."""


class _ByItself:
    """The training of one process under a strategy that is none of ours."""

    def settle(self) -> None:
        """Every step is done when it returns."""

    def agreement(self) -> None:
        """There is nobody to agree with."""

    def compression_of(self, optimizer: BaseOptimizer) -> None:
        """Nothing is compressed."""


def training_of(strategy: tf.distribute.Strategy) -> Training:
    """The training that a strategy runs."""
    extended = strategy.extended
    return extended if isinstance(extended, Training) else _ByItself()
