"""`keras.distribution` on TensorFlow: Keras's own way to say where a model trains.

    tfparallel.keras_distribution.enable()
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map))
    model = ...
    model.fit(...)

Keras on TensorFlow has these names and does nothing with them. Between `enable()` and `disable()` a
`ModelParallel` is a `TensorParallelStrategy`, with `initialize` of ranks that each trace their own
part, a `DataParallel` a `MirroredStrategy`, or with `initialize` a `MultiWorkerMirroredStrategy`;
models made meanwhile train under it.
"""

import contextlib
import json
import logging
import os
import weakref
from collections.abc import Callable
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfparallel.coordination.cluster import read_tf_config
from tfparallel.internals.eager import has_started
from tfparallel.internals.keras_distribution_hooks import distribution_installed
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.device_names import count_logical_devices, devices_here, short_names
from tfparallel.strategies.mirrored import MirroredStrategy
from tfparallel.strategies.multi_worker import MultiWorkerMirroredStrategy
from tfparallel.strategies.tensor_parallel import TensorParallelStrategy

__all__ = ["disable", "enable", "strategy_for"]

_log = logging.getLogger("tfparallel")
_hooks = contextlib.ExitStack()
_strategies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

Tensor = TypeVar("Tensor")
_enabled = False


def enable() -> None:
    """Lets `keras.distribution` work on TensorFlow, in this process. Twice changes nothing.

    Call it before a distribution is set.

    Raises:
        RuntimeError: if one is set already, which nothing would have noticed.
    """
    global _enabled
    if _enabled:
        return
    if keras.distribution.distribution() is not None:
        raise RuntimeError(
            "Expected enable() before keras.distribution.set_distribution(...). Received: "
            f"{keras.distribution.distribution()!r} is set. Call set_distribution(None), enable(), "
            "and set it again."
        )
    _hooks.enter_context(distribution_installed(_FUNCTIONS, _activate))
    _enabled = True


def disable() -> None:
    """Takes away what `enable` put in, and unsets the distribution. Twice changes nothing."""
    global _enabled
    if not _enabled:
        return
    keras.distribution.set_distribution(None)
    _hooks.close()
    _strategies.clear()
    _enabled = False


def strategy_for(distribution: object) -> KerasStrategy:
    """The strategy that a distribution is, made when it is first asked for.

    Args:
        distribution: a `keras.distribution.DataParallel` or `ModelParallel`.

    Returns:
        A `tf.distribute.Strategy`; None for another kind, such as the base class, which says
        nothing of where variables are.

    Raises:
        ValueError: for devices that this process does not have, and layouts that cannot be.
    """
    if distribution not in _strategies:
        _strategies[distribution] = _make(distribution)
    return _strategies[distribution]


def _make(distribution: object) -> object:
    kinds = keras.distribution.ModelParallel, keras.distribution.DataParallel
    if isinstance(distribution, kinds) and num_processes() > 1:
        _check_auto_shard(distribution)
    if isinstance(distribution, keras.distribution.ModelParallel):
        transport = "ring" if num_processes() > 1 else None
        strategy = TensorParallelStrategy(distribution, transport=transport)
        strategy.extended.layouts.allows_unused = True  # as Keras does, whose presets have some
        return strategy
    if isinstance(distribution, keras.distribution.DataParallel):
        if num_processes() > 1:
            return MultiWorkerMirroredStrategy()
        return MirroredStrategy([str(d) for d in np.ravel(distribution.device_mesh.devices)])
    return None


def _check_auto_shard(
    distribution: keras.distribution.DataParallel | keras.distribution.ModelParallel,
) -> None:
    if not distribution.auto_shard_dataset:
        raise NotImplementedError(
            "Expected auto_shard_dataset=True: each process is given all data, and trains on its "
            f"part. Received: auto_shard_dataset=False, as rank {process_id()}. Pass the whole "
            "dataset in every process."
        )


def _activate(distribution: object) -> None:
    """Makes the strategy of `distribution` that of everything that is made from now on."""
    strategy = None if distribution is None else strategy_for(distribution)
    if distribution is not None and strategy is None:
        _log.warning(
            "%s is no DataParallel and no ModelParallel: models train on one device under it.",
            type(distribution).__name__,
        )
    tf.distribute.experimental_set_strategy(strategy)


# ---- what Keras asks its backend for -------------------------------------------------------------


def list_devices(device_type: str | None = None) -> list[str]:
    """Names such as "gpu:0" of the devices of all processes; see `keras.distribution`."""
    local = _local_devices(device_type)
    kind = local[0].partition(":")[0] if local else ""
    return [f"{kind}:{i}" for i in range(len(local) * num_processes())]


def _local_devices(device_type: str | None) -> list[str]:
    kinds = [device_type.upper()] if device_type else ["TPU", "GPU", "CPU"]
    found = (names for names in map(_local_devices_of, kinds) if names)
    return [name.lower() for name in next(found, [])]


def _local_devices_of(kind: str) -> list[str]:
    if num_processes() > 1 and not has_started():  # their strategy has to be what starts it
        return [f"{kind}:{i}" for i in range(count_logical_devices(kind))]
    return short_names(device.name for device in devices_here(kind))


def get_device_count(device_type: str | None = None) -> int:
    """How many `list_devices` names."""
    return len(list_devices(device_type))


def distribute_tensor(tensor: Tensor, layout: object) -> Tensor:
    """The tensor itself: where it is changes nothing that is computed."""
    del layout
    return tensor


def num_processes() -> int:
    """Processes that train together."""
    config = read_tf_config()
    return 1 if config is None else config.num_workers


def process_id() -> int:
    """The number of this one among them."""
    config = read_tf_config()
    return 0 if config is None else config.rank or 0


def initialize(
    job_addresses: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Tells TensorFlow of the other processes, by `TF_CONFIG`; see `keras.distribution`.

    Raises:
        ValueError: unless the address of every process is given.
    """
    if num_processes in (None, 1) and job_addresses is None:
        return
    addresses = (job_addresses or "").split(",")
    if len(addresses) != num_processes or process_id not in range(len(addresses)):
        raise ValueError(
            "Expected an address for each process: TensorFlow's workers talk to one another. "
            f"Received: job_addresses={job_addresses!r}, num_processes={num_processes}, "
            f"process_id={process_id}."
        )
    task = {"type": "worker", "index": process_id}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})


_FUNCTIONS: dict[str, Callable] = {
    "distribute_tensor": distribute_tensor,
    "get_device_count": get_device_count,
    "initialize": initialize,
    "list_devices": list_devices,
    "num_processes": num_processes,
    "process_id": process_id,
}
