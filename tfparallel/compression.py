"""What `compression=` of a strategy takes, and what a compressor of one's own is made of."""

from tfparallel.communication.compression.adaptive import Adaptive
from tfparallel.communication.compression.cast import Cast
from tfparallel.communication.compression.compression_report import (
    CompressionReport,
    VariableReport,
)
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.compression.gradient_compression import GradientCompression
from tfparallel.communication.compression.power_sgd import PowerSGD
from tfparallel.communication.compression.quantize import QSGD, TernGrad
from tfparallel.communication.compression.random_k import RandomK
from tfparallel.communication.compression.sign_sgd import SignSGD
from tfparallel.communication.compression.top_k import TopK
from tfparallel.communication.compression.transport import Transport
from tfparallel.communication.local_sgd import DiLoCo, LocalSGD

__all__ = [
    "QSGD",
    "Adaptive",
    "Cast",
    "CompressionReport",
    "Compressor",
    "DiLoCo",
    "GradientCompression",
    "LocalSGD",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "TopK",
    "Transport",
    "VariableReport",
]
