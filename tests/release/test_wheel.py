"""A wheel and a source distribution, built as for a release, in a clean environment."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tfparallel.version import __version__

ROOT = Path(__file__).parents[2]

# What each example's first lines show, made short where an option for that exists. `elastic.py` is
# not among them: it runs under `horovodrun`, and no wheel of Horovod fits a clean environment.
# `tests/horovod/test_elastic.py` runs it in the environment for which Horovod was compiled.
EXAMPLES = [
    ["python", "mnist.py", "--strategy", "mirrored", "--set", "training.epochs=1"],
    ["python", "mnist.py", "--config", "../configs/pipeline.yaml", "--set", "training.epochs=1"],
    ["python", "sharded.py", "--width", "64"],
    ["python", "sharded_gpt.py", "--quick"],
    ["python", "pipeline_gpt.py", "--quick"],
    ["python", "hybrid_gpt.py", "--quick"],
    ["python", "tensor_parallel_gpt.py", "--quick"],
    ["python", "contrastive.py", "--strategy", "mirrored"],
    ["python", "backup_and_restore.py"],
    ["python", "preemption.py"],
    ["python", "demo.py"],
    ["tfparallel", "launch", "--standalone", "--workers", "2", "mnist.py",
     "--strategy", "multi_worker_mirrored", "--set", "training.epochs=1"],
    ["tfparallel", "launch", "--standalone", "--workers", "2", "--ps", "1", "parameter_server.py"],
]  # fmt: skip


NOT_HERE = {"elastic.py", "small_gpt.py"}  # the second is what the others import


@pytest.mark.long
def test_all_examples_are_run():
    run_here = {word for command in EXAMPLES for word in command if word.endswith(".py")}
    assert run_here | NOT_HERE == {path.name for path in (ROOT / "examples").glob("*.py")}


def run(command: list, **options) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(command, capture_output=True, text=True, **{"env": env, **options})
    assert ran.returncode == 0, f"{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a wheel and a source distribution, made from what git would ship."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    unwanted = shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", ".*_cache",
                                      "__pycache__", "*.egg-info")  # fmt: skip
    shutil.copytree(ROOT, source, ignore=unwanted)
    run([sys.executable, "-m", "build", "--installer", "uv", "--outdir", folder, source])
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_source_distribution_holds_all_that_make_test_needs(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    wanted = set(tracked.splitlines()) - {".gitignore", ".ci/run"}
    assert wanted and wanted <= shipped, sorted(wanted - shipped)[:20]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(f"tfparallel-{__version__}.dist-info/METADATA").decode()
    modules = (ROOT / "tfparallel").rglob("*.py")
    expected = {path.relative_to(ROOT).as_posix() for path in modules}
    assert shipped == expected | {"tfparallel/py.typed"}
    assert "](docs/" not in metadata and "Description-Content-Type: text/markdown" in metadata


@pytest.fixture(scope="module")
def installed(built):
    """A fresh environment with the wheel and its CPU extra, beside the examples."""
    environment = built / "environment"
    run([sys.executable, "-m", "venv", environment])
    pip = [environment / "bin/python", "-m", "pip", "install", "--quiet"]
    constraints = ["--constraint", ROOT / "requirements/dev.txt"]
    wheel = next(built.glob("*.whl"))
    run([*pip, *constraints, f"{wheel}[cpu,plot]"])
    run([*pip, "--no-deps", "--requirement", ROOT / "requirements/digits.txt"])
    for folder in ("examples", "configs"):
        shutil.copytree(ROOT / folder, built / folder)
    return environment


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", EXAMPLES, ids=" ".join)
def test_example(installed, command):
    """Outside of the checkout, with the installed package, in an empty environment of variables."""
    path = f"{installed / 'bin'}:/usr/bin:/bin"
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    program, *arguments = command
    run([installed / "bin" / program, *arguments], cwd=installed.parent / "examples",
        env={**kept, "PATH": path}, timeout=3000)  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_is_the_installed_package_that_runs(installed):
    where = run([installed / "bin/python", "-c", "import tfparallel; print(tfparallel.__file__)"],
                cwd=installed.parent / "examples")  # fmt: skip
    assert Path(where.strip()).is_relative_to(installed)
