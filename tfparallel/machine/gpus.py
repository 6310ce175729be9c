"""GPUs, as the driver tells them and as an installed TensorFlow could use them."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping

from tfparallel.machine.finding import Finding

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_LIMIT_S = 20.0


def gpus_of_driver(limit_s: float = _LIMIT_S) -> list[str]:
    """One line for each GPU: name, memory, driver; none without NVIDIA's driver.

    Raises:
        RuntimeError: where the driver's tool is there and fails.
    """
    if shutil.which(_QUERY[0]) is None:
        return []
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"nvidia-smi gives no answer in {limit_s:g} s") from error
    if done.returncode != 0:
        raise RuntimeError((done.stderr or done.stdout).strip()[:200] or "nvidia-smi failed")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def check_gpus(
    versions: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    gpus: Callable[[], list[str]] = gpus_of_driver,
) -> Iterator[Finding]:
    """GPUs of this machine that a job would leave idle.

    Args:
        versions: of installed packages, by name.
        environ: of the job.
        gpus: what the driver tells.
    """
    try:
        found = gpus()
    except RuntimeError as error:
        yield Finding("gpus", "problem", str(error), "look at the driver: run nvidia-smi")
        return
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not found:
        yield Finding("gpus", "ok", "none: logical CPUs are the devices")
    elif "tensorflow-cpu" in versions and "tensorflow" not in versions:
        yield Finding(
            "gpus",
            "problem",
            f"{len(found)} x {found[0]}, and tensorflow-cpu, which cannot use them",
            "pip uninstall tensorflow-cpu; pip install 'tfparallel[gpu]'",
        )
    elif visible is not None and visible.strip() in ("", "-1"):
        yield Finding(
            "gpus",
            "warning",
            f"{len(found)} x {found[0]}, hidden by CUDA_VISIBLE_DEVICES={visible!r}",
            "unset CUDA_VISIBLE_DEVICES, if the job shall use them",
        )
    else:
        yield Finding("gpus", "ok", f"{len(found)} x {found[0]}")
