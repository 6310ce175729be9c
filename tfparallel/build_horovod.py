"""Builds Horovod for the installed TensorFlow: `python -m tfparallel.build_horovod`.

Horovod's last release, 0.28.1, does not compile against TensorFlow 2.19 and newer: one of its
sources, the bridge to XLA, includes headers that TensorFlow no longer ships. Without that source it
builds and works; its operations then cannot be compiled by XLA, nothing else changes. Built for
GPUs, it would ask TensorFlow for a function that no longer exists (`AsGpuStreamValue`), and could
not be loaded; it is given one of its own.

The wheel is kept in a cache, for each version of Horovod, TensorFlow and Python and each set of
`HOROVOD_*` options, so that the next environment installs it in seconds and without a network.
Options of Horovod's own build pass through, such as `HOROVOD_GPU_OPERATIONS=NCCL` and
`HOROVOD_WITH_MPI=1`.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

VERSION = "0.28.1"
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# What Horovod itself needs to be built and to run; the `horovod` extra installs it.
REQUIREMENTS = ("cloudpickle", "packaging", "psutil", "setuptools", "wheel", "yaml")
_TOOLS = {"cmake": "cmake", "g++": "g++", "make": "make"}  # command: Debian package
_MPI_TOOLS = {"mpicxx": "libopenmpi-dev", "mpirun": "openmpi-bin"}
_BUILD_OPTIONS = (
    *("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU", "HOROVOD_NCCL", "HOROVOD_CUDA"),
    *("HOROVOD_ROCM", "HOROVOD_ALLOW", "HOROVOD_BUILD"),
)
_XLA_SOURCE = "/horovod/tensorflow/xla_mpi_ops.cc"
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu")
# What the bridge to TensorFlow declares, and how TensorFlow 2.20 and 2.21 tell a stream's handle.
_STREAM_BEGINS = "// Forward declaration of AsGpuStreamValue"
_STREAM_ENDS = "#endif // TENSORFLOW_VERSION >= 2011000000\n#endif // HAVE_GPU\n"
_STREAM_HANDLE = """\
#include "xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return reinterpret_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
#endif // HAVE_GPU
"""


_NO_NVCC = (
    "nvcc is missing in {cuda}/bin. Install NVIDIA's toolkit, from its package repository: "
    '"apt-get install cuda-nvcc-12-9 cuda-cudart-dev-12-9" (or -13-0 with a driver of 580 or '
    "newer); the wheels of CUDA 12 have no nvcc. Tell another place by HOROVOD_CUDA_HOME."
)
_NO_NCCL = (
    "{} is missing in {}. Install it from NVIDIA's package repository: "
    '"apt-get install libnccl-dev", or take the one that comes with tensorflow[and-cuda]: '
    '"pip install nvidia-nccl-cu12", with a link libnccl.so beside its libnccl.so.2, '
    "HOROVOD_NCCL_HOME=.../site-packages/nvidia/nccl and HOROVOD_NCCL_LINK=SHARED."
)
_NO_CUDART = (
    "{name} is missing in {folders}. Install it from NVIDIA's package repository: "
    '"apt-get install cuda-cudart-dev-12-9", in the version of nvcc. Tell another place by '
    "HOROVOD_CUDA_HOME."
)
_NO_CUDA_IN_TENSORFLOW = (
    "A build with NCCL needs a TensorFlow with CUDA, whose symbols it asks for when it is loaded; "
    "the installed one has none: {name} {version}.\n"
    "  For GPUs: pip uninstall {name}; pip install 'tfparallel[gpu,horovod]'\n"
    "  For CPUs: env --unset=HOROVOD_GPU_OPERATIONS python -m tfparallel.build_horovod"
)
_HAS_CUDA = "import tensorflow as tf; print(tf.sysconfig.get_build_info()['is_cuda_build'])"


class BuildError(Exception):
    """Horovod cannot be built here; the message says what is missing and how to get it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tfparallel.build_horovod", description=__doc__)
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="where wheels are kept (%(default)s)"
    )
    parser.add_argument("--rebuild", action="store_true", help="build even if the wheel is cached")
    options = parser.parse_args(arguments)
    try:
        build_and_install(options.cache, options.rebuild)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build_and_install(cache: Path, rebuild: bool = False) -> None:
    """Installs Horovod into the running Python, building it first if `cache` does not have it.

    Raises:
        BuildError: if something is missing, or the build fails.
    """
    _require_packages()
    name, tensorflow = tensorflow_wheel()
    build_options = horovod_options(os.environ)
    if is_with_nccl(build_options) and not is_tensorflow_with_cuda():
        raise BuildError(_NO_CUDA_IN_TENSORFLOW.format(name=name, version=tensorflow))
    folder = cache / cache_key(tensorflow, build_options)
    wheel = None if rebuild else next(folder.glob("horovod-*.whl"), None)
    if wheel is None:
        _require_tools(with_mpi=build_options.get("HOROVOD_WITH_MPI") == "1")
        require_cuda(build_options)
        print(
            f"Building Horovod {VERSION} for TensorFlow {tensorflow}, Python "
            f"{platform.python_version()}: two to six minutes on two cores.",
            flush=True,
        )
        begin = time.monotonic()
        wheel = _build(folder, build_options)
        print(f"Built in {time.monotonic() - begin:.0f} s: {wheel}", flush=True)
    else:
        print(f"Horovod {VERSION} for TensorFlow {tensorflow} is in the cache: {wheel}", flush=True)
    _pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    _try_out()


