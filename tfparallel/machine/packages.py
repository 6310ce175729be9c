"""Installed packages: versions, wheels that overwrite one another, what is known to be broken."""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tfparallel.machine.finding import Finding

# Wheels that put files at the same places: the one that was installed last wins, in part.
CLASHES = (
    (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-tpu",
        "tensorflow-gpu",
        "tensorflow-intel",
        "tensorflow-rocm",
        "tf-nightly",
        "tf-nightly-cpu",
    ),
    ("keras", "keras-nightly"),
)
# Versions that tfparallel does not work with, and why. `internals.supported` says which it does.
KNOWN_BAD: Mapping[str, tuple[tuple[str, str], ...]] = {
    "tensorflow": (("<2.20", "tfparallel needs 2.20 or 2.21"), (">=2.22.dev0", "not tried yet")),
    "tensorflow-tpu": (("<2.20", "tfparallel needs 2.20"),),
    "keras": (
        ("<3", "Keras 2 has no backend that tfparallel distributes"),
        (">=3,<3.12", "tfparallel needs 3.12 to 3.15"),
        (">=3.16.dev0", "not tried yet"),
    ),
    "numpy": (("<1.26", "tfparallel needs 1.26 or newer"),),
    "horovod": (("<0.28", "has no process sets for these versions of TensorFlow"),),
}
_FOR_TPU = "tensorflow-tpu"
_SHOWN = ("keras", "numpy", "protobuf", "horovod", "tfparallel")
_IMPORT = "import tensorflow as tf, keras; print(tf.__version__, keras.__version__)"


def installed() -> dict[str, str]:
    """The version of each package that Python finds here, by its normal name."""
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        if name := each.metadata["Name"]:
            found.setdefault(canonicalize_name(name), each.version)
    return found


def check_clashes(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Wheels that must not be installed side by side.

    Args:
        versions: by package, as of `installed`.
    """
    for family in CLASHES:
        own = [f"{name} {versions[name]}" for name in family if name in versions]
        if len(own) > 1:
            names = " ".join(each.split()[0] for each in own)
            yield Finding(
                "wheels",
                "problem",
                f"{' and '.join(own)} overwrite one another's files",
                f"pip uninstall {names}; then install the one that this machine needs",
            )
        elif own:
            yield Finding("wheels", "ok", own[0])
    if not any(name in versions for name in CLASHES[0]):
        yield Finding("wheels", "problem", "no TensorFlow", "pip install 'tfparallel[cpu]'")


def check_tpu_packages(versions: Mapping[str, str]) -> Iterator[Finding]:
    """What a TPU needs: TensorFlow's wheel for it, alone.

    Args:
        versions: by package, as of `installed`.
    """
    own = [name for name in CLASHES[0] if name in versions]
    if own == [_FOR_TPU]:
        yield Finding("wheels for TPUs", "ok", f"{_FOR_TPU} {versions[_FOR_TPU]}")
        return
    named = " and ".join(f"{name} {versions[name]}" for name in own) or "no TensorFlow"
    others = f"pip uninstall {' '.join(own)}; " if own else ""
    wrong = "whose files overwrite one another" if len(own) > 1 else "which knows no TPU"
    found = f"{named}, {wrong}" if own else named
    install = "pip install 'tfparallel[tpu]'"
    yield Finding("wheels for TPUs", "problem", found, f"{others}{install}")


def check_versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Versions that are known to be wrong; those that matter are shown."""
    bad = list(_known_bad(versions))
    yield from bad
    if not bad:
        shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions)
        python = ".".join(map(str, sys.version_info[:3]))
        yield Finding("versions", "ok", f"Python {python}, {shown}")


def _known_bad(versions: Mapping[str, str]) -> Iterator[Finding]:
    for name, version in versions.items():
        family = "tensorflow" if name in CLASHES[0] and name not in KNOWN_BAD else name
        for specifier, why in KNOWN_BAD.get(family, ()):
            if SpecifierSet(specifier, prereleases=True).contains(version):
                yield Finding(
                    "versions",
                    "problem",
                    f"{name} {version}: {why}",
                    f"pip install --upgrade {name}",
                )


def check_requirements(versions: Mapping[str, str]) -> Iterator[Finding]:
    """What TensorFlow and Keras themselves ask for, as `pip check` does, for those two only."""
    missing = [
        text
        for name in ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "keras")
        if name in versions
        for text in _unmet(name, versions)
    ]
    for text in missing:
        yield Finding("requirements", "warning", text, "pip check; then install what it names")
    if not missing:
        yield Finding("requirements", "ok", "those of TensorFlow and Keras are met")


def _unmet(name: str, versions: Mapping[str, str]) -> Iterator[str]:
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = versions.get(canonicalize_name(requirement.name))
        if version is None:
            yield f"{name} asks for {requirement.name}, which is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{name} asks for {requirement}, {version} is installed"


def check_import(limit_s: float = 120.0) -> Iterator[Finding]:
    """Whether TensorFlow and Keras can be imported, in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "import",
            "problem",
            f"no end of importing TensorFlow after {limit_s:g} s",
            "see the disk",
        )
        return
    if done.returncode == 0:
        yield Finding("import", "ok", f"TensorFlow and Keras {done.stdout.split()[-1]} import")
        return
    why = last_error(done.stderr) or f"exit status {done.returncode}"
    yield Finding("import", "problem", why, "reinstall TensorFlow in a fresh virtual environment")


def last_error(stderr: str) -> str:
    """The last line of a traceback that names an error."""
    named = [line for line in stderr.splitlines() if re.match(r"^[\w.]*(Error|Exception)\b", line)]
    return named[-1] if named else stderr.strip()[-200:]
