"""The public name of `tfparallel.communication.compression`: what `compression=` takes."""

from tfparallel.communication.compression import *  # noqa: F403
from tfparallel.communication.compression import __all__ as __all__
