"""Devices as users write them: names, numbers, a count, or TensorFlow's own objects."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfparallel.internals import device_util

Device: TypeAlias = str | int | tf.config.LogicalDevice  # a number: of GPUs, or else of CPUs
Devices: TypeAlias = Device | Sequence[Device]  # one number alone is how many, the first ones


def device_names(devices: Devices, what: str) -> list[str]:
    """The names of devices that were given in any of these ways.

    Args:
        devices: a name or a `tf.config.LogicalDevice`, several of them, their numbers, or how many
            (the first ones). Numbers are of GPUs, or of CPUs where there are no GPUs.
        what: the argument's name, for the message.

    Raises:
        ValueError: for a count below 1.
    """
    if isinstance(devices, int):
        if devices < 1:
            raise ValueError(f"`{what}` needs at least one device. Received: {devices}.")
        return [_name(index) for index in range(devices)]
    return [_name(each) for each in ([devices] if isinstance(devices, Device) else devices)]


def devices_here(kind: str | None = None) -> list[tf.config.LogicalDevice]:
    """Logical devices of this process, of one kind or of all.

    Once a process is one of a cluster, TensorFlow lists the devices of all of them.
    """
    listed = tf.config.list_logical_devices(kind)
    if len({_task_of(device.name) for device in listed}) < 2:
        return listed
    with tf.init_scope(), tf.device("CPU:0"):
        here = _task_of(tf.zeros([]).device)
    return [device for device in listed if _task_of(device.name) == here]


def all_devices_here() -> list[str]:
    """Names of the GPUs of this process, or of its CPUs where it has no GPU."""
    return [device.name for device in devices_here("GPU") or devices_here("CPU")]


def count_devices_of_process(sharing: int = 1) -> int:
    """How many devices this process will have, GPUs or else CPUs, before TensorFlow has started.

    Args:
        sharing: how many processes of this host divide its GPUs evenly.
    """
    gpus, cpus = tf.config.get_visible_devices("GPU"), tf.config.list_physical_devices("CPU")
    logical = [len(tf.config.get_logical_device_configuration(x) or [x]) for x in gpus or cpus[:1]]
    return max(sum(logical) // sharing, 1) if gpus else sum(logical)


def count_logical_devices(kind: str) -> int:
    """How many devices of a kind this process will have, before TensorFlow has started."""
    physical = tf.config.get_visible_devices(kind)
    return sum(len(tf.config.get_logical_device_configuration(each) or [each]) for each in physical)


def hosts_of(devices: Iterable[str]) -> list[str]:
    """The CPU of each device's process."""
    return [device_util.canonicalize("/device:CPU:0", device) for device in devices]


def short_names(devices: Iterable[str]) -> list[str]:
    """Devices of one process as users write them: `GPU:0`."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return [f"{spec.device_type}:{spec.device_index}" for spec in specs]


def names_of_groups(groups: Iterable[Iterable[str]]) -> list[str]:
    """Devices that compute together, as one name each: `CPU:0+CPU:1`, or `chief 0 CPU:0+...`."""
    return ["+".join(names_with_tasks(list(group))) for group in groups]


def names_with_tasks(devices: Sequence[str]) -> list[str]:
    """`GPU:0`, or `worker 0 GPU:0` where the devices are of several processes."""
    specs: list[Any] = [tf.DeviceSpec.from_string(device) for device in devices]
    names = short_names(devices)
    if len({(spec.job, spec.task) for spec in specs}) < 2:
        return names
    return [f"{spec.job} {spec.task} {name}" for spec, name in zip(specs, names, strict=True)]


def is_in_parts(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether GPUs are parts of one, between which NCCL does not reduce.

    Logical GPUs are, and so are several MIG instances in one process.
    """
    gpus = tf.config.get_visible_devices("GPU")
    instances = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if sum(each.strip().startswith("MIG-") for each in instances) > 1:
        return True
    return any(len(tf.config.get_logical_device_configuration(gpu) or ()) > 1 for gpu in gpus)


def _name(device: Device) -> str:
    if isinstance(device, int):
        return f"{'GPU' if devices_here('GPU') else 'CPU'}:{device}"
    return device if isinstance(device, str) else device.name


def _task_of(name: str) -> tuple:
    spec: Any = tf.DeviceSpec.from_string(name)
    return spec.job, spec.task
