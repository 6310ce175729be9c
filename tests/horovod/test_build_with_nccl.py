"""Horovod for GPUs is built with CUDA and NCCL from packages, and loads where no GPU is."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from tfparallel import build_horovod

pytestmark = pytest.mark.turns

ROOT = Path(__file__).parents[2]
CUDA = "13.0"
PACKAGES = (
    f"nvidia-cuda-nvcc=={CUDA}.*",
    f"nvidia-cuda-runtime=={CUDA}.*",
    f"nvidia-cuda-crt=={CUDA}.*",
    f"nvidia-nvvm=={CUDA}.*",
    f"nvidia-cuda-cccl=={CUDA}.*",
    "nvidia-nccl-cu13",
)
# With all symbols at once: one that TensorFlow no longer has is an error here, not in a training.
LOAD = """\
import ctypes, os, sys, tensorflow
import horovod.tensorflow as hvd
from horovod.tensorflow import mpi_ops
ctypes.CDLL(mpi_ops._basics.MPI_LIB_CTYPES._name, mode=os.RTLD_NOW)
hvd.init()
assert hvd.nccl_built() and hvd.size() == 1
print("loaded")
"""


def test_the_guide_has_the_packages_that_it_is_built_from():
    guide = (ROOT / "BUILD.md").read_text()
    assert [each for each in PACKAGES if each not in guide] == []


def run(step: str, command: list, environment: Mapping[str, str] = os.environ) -> str:
    """The output of a step, whose name stands in the failure."""
    done = subprocess.run(
        [str(part) for part in command],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"stopped at: {step}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tensorflow", ["2.21.0", "2.20.0"])
def test_horovod_with_nccl_loads_without_a_gpu(tmp_path, tensorflow):
    python = tmp_path / "venv" / "bin" / "python"
    run("a virtual environment", [sys.executable, "-m", "venv", tmp_path / "venv"])
    needed = ("setuptools<81", "wheel", "cloudpickle", "packaging", "psutil", "pyyaml")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(f"TensorFlow {tensorflow}", [*pip, f"tensorflow=={tensorflow}", *needed])
    run("CUDA and NCCL", [*pip, *PACKAGES])
    site = tmp_path / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    cuda, nccl = site / "nvidia" / "cu13", site / "nvidia" / "nccl"
    for library, link in ((cuda / "lib", "libcudart.so"), (nccl / "lib", "libnccl.so")):
        (library / link).symlink_to(next(library.glob(f"{link}.*")).name)
    (cuda / "lib64").symlink_to("lib")
    environment = {
        **os.environ,
        "PATH": f"{cuda / 'bin'}:{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": str(nccl / "lib"),
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(cuda),
        "HOROVOD_NCCL_HOME": str(nccl),
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": "90",
    }
    build = [python, "-m", "tfparallel.build_horovod", "--cache", tmp_path / "cache"]
    run("the build", build, environment)
    assert "loaded" in run("loading it", [python, "-c", LOAD], environment)


def test_a_build_with_nccl_is_refused_beside_a_tensorflow_without_cuda(tmp_path):
    """Of this environment's: before anything is looked for, downloaded, or taken from a cache."""
    if build_horovod.is_tensorflow_with_cuda():
        pytest.skip("TensorFlow has CUDA here")
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "tfparallel.build_horovod", "--cache", str(cache)]
    done = subprocess.run(
        command,
        env={**os.environ, "HOROVOD_GPU_OPERATIONS": "NCCL", "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1 and not cache.exists()
    assert "the installed one has none: tensorflow-cpu" in done.stderr
    assert "pip uninstall tensorflow-cpu" in done.stderr
