"""What building Horovod decides, without building it."""

import os
import subprocess
import sys

import pytest

from tfparallel import build_horovod
from tfparallel.build_horovod import BuildError


def test_the_source_that_does_not_compile_is_left_out():
    lists = (
        "a\nlist(APPEND TF_SOURCES ${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc)\nb\n"
    )
    assert build_horovod.leave_out_xla(lists) == "a\nb\n"


def test_another_horovod_is_noticed():
    with pytest.raises(BuildError, match="xla_mpi_ops"):
        build_horovod.leave_out_xla("a\n")


BRIDGE = """\
#define gpuMemsetAsync cudaMemsetAsync
#endif // HAVE_CUDA, HAVE_ROCM

// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
#endif // HAVE_GPU

// Undef LOG macro from TensorFlow
"""


def test_a_stream_is_asked_for_its_handle():
    patched = build_horovod.ask_stream_for_handle(BRIDGE)
    assert "platform_specific_handle().stream" in patched
    assert patched.startswith("#define gpuMemsetAsync") and patched.endswith("TensorFlow\n")
    assert "GpuStreamHandle AsGpuStreamValue(Stream* stream);" not in patched
    assert patched.count("#if") == BRIDGE.count("#if") - 1  # of the two that end there
    with pytest.raises(BuildError, match="AsGpuStreamValue"):
        build_horovod.ask_stream_for_handle("another bridge")


def test_what_a_build_with_nccl_lacks_is_named_with_its_packages(tmp_path):
    options = {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(tmp_path / "cuda"),
        "HOROVOD_NCCL_HOME": str(tmp_path / "nccl"),
    }
    with pytest.raises(BuildError) as caught:
        build_horovod.require_cuda(options)
    for text in (
        *("nvcc is missing", "cuda-nvcc-12-9", "nccl.h is missing", "libnccl-dev"),
        *("cuda_runtime.h is missing", "libcudart.so is missing", "cuda-cudart-dev-12-9"),
    ):
        assert text in str(caught.value)
    files = ("cuda/bin/nvcc", "cuda/include/cuda_runtime.h", "cuda/lib64/libcudart_static.a")
    for path in (*files, "nccl/include/nccl.h", "nccl/lib/libnccl.so"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        missing = path != "nccl/lib/libnccl.so"
        if missing:
            with pytest.raises(BuildError):
                build_horovod.require_cuda(options)
    build_horovod.require_cuda(options)
    build_horovod.require_cuda({"HOROVOD_WITH_GLOO": "1"})


def test_options_of_the_user_are_kept_and_have_wheels_of_their_own():
    default = build_horovod.horovod_options({"HOME": "/root"})
    assert default["HOROVOD_WITH_GLOO"] == default["HOROVOD_WITHOUT_MPI"] == "1"
    chosen = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_WITH_MPI": "1"}
    options = build_horovod.horovod_options(chosen)
    assert chosen.items() <= options.items() and "HOROVOD_WITHOUT_MPI" not in options
    keys = {build_horovod.cache_key("2.21.0", each) for each in (default, options)}
    keys.add(build_horovod.cache_key("2.20.0", default))
    assert len(keys) == 3


@pytest.mark.parametrize(("tool", "package"), [("g++", "g++"), ("mpicxx", "libopenmpi-dev")])
def test_a_missing_tool_is_named_with_the_command_that_installs_it(tmp_path, tool, package):
    """In the first line, before anything is downloaded; nothing stays behind."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for each in {"cmake", "g++", "make", "mpicxx", "mpirun"} - {tool}:
        (folder / each).symlink_to("/bin/true")
    command = [sys.executable, "-m", "tfparallel.build_horovod", "--cache", tmp_path / "cache"]
    finished = subprocess.run(
        command,
        env={**os.environ, "PATH": str(folder), "HOROVOD_WITH_MPI": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 1
    expected = f'{package} missing: install with "apt-get install {package}".'
    assert finished.stderr.splitlines()[-1] == expected
    assert not (tmp_path / "cache").exists()
