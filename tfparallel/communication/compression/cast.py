"""Gradients travel in fewer bits each."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.checked_types import checks_types
from tfparallel.communication.compression.buckets import Ranks
from tfparallel.communication.compression.compressor import Compressor, num_elements

_DTYPES = ("float16", "bfloat16")


@checks_types
class Cast(Compressor):
    """Sends gradients as float16 or bfloat16: half the bytes of float32. Also `"fp16"`, `"bf16"`.

    float16 keeps 11 bits of a value between 6e-5 and 65504. Each rank divides by the number of
    ranks before it casts, so that no sum overflows whose mean does not; a value that does not fit
    even so becomes infinite, which loss scaling sees. bfloat16 keeps 8 bits, and the range of
    float32.

    Args:
        dtype: "float16" or "bfloat16".
    """

    is_linear = True

    def __init__(self, dtype: str = "float16"):
        if dtype not in _DTYPES:
            raise ValueError(f"`dtype` of Cast must be one of {_DTYPES}. Received: {dtype!r}.")
        self._dtype = tf.as_dtype(dtype)

    def __repr__(self) -> str:
        return f"Cast({self._dtype.name!r})"

    def applies_to(self, shape: Sequence[int]) -> bool:
        """Every tensor."""
        return True

    def compress(
        self, tensor: tf.Tensor, state: Mapping[str, tf.Variable], ranks: Ranks
    ) -> tuple[list[tf.Tensor], Any]:
        """One tensor of the other dtype."""
        del state
        if self._dtype == tf.float16:
            return [tf.cast(tensor / ranks.world_size, self._dtype)], float(ranks.world_size)
        return [tf.cast(tensor, self._dtype)], 1.0

    def decompress(self, payload: Sequence[tf.Tensor], context: Any) -> tf.Tensor:
        """The tensor in float32."""
        return tf.cast(payload[0], tf.float32) * context

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Two for each value."""
        return 2 * num_elements(shape)
