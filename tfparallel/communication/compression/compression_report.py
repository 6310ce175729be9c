"""What compression sends, as numbers and as a table."""

import math
from dataclasses import dataclass

from tfparallel.communication.compression.compressor import Compressor


@dataclass(frozen=True)
class VariableReport:
    """What one rank sends in one step of the gradient of one variable.

    Attributes:
        variable: its path.
        shape: of the gradient.
        sent_as: the compressor, or "uncompressed".
        bytes_sent: by one rank; around a ring, or to all ranks where payloads are gathered.
        bytes_uncompressed: what a ring all-reduce of the gradient in float32 would send.
    """

    variable: str
    shape: tuple[int, ...]
    sent_as: str
    bytes_sent: int
    bytes_uncompressed: int

    @classmethod
    def of(
        cls, variable: str, shape: tuple[int, ...], compressor: Compressor | None, world_size: int
    ) -> "VariableReport":
        """For a compressor, or None where nothing is compressed."""
        dense = 4 * math.prod(shape)
        in_ring = 2 * (world_size - 1) / world_size
        if compressor is None:
            return cls(variable, shape, "uncompressed", int(dense * in_ring), int(dense * in_ring))
        times = in_ring if compressor.sends_sums else world_size - 1
        bytes_sent = int(compressor.payload_bytes(shape) * times)
        return cls(variable, shape, repr(compressor), bytes_sent, int(dense * in_ring))


@dataclass(frozen=True)
class CompressionReport:
    """What compression does, printable.

    Attributes:
        compressor: as given to the strategy.
        variables: one row for each trainable variable.
        decisions: of `Adaptive`, in words, oldest first.
    """

    compressor: str
    variables: list[VariableReport]
    decisions: list[str]

    @property
    def bytes_sent(self) -> int:
        """By one rank in one step."""
        return sum(row.bytes_sent for row in self.variables)

    @property
    def bytes_uncompressed(self) -> int:
        """What it would be without compression."""
        return sum(row.bytes_uncompressed for row in self.variables)

    def __str__(self) -> str:
        header = (
            f"{self.compressor}: {self.bytes_sent:,} of {self.bytes_uncompressed:,} bytes a step"
        )
        width = max([len(row.variable) for row in self.variables], default=0)
        rows = [
            f"  {row.variable:{width}}  {str(list(row.shape)):18}  {row.bytes_sent:>12,} of "
            f"{row.bytes_uncompressed:>12,} bytes  {row.sent_as}"
            for row in self.variables
        ]
        return "\n".join([header, *rows, *self.decisions])
