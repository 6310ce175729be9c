"""Which of TensorFlow's collectives workers take, agreed on before one of them can hang.

Left to itself (`AUTO`), TensorFlow reduces what is on GPUs by a ring over gRPC, through the memory
of hosts, unless its configuration of sessions asks for NCCL. So NCCL is asked for by name.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import tensorflow as tf

Implementation = tf.distribute.experimental.CommunicationImplementation
Options = tf.distribute.experimental.CommunicationOptions


@runtime_checkable
class CommunicationOptions(Protocol):
    """What TensorFlow's function of this name makes, which looks like a class, is of another."""

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: tf.distribute.experimental.CommunicationImplementation


BYTES_PER_PACK = 32 << 20  # large enough for NCCL, small enough to begin before the last gradient


def check_alike(kinds: Sequence[str], counts: Sequence[int], addresses: Sequence[str]) -> None:
    """Refuses workers that cannot meet: a collective has one kind of device, and is of all.

    Args:
        kinds: "GPU" or "CPU", of each rank's devices.
        counts: how many devices each rank has.
        addresses: of each rank.

    Raises:
        ValueError: naming the ranks that differ from most others.
    """
    own = [f"{count} {kind}" for kind, count in zip(kinds, counts, strict=True)]
    usual = max(own, key=lambda each: (own.count(each), "GPU" in each))
    others = [f"rank {i} ({addresses[i]}) has {own[i]}" for i in range(len(own)) if own[i] != usual]
    if others:
        raise ValueError(
            "All workers must compute on as many devices of one kind. Received: "
            f"{', '.join(others)}; the others have {usual}. Look for the "
            "driver and the wheel there (`tfparallel doctor`), or hide all "
            "GPUs: CUDA_VISIBLE_DEVICES=-1."
        )


def options_of_gradients(
    options: tf.distribute.experimental.CommunicationOptions, kind: str, is_divided: bool
) -> tf.distribute.experimental.CommunicationOptions:
    """The options with NCCL, in packs, where devices are whole GPUs and nothing else is asked for.

    Args:
        options: the user's.
        kind: of all workers' devices.
        is_divided: whether a GPU is divided into parts, which NCCL does not reduce between.

    Raises:
        ValueError: if NCCL is asked for, and a GPU is divided.
    """
    if kind != "GPU":
        return options
    implementation = options.implementation
    if is_divided and implementation == Implementation.NCCL:
        raise ValueError(
            "NCCL reduces between GPUs, not between the parts of one. Received: "
            "implementation=NCCL, and GPUs that are divided into logical ones. Take RING, or "
            "leave the GPUs whole."
        )
    if implementation == Implementation.AUTO:
        implementation = Implementation.RING if is_divided else Implementation.NCCL
    return Options(
        bytes_per_pack=options.bytes_per_pack or BYTES_PER_PACK,
        timeout_seconds=options.timeout_seconds,
        implementation=implementation,
    )


def without_limit(options: tf.distribute.experimental.CommunicationOptions) -> object:
    """The options without `timeout_seconds`, which our watch keeps (`collective_watch.py`)."""
    return Options(bytes_per_pack=options.bytes_per_pack, implementation=options.implementation)


def options_of_hosts(options: tf.distribute.experimental.CommunicationOptions) -> object:
    """The options of collectives between hosts' memories."""
    return Options(
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds,
        implementation=Implementation.RING,
    )
