"""What a YAML file may say of a strategy's options that are classes of their own.

Imports no TensorFlow, so that mistakes in a file show at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from tfparallel.communication.compression.compressor import Compressor


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values keep their YAML type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Memory(Section):
    """The fields of `tfparallel.MemoryPolicy`: "none", "full", or patterns of layers."""

    rematerialize: Literal["none", "full"] | list[str] = "none"
    offload: Literal["none", "full"] | list[str] = "none"


class WaitLimits(Section):
    """The fields of `tfparallel.WorkerTimeouts`, in seconds; null waits for ever."""

    start_s: float | None = Field(default=600.0, gt=0)
    silent_s: float = Field(default=60.0, gt=0)
    stall_s: float | None = Field(default=1800.0, gt=0)
    write_s: float | None = Field(default=14_400.0, gt=0)


class Communication(Section):
    """The fields of `tf.distribute.experimental.CommunicationOptions`."""

    implementation: Literal["AUTO", "RING", "NCCL"] = "AUTO"
    bytes_per_pack: int = Field(default=0, ge=0)  # 0 lets TensorFlow choose
    timeout_seconds: float | None = Field(default=None, gt=0)


class Compression(Section):
    """How gradients cross processes: a compressor's name, and its option where it has one."""

    name: Literal[
        "none",
        "fp16",
        "bf16",
        "power_sgd",
        "top_k",
        "random_k",
        "qsgd",
        "tern_grad",
        "sign_sgd",
        "adaptive",
    ] = "none"
    rank: int | None = Field(default=None, ge=1)
    ratio: float | None = Field(default=None, gt=0, lt=0.5)
    bits: Literal[2, 4, 8] | None = None
    max_error: float | None = Field(default=None, ge=0, lt=1)

    _OPTIONS: ClassVar[dict[str, str]] = {
        "power_sgd": "rank",
        "top_k": "ratio",
        "random_k": "ratio",
        "qsgd": "bits",
        "adaptive": "max_error",
    }

    @model_validator(mode="after")
    def _knows_its_options(self) -> Compression:
        own = self._OPTIONS.get(self.name)
        if others := [option for option in self._given() if option != own]:
            takes = f"takes {own}" if own else "takes no option"
            raise ValueError(f"{self.name} {takes}. Received: {', '.join(others)}")
        return self

    def _given(self) -> dict[str, float]:
        return self.model_dump(exclude={"name"}, exclude_none=True)

    def compressor(self) -> Compressor | None:
        """What `compression=` of a strategy takes."""
        from tfparallel.communication.compression.names import NAMES

        return None if self.name == "none" else NAMES[self.name](**self._given())


class Partitioner(Section):
    """How large variables are cut into parts: by `bytes` of a part (or their number, "fixed")."""

    name: Literal["min_size", "max_size", "fixed"]
    bytes: int = Field(default=256 << 10, ge=1)  # not for "fixed"
    max_parts: int = Field(default=1, ge=1)

    def partitioner(self) -> Any:
        """Return what `variable_partitioner=` takes."""
        from tensorflow import distribute

        partitioners = distribute.experimental.partitioners
        if self.name == "fixed":
            return partitioners.FixedShardsPartitioner(self.max_parts)
        if self.name == "min_size":
            return partitioners.MinSizePartitioner(self.bytes, self.max_parts)
        return partitioners.MaxSizePartitioner(self.bytes, self.max_parts)
