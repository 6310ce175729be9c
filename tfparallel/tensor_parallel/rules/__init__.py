"""The rules of Keras's own layers; importing this package registers them."""

from tfparallel.tensor_parallel.rules import (
    attention,
    convolution,
    declared_attention,
    dense,
    elementwise_layers,
    embedding,
    normalization,
    recurrent,
)

__all__ = [
    "attention",
    "convolution",
    "declared_attention",
    "dense",
    "elementwise_layers",
    "embedding",
    "normalization",
    "recurrent",
]
