"""Compressors by name: one spelling for Python, configuration files and the docs."""

from collections.abc import Callable

from tfparallel.communication.compression.adaptive import Adaptive
from tfparallel.communication.compression.cast import Cast
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.compression.power_sgd import PowerSGD
from tfparallel.communication.compression.quantize import QSGD, TernGrad
from tfparallel.communication.compression.random_k import RandomK
from tfparallel.communication.compression.sign_sgd import SignSGD
from tfparallel.communication.compression.top_k import TopK

NAMES: dict[str, Callable[..., Compressor]] = {
    "fp16": lambda: Cast("float16"),
    "bf16": lambda: Cast("bfloat16"),
    "power_sgd": PowerSGD,
    "top_k": TopK,
    "random_k": RandomK,
    "qsgd": QSGD,
    "tern_grad": TernGrad,
    "sign_sgd": SignSGD,
    "adaptive": Adaptive,
}
# As they were spelled once.
_ALIASES = {name.replace("_", ""): name for name in NAMES}


def as_compressor(compressor: Compressor | str) -> Compressor:
    """A compressor, given itself or its name.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(compressor, Compressor):
        return compressor
    if isinstance(compressor, str) and (name := _ALIASES.get(compressor, compressor)) in NAMES:
        return NAMES[name]()
    raise ValueError(
        "`compression` takes None, one of the compressors of tfparallel.compression, such as "
        f"PowerSGD(rank=4), or a name: {', '.join(map(repr, NAMES))}. Received: {compressor!r}."
    )
