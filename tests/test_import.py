"""What `import tfparallel` does and does not do."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfparallel

API = Path(__file__).parents[1] / "docs" / "api.md"


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_every_public_name_exists():
    pytest.importorskip("horovod.tensorflow")
    for name in tfparallel.__all__:
        assert getattr(tfparallel, name) is not None
        assert name in dir(tfparallel)


def test_the_table_of_names_is_what_type_checkers_and_readers_are_told():
    table = {*tfparallel._MODULES, *tfparallel._NAMESPACES}
    assert sorted(table | {"__version__"}) == sorted(tfparallel.__all__)
    tree = ast.parse(Path(tfparallel.__file__).read_text())
    told = next(x for x in tree.body if isinstance(x, ast.If) and isinstance(x.test, ast.Name))
    typed = {alias.name: node.module for node in told.body for alias in node.names}
    assert {name: module for name, module in typed.items() if name in tfparallel._MODULES} == (
        tfparallel._MODULES
    )
    listed = re.findall(r"^::: tfparallel\.(\w+)$", API.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(tfparallel._MODULES)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="NoSuchStrategy"):
        tfparallel.NoSuchStrategy  # noqa: B018


def test_importing_it_does_not_start_tensorflow():
    ran = run_python("import sys, tfparallel; assert 'tensorflow' not in sys.modules")
    assert ran.returncode == 0, ran.stderr


def test_the_command_line_works_without_tensorflow(tmp_path):
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "from tfparallel.launch.cli import main; sys.exit(main({!r}))"
    )
    assert run_python(code.format(["--version"])).stdout == f"tfparallel {tfparallel.__version__}\n"
    assert "launch" in run_python(code.format(["--help"])).stdout
    ran = run_python(code.format(["backups", "list", str(tmp_path)]))
    assert (ran.returncode, "Received: none" in ran.stderr) == (2, True), ran.stderr


def test_without_tensorflow_the_error_names_the_extras():
    ran = run_python(
        "import sys; sys.modules['tensorflow'] = None\n"
        "import tfparallel; tfparallel.MirroredStrategy"
    )
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError")
    for extra in ("tfparallel[cpu]", "tfparallel[gpu]", "tfparallel[tpu]"):
        assert extra in last


def test_another_keras_backend_is_refused():
    ran = run_python(
        "import keras, tfparallel; keras.backend.backend = lambda: 'jax'\n"
        "tfparallel.MirroredStrategy"
    )
    assert "ImportError" in ran.stderr, ran.stderr
    assert "KERAS_BACKEND=tensorflow" in ran.stderr
