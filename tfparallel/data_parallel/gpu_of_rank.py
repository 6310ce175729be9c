"""Which GPU a rank computes on, and that no other rank of its host has the same."""

import os
import socket
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfparallel.coordination.agreement import Agreement
from tfparallel.machine.gpu_shares import VISIBLE, gpus_of_driver_by_uuid

_STARTED = """\
TensorFlow has started with {count} GPUs before the rank chose its own: it has taken memory of \
all of them, which the other ranks of {host} need. Create the strategy before anything that \
computes, or put these lines first in the script:
    gpus = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # after hvd.init()"""


_chosen: list[tf.config.PhysicalDevice] = []  # of this process, as long as it lives


def device_of_rank(local_rank: int, local_size: int = 1, has_inner: bool = False) -> str:
    """The GPU of this rank, the first of those that it shows to TensorFlow; or the CPU.

    A GPU that is the only visible one is the rank's: the scheduler has chosen it (Slurm's
    `--gpus-per-task=1`), or the script. What was chosen stays when ranks are numbered anew.

    Args:
        local_rank: the rank's number on this host.
        local_size: how many ranks the host has.
        has_inner: whether another strategy divides the rank's work over its GPUs, which are then
            an equal share of the host's; else there is one.

    Raises:
        ValueError: for more ranks than GPUs.
        RuntimeError: if TensorFlow has taken all GPUs already.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "/device:CPU:0"
    if len(gpus) > 1 and gpus != _chosen:
        _show_only(gpus, local_rank, max(len(gpus) // local_size, 1) if has_inner else 1)
    _grow_memory(tf.config.get_visible_devices("GPU"))
    return "/device:GPU:0"


def _show_only(gpus: Sequence[tf.config.PhysicalDevice], local_rank: int, share: int) -> None:
    own = list(gpus[local_rank * share : (local_rank + 1) * share])
    if len(own) < share:
        raise ValueError(
            f"Expected a GPU for each rank of this host. Received: {len(gpus)} GPUs, local rank "
            f"{local_rank}. Start fewer ranks on {socket.gethostname()}."
        )
    try:
        tf.config.set_visible_devices(own, "GPU")
    except RuntimeError as error:
        message = _STARTED.format(count=len(gpus), host=socket.gethostname())
        raise RuntimeError(message) from error
    _chosen[:] = own


def _grow_memory(gpus: Sequence[tf.config.PhysicalDevice]) -> None:
    """NCCL takes memory beside TensorFlow's, which else has nearly all."""
    for gpu in gpus:
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except (RuntimeError, ValueError):  # started, or divided by the user: as it is
            return


def identity_of_gpu(environ: Mapping[str, str] = os.environ) -> str | None:
    """The UUID of the only GPU that this process shows to TensorFlow; None where that is not known.

    It tells apart GPUs that have the same number in containers of their own.
    """
    visible = tf.config.get_visible_devices("GPU")
    if len(visible) != 1:
        return None
    number = int(visible[0].name.rpartition(":")[2])  # among those that CUDA shows
    names = environ.get(VISIBLE, "").split(",")
    name = names[number].strip() if number < len(names) and names[number] else str(number)
    if not name.isdigit():
        return name
    uuids = gpus_of_driver_by_uuid()
    return uuids[int(name)] if int(name) < len(uuids) else None


def check_no_gpu_is_shared(agreement: Agreement) -> None:
    """Ends all ranks alike if two of them have one GPU; called by all.

    Raises:
        ValueError: naming the ranks and the GPU.
    """
    owners: dict[str, int] = {}
    for rank, gpu in enumerate(agreement.exchange("tell its GPU", identity_of_gpu())):
        if gpu is not None and owners.setdefault(gpu, rank) != rank:
            raise ValueError(
                f"Expected a GPU for each rank: NCCL refuses two ranks on one. Received: ranks "
                f"{owners[gpu]} and {rank} on {gpu}. Start one rank for each GPU, or show each its "
                f"own by {VISIBLE}. (Rank {agreement.rank} is speaking.)"
            )