def default_cache() -> Path:
    """`tfparallel/horovod` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tfparallel" / "horovod"


def tensorflow_wheel() -> tuple[str, str]:
    """The package of the installed TensorFlow, and its version.

    Raises:
        BuildError: if there is none, or one that Horovod knows nothing of (TPU).
    """
    for name in _TENSORFLOWS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise BuildError(
        "Horovod is built against the installed TensorFlow, and none was found. Install one first: "
        "pip install 'tfparallel[cpu,horovod]' or 'tfparallel[gpu,horovod]'."
    )


def is_tensorflow_with_cuda() -> bool:
    """Whether the installed TensorFlow says that it was built for CUDA, in a process of its own.

    Raises:
        BuildError: if it cannot be imported.
    """
    command = [sys.executable, "-c", _HAS_CUDA]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise BuildError(f"TensorFlow cannot be imported. Its error:\n{finished.stderr[-2000:]}")
    return finished.stdout.split()[-1] == "True"


def is_with_nccl(build_options: Mapping[str, str]) -> bool:
    """Whether a build is to reduce tensors of GPUs by NCCL."""
    return any(value == "NCCL" for key, value in build_options.items() if "GPU" in key)


def horovod_options(environment: Mapping[str, str]) -> dict[str, str]:
    """The options of Horovod's build: the user's, and else TensorFlow with Gloo."""
    mpi = environment.get("HOROVOD_WITH_MPI") == "1"
    defaults = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        **({} if mpi else {"HOROVOD_WITHOUT_MPI": "1"}),
    }
    chosen = {key: value for key, value in environment.items() if key.startswith(_BUILD_OPTIONS)}
    return {**defaults, **chosen}


def cache_key(tensorflow: str, build_options: Mapping[str, str]) -> str:
    """The name of the cache's folder for wheels that are interchangeable."""
    options = "\n".join(f"{key}={value}" for key, value in sorted(build_options.items()))
    digest = hashlib.sha256(options.encode()).hexdigest()[:12]
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return f"horovod-{VERSION}-tensorflow-{tensorflow}-{python}-{digest}"


def leave_out_xla(cmake_lists: str) -> str:
    """The text of `horovod/tensorflow/CMakeLists.txt` without the source that does not compile.

    Raises:
        BuildError: if that source is not named in it.
    """
    lines = cmake_lists.splitlines(keepends=True)
    kept = [line for line in lines if _XLA_SOURCE not in line]
    if len(kept) != len(lines) - 1:
        raise BuildError(f"Expected one line with {_XLA_SOURCE} in Horovod's CMakeLists.txt.")
    return "".join(kept)


def ask_stream_for_handle(mpi_ops: str) -> str:
    """The text of `horovod/tensorflow/mpi_ops.cc`, which loads with TensorFlow 2.20 and newer.

    Raises:
        BuildError: if it does not declare the function that is gone.
    """
    before, begins, rest = mpi_ops.partition(_STREAM_BEGINS)
    _, ends, after = rest.partition(_STREAM_ENDS)
    if not begins or not ends:
        raise BuildError("Expected a declaration of AsGpuStreamValue in Horovod's mpi_ops.cc.")
    return before + _STREAM_HANDLE + after


