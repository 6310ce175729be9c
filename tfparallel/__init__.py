"""Distribution strategies for Keras 3 on TensorFlow: every way of training in parallel, by scope.

The names below are the public ones. They load on first use, so that the command line works
without TensorFlow.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from tfparallel.version import __version__

if TYPE_CHECKING:
    from tfparallel import callbacks, compression, keras_distribution, tensor_parallel
    from tfparallel.callbacks.backup.storage import BackupError, LeaseError
    from tfparallel.communication.neighbours import PeerLostError
    from tfparallel.coordination import cluster
    from tfparallel.coordination.agreement import DisagreementError
    from tfparallel.coordination.cluster import ClusterConfig, ClusterConfigError, read_tf_config
    from tfparallel.coordination.lost_ranks import RankLostError
    from tfparallel.coordination.patience import WaitedTooLong
    from tfparallel.coordination.port import PortTakenError
    from tfparallel.coordination.timeouts import Timeouts, WorkerTimeouts
    from tfparallel.elastic import ElasticJob, run_elastic
    from tfparallel.parameter_server.recovery import ServerLost, WorkerLost
    from tfparallel.pipeline.pipeline_options import PipelineOptions
    from tfparallel.pipeline.plans.schedule import Schedule
    from tfparallel.pipeline.remote_stages import StageLost
    from tfparallel.replicas.loss_kinds import coupled_loss, mean_loss, sum_loss
    from tfparallel.replicas.pretrained import load_model, load_weights
    from tfparallel.replicas.row_chunks import in_chunks
    from tfparallel.replicas.weights_check import WeightsDifferError
    from tfparallel.segments.memory_policy import MemoryPolicy
    from tfparallel.sharded.options import Sharding
    from tfparallel.strategies.central_storage import CentralStorageStrategy
    from tfparallel.strategies.horovod import HorovodStrategy
    from tfparallel.strategies.hybrid import HybridStrategy
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
    "keras_distribution": "tfparallel.keras_distribution",
    "launch": "tfparallel.launch",
    "tensor_parallel": "tfparallel.tensor_parallel",
}
# The table of public names, by module. The imports above say the same to type checkers, docs/api.md
# to readers; tests/test_import.py compares all three.
_NAMES = {
    "tfparallel.callbacks.backup.storage": (
        "BackupError",
        "LeaseError",
    ),
    "tfparallel.communication.neighbours": ("PeerLostError",),
    "tfparallel.coordination.agreement": ("DisagreementError",),
    "tfparallel.coordination.cluster": (
        "ClusterConfig",
        "ClusterConfigError",
        "read_tf_config",
    ),
    "tfparallel.coordination.lost_ranks": ("RankLostError",),
    "tfparallel.coordination.patience": ("WaitedTooLong",),
    "tfparallel.coordination.port": ("PortTakenError",),
    "tfparallel.coordination.timeouts": (
        "Timeouts",
        "WorkerTimeouts",
    ),
    "tfparallel.elastic": (
        "ElasticJob",
        "run_elastic",
    ),
    "tfparallel.parameter_server.recovery": (
        "ServerLost",
        "WorkerLost",
    ),
    "tfparallel.pipeline.pipeline_options": ("PipelineOptions",),
    "tfparallel.pipeline.plans.schedule": ("Schedule",),
    "tfparallel.pipeline.remote_stages": ("StageLost",),
    "tfparallel.replicas.loss_kinds": (
        "coupled_loss",
        "mean_loss",
        "sum_loss",
    ),
    "tfparallel.replicas.pretrained": ("load_model", "load_weights"),
    "tfparallel.replicas.row_chunks": ("in_chunks",),
    "tfparallel.replicas.weights_check": ("WeightsDifferError",),
    "tfparallel.segments.memory_policy": ("MemoryPolicy",),
    "tfparallel.sharded.options": ("Sharding",),
    "tfparallel.strategies.central_storage": ("CentralStorageStrategy",),
    "tfparallel.strategies.horovod": ("HorovodStrategy",),
    "tfparallel.strategies.hybrid": ("HybridStrategy",),
    "tfparallel.strategies.mirrored": ("MirroredStrategy",),
    "tfparallel.strategies.multi_worker": ("MultiWorkerMirroredStrategy",),
    "tfparallel.strategies.one_device": ("OneDeviceStrategy",),
    "tfparallel.strategies.parameter_server": ("ParameterServerStrategy",),
    "tfparallel.strategies.pipeline": ("PipelineStrategy",),
    "tfparallel.strategies.sharded": ("ShardedStrategy",),
    "tfparallel.strategies.tensor_parallel": ("TensorParallelStrategy",),
    "tfparallel.strategies.tpu": ("TPUStrategy",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "BackupError",
    "CentralStorageStrategy",
    "ClusterConfig",
    "ClusterConfigError",
    "DisagreementError",
    "ElasticJob",
    "HorovodStrategy",
    "HybridStrategy",
    "LeaseError",
    "MemoryPolicy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PeerLostError",
    "PipelineOptions",
    "PipelineStrategy",
    "PortTakenError",
    "RankLostError",
    "Schedule",
    "ServerLost",
    "ShardedStrategy",
    "Sharding",
    "StageLost",
    "TPUStrategy",
    "TensorParallelStrategy",
    "Timeouts",
    "WaitedTooLong",
    "WeightsDifferError",
    "WorkerLost",
    "WorkerTimeouts",
    "__version__",
    "callbacks",
    "cluster",
    "compression",
    "coupled_loss",
    "in_chunks",
    "keras_distribution",
    "launch",
    "load_model",
    "load_weights",
    "mean_loss",
    "read_tf_config",
    "run_elastic",
    "sum_loss",
    "tensor_parallel",
]


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return _load(_NAMESPACES[name])
    if name not in _MODULES:
        alike = difflib.get_close_matches(name, __all__, n=1)
        hint = f". Did you mean {alike[0]!r}?" if alike else ""
        raise AttributeError(f"module 'tfparallel' has no attribute {name!r}{hint}")
    return getattr(_load(_MODULES[name]), name)


def _load(module: str) -> object:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("tensorflow", "keras"):
            raise
        raise ImportError(
            "tfparallel needs TensorFlow 2.20 or 2.21, which is not installed. Install it with one "
            "of the extras: pip install 'tfparallel[cpu]', 'tfparallel[gpu]' or 'tfparallel[tpu]'."
        ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
