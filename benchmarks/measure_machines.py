"""What is wrong with a machine, each alone: `tfparallel doctor`, in another process, finds it."""

import contextlib
import functools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Found = list[dict[str, Any]]


def doctor(*options: str, **environ: str) -> Found:
    """Its findings."""
    env = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "OMP_NUM_THREADS")}
    path = os.pathsep.join([environ.pop("FIRST", ""), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", "doctor", "--json", *options],
        env={**env, "PYTHONPATH": path.strip(os.pathsep), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout.strip():
        raise RuntimeError(done.stderr[-1000:])
    return json.loads(done.stdout)["findings"]


@functools.cache
def sound() -> tuple:
    """What it finds on this machine as it is."""
    return tuple(doctor())


@dataclass(frozen=True)
class Fault:
    """Something that is wrong.

    Attributes:
        check: the doctor's that should find it.
        examine: injects it, and gives the findings.
    """

    check: str
    examine: Callable[[], Found]


@contextlib.contextmanager
def _installed(name: str, version: str, requires: str = "") -> Iterator[str]:
    """A folder for PYTHONPATH with the metadata of a package."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text + (f"Requires-Dist: {requires}\n" if requires else ""))
        (info / "RECORD").write_text("")
        yield folder


def _package(name: str, version: str) -> Found:
    with _installed(name, version) as folder:
        return doctor(FIRST=folder)


def _broken_import() -> Found:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "tensorflow"
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('libfoo.so: cannot open')\n")
        return doctor(FIRST=folder)


def _cluster(*workers: str) -> Mapping[str, str]:
    task = {"type": "worker", "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": list(workers)}, "task": task})}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _port_in_use() -> Found:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = f"127.0.0.1:{server.getsockname()[1]}"
        return doctor(**_cluster(own, f"127.0.0.1:{_free_port()}"))


def _own() -> str:
    return f"127.0.0.1:{_free_port()}"


def _folder_that_is_a_file() -> Found:
    with tempfile.NamedTemporaryFile() as file:
        return doctor("--folder", file.name)


def _folder_of_its_own() -> Found:
    """Two hosts' doctors, each with another folder."""
    workers = [_own(), _own()]
    answers: list[Found] = []

    def ask(index: int, folder: str) -> None:
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": workers}, "task": task})
        answers.append(doctor("--link", "60", "--folder", folder, TF_CONFIG=config))

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        threads = [threading.Thread(target=ask, args=(i, f)) for i, f in enumerate((one, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return answers[0]


def _few_files() -> Found:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        return doctor()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _silent_link() -> Found:
    return doctor("--link", "3", **_cluster(_own(), _own()))


FAULTS: dict[str, Fault] = {
    "two wheels of TensorFlow": Fault("wheels", lambda: _package("tensorflow", "2.21.0")),
    "two wheels of Keras": Fault("wheels", lambda: _package("keras-nightly", "3.13.0")),
    "a version that is too old": Fault("versions", lambda: _package("keras", "3.8.0")),
    "a Horovod that does not know this TensorFlow": Fault(
        "versions", lambda: _package("horovod", "0.27.0")
    ),
    "a library that is missing": Fault("import", _broken_import),
    "one thread for all cores": Fault("threads", lambda: doctor(OMP_NUM_THREADS="1")),
    "more threads than cores": Fault("threads", lambda: doctor(TF_NUM_INTRAOP_THREADS="512")),
    "TF_CONFIG that is no JSON": Fault("TF_CONFIG", lambda: doctor(TF_CONFIG="{cluster: 1}")),
    "a port in use": Fault("port", _port_in_use),
    "an address of another host": Fault(
        "address", lambda: doctor(**_cluster("192.0.2.1:2222", _own()))
    ),
    "a name that does not resolve": Fault(
        "names", lambda: doctor(**_cluster(_own(), "no-such-host.invalid:2222"))
    ),
    "an address that does not reach": Fault(
        "reach", lambda: doctor(**_cluster(_own(), "192.0.2.1:2222"))
    ),
    "a folder that is a file": Fault("folder", _folder_that_is_a_file),
    "a folder that is not shared": Fault("shared folder", _folder_of_its_own),
    "a host whose doctor is silent": Fault("link", _silent_link),
    "few open files": Fault("open files", _few_files),
}
