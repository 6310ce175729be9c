"""The GPU of a rank, where TensorFlow tells of GPUs that are not here."""

import pytest
import tensorflow as tf

from tfparallel.communication.horovod_reductions import Job, slow_on_gpus
from tfparallel.data_parallel import gpu_of_rank
from tfparallel.data_parallel.gpu_of_rank import (
    check_no_gpu_is_shared,
    device_of_rank,
    identity_of_gpu,
)


@pytest.fixture
def machine(monkeypatch):
    """Makes TensorFlow tell of so many GPUs; gives what is visible, and whether it has started."""

    class Machine:
        visible: list = []
        has_started = False
        grown: list = []

        def show(self, gpus, kind):
            assert kind == "GPU"
            if self.has_started:
                raise RuntimeError("Visible devices cannot be modified after being initialized")
            self.visible = [gpus] if not isinstance(gpus, list) else gpus

        def grow(self, gpu, on):
            if self.has_started:
                raise RuntimeError("Physical devices cannot be modified after being initialized")
            self.grown = [*self.grown, gpu.name]

        def has(self, count):
            names = [f"/physical_device:GPU:{i}" for i in range(count)]
            self.visible = [tf.config.PhysicalDevice(name, "GPU") for name in names]

    made = Machine()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: made.visible)
    monkeypatch.setattr(tf.config, "set_visible_devices", made.show)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", made.grow)
    return made


def test_a_rank_shows_tensorflow_the_gpu_of_its_number(machine):
    machine.has(4)
    assert device_of_rank(2) == "/device:GPU:0"
    assert [gpu.name for gpu in machine.visible] == ["/physical_device:GPU:2"]
    assert machine.grown == ["/physical_device:GPU:2"]


def test_the_only_gpu_that_a_scheduler_shows_is_the_ranks(machine):
    machine.has(1)
    assert device_of_rank(2) == "/device:GPU:0"


def test_a_late_start_is_refused_with_the_lines_to_put_first(machine):
    machine.has(4)
    machine.has_started = True
    with pytest.raises(RuntimeError, match=r"set_visible_devices\(.*hvd.local_rank"):
        device_of_rank(2)


def test_ranks_numbered_anew_keep_their_gpu(machine):
    machine.has(4)
    device_of_rank(2)
    machine.has_started = True  # an elastic job goes on in the same process
    assert device_of_rank(1) == "/device:GPU:0"
    assert [gpu.name for gpu in machine.visible] == ["/physical_device:GPU:2"]


def test_ranks_with_a_strategy_inside_have_equal_shares(machine):
    machine.has(4)
    assert device_of_rank(1, local_size=2, has_inner=True) == "/device:GPU:0"
    own = ["/physical_device:GPU:2", "/physical_device:GPU:3"]
    assert [gpu.name for gpu in machine.visible] == own
    machine.has_started = True
    device_of_rank(0, local_size=1, has_inner=True)
    assert [gpu.name for gpu in machine.visible] == own


def test_more_ranks_than_gpus_are_refused_and_no_gpu_is_the_cpu(machine):
    machine.has(2)
    with pytest.raises(ValueError, match="2 GPUs, local rank 3"):
        device_of_rank(3)
    machine.has(0)
    assert device_of_rank(3) == "/device:CPU:0"


def test_gpus_are_told_apart_by_uuid(machine, monkeypatch):
    """In containers of their own all have the number 0."""
    monkeypatch.setattr(gpu_of_rank, "gpus_of_driver_by_uuid", lambda: ["GPU-a", "GPU-b"])
    machine.has(4)
    assert identity_of_gpu({}) is None  # it has not chosen
    device_of_rank(1)
    assert identity_of_gpu({}) == "GPU-b"
    assert identity_of_gpu({"CUDA_VISIBLE_DEVICES": "3,0"}) == "GPU-a"
    assert identity_of_gpu({"CUDA_VISIBLE_DEVICES": "GPU-x,MIG-y"}) == "MIG-y"


def test_two_ranks_on_one_gpu_are_named():
    class Ranks:
        rank = 0

        def __init__(self, *gpus):
            self._gpus = list(gpus)

        def exchange(self, kind, value):
            return self._gpus

    check_no_gpu_is_shared(Ranks("GPU-a", "GPU-b", None, None))
    with pytest.raises(ValueError, match="ranks 1 and 2 on GPU-b"):
        check_no_gpu_is_shared(Ranks("GPU-a", "GPU-b", "GPU-b"))


@pytest.mark.parametrize(
    ("on_gpu", "nccl", "ranks", "is_slow"),
    [
        (True, False, 2, True),
        (True, True, 2, False),
        (False, False, 2, False),
        (True, False, 1, False),
    ],
)
def test_a_build_without_nccl_is_said_on_gpus(on_gpu, nccl, ranks, is_slow):
    job = Job(False, nccl, on_gpu, ranks, 1, True)
    warning = slow_on_gpus(job)
    assert (warning is not None and "HOROVOD_GPU_OPERATIONS=NCCL" in warning) == is_slow
