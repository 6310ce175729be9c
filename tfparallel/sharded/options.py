"""What the user says of sharding."""

import dataclasses

STAGES = ("parameters", "gradients", "optimizer")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What is kept in parts.

    Attributes:
        shard: "parameters" (ZeRO 3), "gradients" (ZeRO 2) or "optimizer" (ZeRO 1).
        min_size: weights of fewer numbers stay whole, and so do their slots.

    Raises:
        ValueError: for another stage, or a size below 1.
    """

    shard: str = "parameters"
    min_size: int = 1024

    def __post_init__(self) -> None:
        if self.shard not in STAGES:
            raise ValueError(f"`shard` must be one of {STAGES}. Received: {self.shard!r}.")
        if self.min_size < 1:
            raise ValueError(f"`min_size` must be at least 1. Received: {self.min_size}.")
