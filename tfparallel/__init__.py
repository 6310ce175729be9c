"""Distribution strategies for Keras 3 on TensorFlow: every way of training in parallel, by scope.

The names below are the public ones. They load on first use, so that the command line starts
without TensorFlow.
"""

import difflib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tfparallel.version import __version__

if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
        "tfparallel needs TensorFlow 2.20 or 2.21, which is not installed. Install it with one of "
        "the extras: pip install 'tfparallel[cpu]', 'tfparallel[gpu]' or 'tfparallel[tpu]'."
    )

if TYPE_CHECKING:
    from tfparallel import callbacks, compression, tensor_parallel
    from tfparallel.coordination import cluster
    from tfparallel.coordination.cluster import (
        ClusterConfig,
        ClusterConfigError,
        read_tf_config,
    )
    from tfparallel.coordination.timeouts import Timeouts, WorkerTimeouts
    from tfparallel.elastic import ElasticJob, run_elastic
    from tfparallel.replicas.loss_kinds import coupled_loss, mean_loss, sum_loss
    from tfparallel.replicas.row_chunks import in_chunks
    from tfparallel.strategies.central_storage import CentralStorageStrategy
    from tfparallel.strategies.horovod import HorovodStrategy
    from tfparallel.strategies.mirrored import MirroredStrategy
    from tfparallel.strategies.multi_worker import MultiWorkerMirroredStrategy
    from tfparallel.strategies.one_device import OneDeviceStrategy
    from tfparallel.strategies.parameter_server import ParameterServerStrategy
    from tfparallel.strategies.pipeline import PipelineStrategy
    from tfparallel.strategies.sharded import ShardedStrategy
    from tfparallel.strategies.tensor_parallel import TensorParallelStrategy
    from tfparallel.strategies.tpu import TPUStrategy

_NAMESPACES = {
    "callbacks": "tfparallel.callbacks",
    "cluster": "tfparallel.coordination.cluster",
    "compression": "tfparallel.compression",
    "tensor_parallel": "tfparallel.tensor_parallel",
}
_MODULES = {
    "CentralStorageStrategy": "tfparallel.strategies.central_storage",
    "HorovodStrategy": "tfparallel.strategies.horovod",
    "MirroredStrategy": "tfparallel.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "tfparallel.strategies.multi_worker",
    "OneDeviceStrategy": "tfparallel.strategies.one_device",
    "ParameterServerStrategy": "tfparallel.strategies.parameter_server",
    "PipelineStrategy": "tfparallel.strategies.pipeline",
    "ShardedStrategy": "tfparallel.strategies.sharded",
    "TPUStrategy": "tfparallel.strategies.tpu",
    "TensorParallelStrategy": "tfparallel.strategies.tensor_parallel",
    "ClusterConfig": "tfparallel.coordination.cluster",
    "ClusterConfigError": "tfparallel.coordination.cluster",
    "ElasticJob": "tfparallel.elastic",
    "Timeouts": "tfparallel.coordination.timeouts",
    "WorkerTimeouts": "tfparallel.coordination.timeouts",
    "coupled_loss": "tfparallel.replicas.loss_kinds",
    "in_chunks": "tfparallel.replicas.row_chunks",
    "mean_loss": "tfparallel.replicas.loss_kinds",
    "read_tf_config": "tfparallel.coordination.cluster",
    "run_elastic": "tfparallel.elastic",
    "sum_loss": "tfparallel.replicas.loss_kinds",
}

__all__ = [
    "CentralStorageStrategy",
    "ClusterConfig",
    "ClusterConfigError",
    "ElasticJob",
    "HorovodStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "ShardedStrategy",
    "TPUStrategy",
    "Timeouts",
    "WorkerTimeouts",
    "TensorParallelStrategy",
    "__version__",
    "callbacks",
    "cluster",
    "compression",
    "coupled_loss",
    "in_chunks",
    "mean_loss",
    "read_tf_config",
    "run_elastic",
    "sum_loss",
    "tensor_parallel",
]


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return importlib.import_module(_NAMESPACES[name])
    if name not in _MODULES:
        alike = difflib.get_close_matches(name, __all__, n=1)
        hint = f". Did you mean {alike[0]!r}?" if alike else ""
        raise AttributeError(f"module 'tfparallel' has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
