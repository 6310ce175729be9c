"""Run tests with the oldest and newest supported TensorFlow and Keras, on every Python there is.

    make test-versions                                     # what is listed in TESTS
    make test-versions PYTEST_ARGS="tests/test_import.py"  # or other tests
    python tools/test_versions.py --only newest-3.13 tests/test_import.py

Each pair has an environment of its own, made by uv under build/versions, which a second run uses
again. Exits with 1 if a test fails anywhere; a Python that is not here is named.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"
UV = Path(sys.executable).with_name("uv")

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PINS = {
    "oldest": {"tensorflow-cpu": "2.20.*", "keras": "3.12.*"},
    "newest": {"tensorflow-cpu": "2.21.*", "keras": "3.15.*"},
}
# Keras's last release for this Python.
PINS_OF_PYTHON = {"3.10": {"keras": "3.12.*"}}

# What touches the private names of TensorFlow and Keras, and training under each engine.
TESTS = [
    "tests/internals",
    "tests/test_import.py",
    "tests/launch/test_config.py",
    "tests/callbacks/test_part.py",
    "tests/release/test_old_files.py",
    "tests/conformance/test_conformance.py",
    "-k",
    "not test_conforms or (mirrored_2 or pipeline_2 or sharded_3 or tensor_1x2) and "
    "(models or optimizers) and not double and not horovod",
]


class Environment(NamedTuple):
    """A Python with pinned packages.

    Attributes:
        name: as in `--only`, for example `newest-3.13`.
        python: path of the interpreter.
        pins: versions by package, as after `==`.
    """

    name: str
    python: Path
    pins: dict[str, str]

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def make(self, wheel: Path) -> None:
        """Install the wheel with its CPU and development extras; what is there is kept."""
        if not self.folder.exists():
            _run(UV, "venv", "--quiet", "--python", self.python, self.folder)
        install = [UV, "pip", "install", "--quiet", "--python", self.folder / "bin/python"]
        pins = [f"{package}=={version}" for package, version in self.pins.items()]
        _run(*install, f"{wheel}[cpu,dev]", *pins)
        _run(*install, "--no-deps", "--requirement", ROOT / "requirements/digits.txt")

    def test(self, tests: list[str]) -> str:
        """Run pytest; the last line of what it says."""
        environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
        command = [self.folder / "bin/python", "-m", "pytest", "-q", "--durations=0", *tests]
        ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        if ran.returncode:
            print(ran.stdout)
        status = "passed" if ran.returncode == 0 else "FAILED"
        return f"{status}: {ran.stdout.strip().splitlines()[-1]}"

    def versions(self) -> str:
        """What is really installed."""
        code = (
            "import platform; from importlib.metadata import version as v;"
            "print(platform.python_version(), v('tensorflow-cpu'), v('keras'), v('numpy'))"
        )
        return subprocess.check_output([self.folder / "bin/python", "-c", code], text=True).strip()


def find_python(version: str) -> Path | None:
    """An interpreter of this version, on PATH or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    for python in [on_path, *sorted(pyenv.glob(f"{version}.*/bin/python"))]:
        if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return Path(python)
    return None


def environments() -> list[Environment]:
    """Each end of what is supported, on each Python found."""
    found = []
    for version in PYTHONS:
        python = find_python(version)
        if python is None:
            print(f"not run: Python {version} is not on PATH")
            continue
        for end, pins in PINS.items():
            pins_here = {**pins, **PINS_OF_PYTHON.get(version, {})}
            found.append(Environment(f"{end}-{version}", python, pins_here))
    return found


def _run(*command: str | Path) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one environment, as in newest-3.13")
    options, tests = parser.parse_known_args()
    chosen = [e for e in environments() if options.only in (None, e.name)]
    if not chosen:
        parser.error(f"--only expects one of {[e.name for e in environments()]}.")
    _run(UV, "build", "--quiet", "--wheel", "--out-dir", FOLDER / "wheel", ROOT)
    wheel = max((FOLDER / "wheel").glob("*.whl"), key=os.path.getmtime)
    results = []
    for environment in chosen:
        environment.make(wheel)
        result = environment.test(tests or TESTS)
        results.append(f"{environment.name:12} ({environment.versions()})  {result}")
        print(results[-1], flush=True)
    print("\nPython, TensorFlow, Keras, numpy:", *results, sep="\n")
    return any("FAILED" in result for result in results)


if __name__ == "__main__":
    sys.exit(main())
