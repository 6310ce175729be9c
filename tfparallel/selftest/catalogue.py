"""The checks, in order: what each runs, how long it may take, and what to do when it fails."""

import importlib.util
from dataclasses import dataclass

_CURE_MACHINE = "tfparallel doctor says what to do about each"
_CURE_DRIVER = "run nvidia-smi by hand; a driver that hangs needs a restart of the machine"
_CURE_DEVICE = "TensorFlow cannot use these GPUs: look at its lines on CUDA in the output"
_CURE_EXACT = "do not train with this strategy here; report the figures with --json"
_CURE_INTEGERS = "do not train pipelines here; report the output with --json"
_CURE_JOB = "read the job's output; a firewall on localhost and used up ports are likely"
_CURE_RESTART = "see docs/backup.md; the output names the file, or the process"
_CURE_TPU = "do not train on this TPU; report the figures with --json"
_CURE_KERNEL = "report the operation named; training works, with copies through the host"
_CURE_NCCL = "see docs/gpu.md: another NCCL in LD_LIBRARY_PATH, containers without /dev/shm"
_CURE_SPEED = "look for others on these GPUs (nvidia-smi); run it again alone; then report it"
_CURE_MEMORY = "report the figures; meanwhile take fewer microbatches"
_CURE_BALANCE = "look for others on these GPUs (nvidia-smi); else give `partition` as patterns"
_CURE_GROWTH = "report the figures; meanwhile train in parts, with backups"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: shown in the table.
        function: "module:function" of this room.
        arguments: of the function, after the bench.
        cure: what to do when it fails.
        min_gpus: with fewer it is skipped; 0 runs on logical CPUs, too.
        is_job: whether it starts a process for each GPU.
        is_for_tpus: whether it needs a TPU.
        is_slow: whether it takes too long without GPUs for a machine that is to be done in minutes.
        needs_reference: whether it compares with what the check `REFERENCE` leaves.
        limit_s: after which it is ended, and has failed.
    """

    name: str
    function: str
    arguments: tuple[str, ...] = ()
    cure: str = _CURE_EXACT
    min_gpus: int = 0
    is_job: bool = False
    is_for_tpus: bool = False
    is_slow: bool = False
    needs_reference: bool = False
    limit_s: float = 600.0


def _strategy(name: str) -> Check:
    function = "exactness_checks:train_in_one_process"
    return Check(f"exact: {name}", function, (name,), needs_reference=True)


def _job(name: str, *options: str) -> Check:
    function = "job_checks:train_by_launcher"
    cure = f"{_CURE_EXACT}; {_CURE_JOB}"
    arguments = (name, *options)
    return Check(
        f"exact: {name}", function, arguments, cure=cure, is_job=True, needs_reference=True
    )


def _speed(workload: str) -> Check:
    return Check(
        f"speed: {workload}",
        "throughput_checks:compare_throughput",
        (workload,),
        cure=_CURE_SPEED,
        min_gpus=2,
        is_job=True,
        limit_s=1800,
    )


# Checks that the others build on: first.
FIRST = (
    Check("machine", "machine_checks:look_at_machine", cure=_CURE_MACHINE, limit_s=180),
    Check(
        "topology", "machine_checks:look_at_topology", cure=_CURE_DRIVER, min_gpus=1, limit_s=120
    ),
    Check("devices", "gpu_checks:multiply_on_each_device", cure=_CURE_DEVICE, limit_s=180),
)
REFERENCE = Check("reference", "exactness_checks:train_reference", cure=_CURE_DEVICE)
CHECKS = (
    REFERENCE,
    *map(
        _strategy,
        (
            "one_device",
            "mirrored",
            "central_storage",
            "sharded",
            "tensor_parallel",
            "pipeline_gpipe",
            "pipeline_1f1b",
            "pipeline_interleaved",
            "pipeline_zero_bubble",
            "hybrid",
        ),
    ),
    _job("multi_worker_mirrored"),
    _job("parameter_server_sync", "--ps", "1"),
    _job("parameter_server_async", "--ps", "1"),
    Check(
        "exact: horovod",
        "job_checks:train_by_horovodrun",
        ("horovod",),
        cure=f"{_CURE_EXACT}; BUILD.md builds Horovod with NCCL",
        is_job=True,
        needs_reference=True,
    ),
    Check("xla", "exactness_checks:train_with_xla", needs_reference=True),
    Check("compression", "job_checks:compress", cure=_CURE_JOB, is_job=True),
    Check("restart", "recovery_checks:restart", cure=_CURE_RESTART),
    Check(
        "restart: job", "recovery_checks:restart_job", cure=_CURE_RESTART, is_job=True, is_slow=True
    ),
    Check("elastic", "recovery_checks:shrink", cure=_CURE_RESTART, is_job=True, is_slow=True),
    Check("kernels", "gpu_checks:run_without_soft_placement", cure=_CURE_KERNEL, min_gpus=1),
    Check("placement", "placement_checks:look_at_placement", cure=_CURE_KERNEL, min_gpus=1),
    Check(
        "integers", "remote_integers:pass_integers", cure=_CURE_INTEGERS, min_gpus=1, limit_s=300
    ),
    Check("nccl", "gpu_checks:find_nccl", cure=_CURE_NCCL, min_gpus=2),
    Check(
        "bandwidth", "bandwidth_checks:compare_bandwidth", cure=_CURE_NCCL, min_gpus=2, is_job=True
    ),
    Check("copies", "gpu_checks:count_copies", cure=_CURE_KERNEL, min_gpus=1),
    Check("launch ahead", "speed_checks:launch_ahead", cure=_CURE_SPEED, min_gpus=1),
    Check("input", "speed_checks:compare_input", cure=_CURE_SPEED, min_gpus=1),
    Check("memory", "pipeline_checks:measure_memory", cure=_CURE_MEMORY, min_gpus=2),
    Check("balance", "pipeline_checks:measure_balance", cure=_CURE_BALANCE, min_gpus=2),
    Check("steady memory", "memory_checks:watch_memory", cure=_CURE_GROWTH),
    _speed("resnet50"),
    _speed("gpt"),
    Check("tpu", "tpu_checks:train_on_tpu", cure=_CURE_TPU, is_for_tpus=True),
)


def why_not(check: Check, num_gpus: int) -> str:
    """Why a check does not run on a machine with so many GPUs; "" where it does."""
    if num_gpus < check.min_gpus:
        return f"needs {check.min_gpus} GPU{'s' * (check.min_gpus > 1)}, {num_gpus} here"
    if check.is_for_tpus and importlib.util.find_spec("libtpu") is None:
        return "needs a TPU, and libtpu is not installed"
    if check.is_slow and not num_gpus:
        return "takes too long without GPUs"
    if check.is_job and num_gpus == 1:
        return "needs a GPU for each of two processes, 1 here"
    return ""
