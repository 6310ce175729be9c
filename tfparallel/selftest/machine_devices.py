"""The devices that checks train on: GPUs, halves of the only GPU, or logical CPUs."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tfparallel.logical_devices import LOGICAL_CPUS_VARIABLE, open_logical_cpus
from tfparallel.machine.gpu_shares import VISIBLE

_HALF_MB = 8192  # of memory for each of two devices on the only GPU
_STAND_INS = 2


@dataclass(frozen=True)
class Bench:
    """Where checks run.

    Attributes:
        gpus: as `CUDA_VISIBLE_DEVICES` names them; none where logical CPUs stand in.
        folder: for files that checks leave for one another.
    """

    gpus: tuple[str, ...]
    folder: str

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def num_devices(self) -> int:
        """How many devices a process with all of them opens."""
        return max(len(self.gpus), _STAND_INS)

    @property
    def devices(self) -> list[str]:
        """Names of these devices: `["GPU:0", ...]`."""
        kind = "GPU" if self.gpus else "CPU"
        return [f"{kind}:{i}" for i in range(self.num_devices)]

    def environment(self) -> dict[str, str]:
        """What a process needs that shall open these devices."""
        own = {VISIBLE: ",".join(self.gpus) or "-1", "KERAS_BACKEND": "tensorflow"}
        common = {"TF_NUM_INTEROP_THREADS": "8", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **own}
        if not self.gpus:
            common[LOGICAL_CPUS_VARIABLE] = str(_STAND_INS)
        common.pop("TF_CONFIG", None)
        return common

    def to_json(self) -> str:
        """For `bench_of_json`."""
        return json.dumps(asdict(self))


def bench_of_json(text: str) -> Bench:
    """The bench that `Bench.to_json` wrote."""
    fields = json.loads(text)
    return Bench(tuple(fields["gpus"]), fields["folder"])


def open_devices(is_exact: bool = True, is_deterministic: bool = True) -> None:
    """Opens the devices of this process, before TensorFlow starts, and makes its results repeat.

    The only GPU becomes two devices, so that strategies have something to divide. TF32 is off, by
    which Ampere and newer GPUs multiply float32 with 11 bits of mantissa, and operations are
    deterministic: what is left between two strategies is the order of sums.

    Args:
        is_exact: False leaves TF32 as users have it.
        is_deterministic: False leaves operations as users have them. Keras compiles no step with
            XLA where they are deterministic.
    """
    import tensorflow as tf

    if is_exact:
        tf.config.experimental.enable_tensor_float_32_execution(False)
    if is_deterministic:
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) == 1 and "TF_CONFIG" not in os.environ and "HOROVOD_RANK" not in os.environ:
        halves = [tf.config.LogicalDeviceConfiguration(memory_limit=_HALF_MB)] * _STAND_INS
        tf.config.set_logical_device_configuration(gpus[0], halves)
    open_logical_cpus()
