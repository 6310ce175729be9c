"""What the user says of sharding."""

import dataclasses

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.segments.layer_paths import Patterns

STAGES = ("parameters", "gradients", "optimizer")
ON_HOST = (None, "optimizer", "parameters")


@checks_types
@dataclasses.dataclass(frozen=True)
class Sharding:
    """What is kept in parts.

    Attributes:
        shard: "parameters" (ZeRO 3), "gradients" (ZeRO 2) or "optimizer" (ZeRO 1).
        min_size: weights of fewer numbers stay whole, and so do their slots.
        units: "*", or patterns of the layers whose weights are gathered together.
        reshard_after_forward: gathered weights are freed, and gathered again to go backward.
        prefetch: how many units ahead weights are gathered.
        gather_dtype: what is gathered is cast to; None leaves it as it is.
        host: what of the parts is in the host's memory: None, "optimizer" (slots), or "parameters"
            (weights and slots). Updates are computed there then.

    Raises:
        ValueError: for another stage, a size below 1, a negative number of units, a dtype that is
            not of floating point, or weights on the host that are not in parts.
    """

    shard: str = "parameters"
    min_size: int = 1024
    units: str | Patterns = "*"
    reshard_after_forward: bool = True
    prefetch: int = 1
    gather_dtype: str | None = None
    host: str | None = None

    def __post_init__(self) -> None:
        if self.shard not in STAGES:
            raise ValueError(f"`shard` must be one of {STAGES}. Received: {self.shard!r}.")
        if self.min_size < 1:
            raise ValueError(f"`min_size` must be at least 1. Received: {self.min_size}.")
        if self.prefetch < 0:
            raise ValueError(f"`prefetch` must not be negative. Received: {self.prefetch}.")
        if self.gather_dtype is not None and not _is_floating(self.gather_dtype):
            raise ValueError(
                "`gather_dtype` must be a dtype of floating point, such as 'bfloat16'. Received: "
                f"{self.gather_dtype!r}."
            )

        if self.host not in ON_HOST:
            raise ValueError(f"`host` must be one of {ON_HOST}. Received: {self.host!r}.")
        if self.host == "parameters" and self.shard != "parameters":
            raise ValueError(
                "Weights are on the host where they are in parts: host='parameters' needs "
                f"shard='parameters'. Received: shard={self.shard!r}. Take host='optimizer'."
            )

    @property
    def slots_on_host(self) -> bool:
        """Whether the optimizer's slots are there, of weights in parts."""
        return self.host is not None

    @property
    def weights_on_host(self) -> bool:
        """Whether weights in parts are."""
        return self.host == "parameters"

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """Of layers that are units; None where each layer with weights is one."""
        if self.units == "*":
            return None
        return (self.units,) if isinstance(self.units, str) else tuple(self.units)


def _is_floating(dtype: str) -> bool:
    try:
        return tf.as_dtype(dtype).is_floating
    except TypeError:  # no dtype at all
        return False
