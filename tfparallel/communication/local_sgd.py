"""Rounds of local steps: workers train alone and average their weights once in a while.

A compressed gradient still waits for a round trip in every step. Here it is every `H` steps that
workers meet, so that both bytes and waits are one `H`-th.

Sources: Stich, "Local SGD converges fast and communicates little", ICLR 2019, arXiv 1805.09767;
Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023,
arXiv 2311.08105.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.compression.names import as_compressor


class OuterStep(NamedTuple):
    """How the step goes from the mean of the last round to that of this one."""

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False


@checks_types
class LocalSGD:
    """Every worker takes `every` steps alone; then all go on from the mean of their weights.

    The mean is weighted by the rows that each worker has trained on. A round also ends with the
    epoch, and before `evaluate` and `predict`. Optimizers keep their own moments.

    Args:
        every: steps of a round. 1 is synchronous training: gradients are summed in every step.

    Raises:
        ValueError: if `every` is less than 1.
    """

    def __init__(self, every: int):
        if every < 1:
            raise ValueError(
                f"`every` of {type(self).__name__} must be at least 1, the steps of a "
                f"round. Received: {every!r}."
            )
        self.every = every
        self.outer = OuterStep()

    def tensorflow_may_start(self) -> None:
        """Called once a strategy has connected its workers, before it trains."""

    def __repr__(self) -> str:
        return f"LocalSGD(every={self.every})"

    @property
    def is_synchronous(self) -> bool:
        """Whether this is training in which gradients are summed in every step."""
        return self.every == 1

    @property
    def has_anchor(self) -> bool:
        """Whether the weights at the beginning of a round are needed at its end."""
        return False


@checks_types
class DiLoCo(LocalSGD):
    """`LocalSGD` whose workers' mean change is the gradient of an outer optimizer.

    Args:
        every: steps of a round; the paper has 500.
        outer: a `keras.optimizers.SGD`, of which learning rate, momentum and `nesterov` are used,
            or a function that makes one: an optimizer has variables, and
            `MultiWorkerMirroredStrategy` must be made before TensorFlow makes the first. The
            default is the paper's, `SGD(0.7, momentum=0.9, nesterov=True)`; with `SGD(1.0)` it is
            `LocalSGD`.

    Raises:
        ValueError: for an outer optimizer that is no SGD, or has other options; of one that a
            function makes, when the strategy is made.
    """

    def __init__(
        self,
        every: int,
        outer: keras.optimizers.SGD | Callable[[], keras.optimizers.SGD] | None = None,
    ):
        super().__init__(every)
        is_made_later = callable(outer) and not isinstance(outer, keras.optimizers.Optimizer)
        self._make = outer if is_made_later else None
        if outer is None:
            self.outer = OuterStep(0.7, momentum=0.9, nesterov=True)
        elif not is_made_later:
            self.outer = _step_of(outer)

    def __repr__(self) -> str:
        rate, momentum, nesterov = self.outer
        made = f"SGD({rate:g}, momentum={momentum:g}, nesterov={nesterov})"
        return f"DiLoCo(every={self.every}, outer={self._make or made})"

    def tensorflow_may_start(self) -> None:
        """Makes the outer optimizer that a function makes."""
        if self._make is not None:
            self.outer, self._make = _step_of(self._make()), None

    @property
    def is_synchronous(self) -> bool:
        """Never: also after one step it is weights that are averaged."""
        return False

    @property
    def has_anchor(self) -> bool:
        """Always: the outer gradient is the change since then."""
        return True


Meeting: TypeAlias = Compressor | LocalSGD


def as_meeting(compression: Meeting | str | None) -> Meeting | None:
    """How workers meet, of what `compression=` of a strategy was given.

    Raises:
        ValueError: for what is neither a compressor, nor its name, nor a `LocalSGD`.
    """
    if isinstance(compression, LocalSGD):
        return None if compression.is_synchronous else compression
    return None if compression is None else as_compressor(compression)


def outer_step(
    spec: LocalSGD, anchor: tf.Tensor, mean: tf.Tensor, momentum: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Where the next round begins, and the momentum then.

    Args:
        spec: of the rounds.
        anchor: weights at the beginning of this round.
        mean: of the workers' weights at its end.
        momentum: of the outer optimizer, of one shape with them.
    """
    change = anchor - mean
    momentum = spec.outer.momentum * momentum + change
    step = change + spec.outer.momentum * momentum if spec.outer.nesterov else momentum
    return anchor - spec.outer.learning_rate * step, momentum


def _step_of(outer: keras.optimizers.SGD) -> OuterStep:
    own = ("learning_rate", "momentum", "nesterov", "name")
    if type(outer) is not keras.optimizers.SGD:
        raise ValueError(f"`outer` of DiLoCo must be a keras.optimizers.SGD. Received: {outer!r}.")
    config, defaults = outer.get_config(), keras.optimizers.SGD().get_config()
    others = [key for key in config if key not in own and config[key] != defaults[key]]
    if others or isinstance(config["learning_rate"], dict):
        raise ValueError(
            "`outer` of DiLoCo may have a learning rate that is a number, momentum and nesterov. "
            f"Received also: {', '.join(others) or 'a schedule of the learning rate'}."
        )
    return OuterStep(float(outer.learning_rate), float(outer.momentum), bool(outer.nesterov))