def _build(folder: Path, build_options: Mapping[str, str]) -> Path:
    """Builds the wheel and puts it into `folder` in one step: a cache has whole wheels only."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as name:
        workplace = Path(name)
        source = _unpack(_download(workplace), workplace)
        lists = source / "horovod" / "tensorflow" / "CMakeLists.txt"
        lists.write_text(leave_out_xla(lists.read_text()))
        bridge = source / "horovod" / "tensorflow" / "mpi_ops.cc"
        bridge.write_text(ask_stream_for_handle(bridge.read_text()))
        _pip(
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(workplace / "wheel"),
            str(source),
            environment={"MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}", **build_options},
        )
        (built,) = (workplace / "wheel").glob("horovod-*.whl")
        folder.mkdir(exist_ok=True)
        return built.replace(folder / built.name)


def _download(workplace: Path) -> Path:
    _pip(
        "download",
        "--no-deps",
        "--no-binary=:all:",
        "--no-build-isolation",
        "--dest",
        str(workplace),
        f"horovod=={VERSION}",
        environment={"HOROVOD_WITHOUT_PYTORCH": "1"},
    )
    (archive,) = workplace.glob("horovod-*.tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SOURCE_SHA256:
        raise BuildError(
            f"The source package of Horovod {VERSION} must have the SHA-256 {SOURCE_SHA256}. "
            f"Received: {digest}. Check the package index that pip uses."
        )
    return archive


def _unpack(archive: Path, workplace: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(workplace, filter="data")
    return workplace / f"horovod-{VERSION}"


def _pip(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Runs pip of this Python quietly; its output is shown only where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    finished = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise BuildError(
            f"`pip {arguments[0]}` failed for Horovod {VERSION}, with exit status "
            f"{finished.returncode}. Its output:\n{finished.stdout}"
        )


def _require_packages() -> None:
    missing = [name for name in REQUIREMENTS if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(
            f"Python packages are missing: {', '.join(missing)}. Install them with "
            "\"pip install 'tfparallel[horovod]'\"."
        )


def _require_tools(with_mpi: bool) -> None:
    tools = {**_TOOLS, **_MPI_TOOLS} if with_mpi else _TOOLS
    missing = [package for command, package in tools.items() if shutil.which(command) is None]
    if missing:
        raise BuildError(
            f'{", ".join(missing)} missing: install with "apt-get install {" ".join(missing)}".'
        )


def require_cuda(build_options: Mapping[str, str]) -> None:
    """Looks for what a build with NCCL needs, where one is asked for.

    Raises:
        BuildError: naming what is missing, where it was looked for, and what to install.
    """
    if not is_with_nccl(build_options):
        return
    cuda = Path(build_options.get("HOROVOD_CUDA_HOME") or _cuda_home())
    nccl = build_options.get("HOROVOD_NCCL_HOME")
    headers = [Path(p) for p in (build_options.get("HOROVOD_NCCL_INCLUDE"),) if p]
    libraries = [Path(p) for p in (build_options.get("HOROVOD_NCCL_LIB"),) if p]
    for base in (Path(nccl),) if nccl else (cuda, Path("/usr"), Path("/usr/local")):
        headers.append(base / "include")
        libraries += [
            base / "lib",
            base / "lib64",
            base / "lib" / f"{platform.machine()}-linux-gnu",
        ]
    names = ("libnccl.so", "libnccl_static.a")
    missing = [
        *([] if (cuda / "bin" / "nvcc").is_file() else [_NO_NVCC.format(cuda=cuda)]),
        *_missing_of_cuda(cuda),
        *([] if _is_in("nccl.h", headers) else [_NO_NCCL.format("nccl.h", _listed(headers))]),
        *(
            []
            if any(_is_in(name, libraries) for name in names)
            else [_NO_NCCL.format("libnccl.so", _listed(libraries))]
        ),
    ]
    if missing:
        raise BuildError("A build with NCCL is asked for.\n" + "\n".join(missing))


def _missing_of_cuda(cuda: Path) -> list[str]:
    """What of CUDA's runtime a build lacks: its headers, its library."""
    targets = [cuda, *(cuda / "targets").glob("*")]
    headers = [base / "include" for base in targets]
    libraries = [base / name for base in targets for name in ("lib64", "lib")]
    missing = [] if _is_in("cuda_runtime.h", headers) else [("cuda_runtime.h", headers)]
    if not any(_is_in(name, libraries) for name in ("libcudart.so", "libcudart_static.a")):
        missing.append(("libcudart.so", libraries))
    return [_NO_CUDART.format(name=name, folders=_listed(where)) for name, where in missing]


def _cuda_home() -> str:
    nvcc = shutil.which("nvcc")
    return str(Path(nvcc).resolve().parents[1]) if nvcc else "/usr/local/cuda"


def _is_in(name: str, folders: Sequence[Path]) -> bool:
    return any((folder / name).is_file() for folder in folders)


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))


def _try_out() -> None:
    """Makes sure that what was installed can be loaded."""
    program = "import horovod.tensorflow as hvd; hvd.init(); print(hvd.size())"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    if finished.returncode or finished.stdout.split() != ["1"]:
        raise BuildError(
            "Horovod is installed, but cannot be loaded; `--rebuild` builds it anew. Its error:\n"
            f"{finished.stderr}"
        )
    print(f"Horovod {VERSION} is installed and works.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
