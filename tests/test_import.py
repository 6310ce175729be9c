"""What `import tfparallel` does and does not do."""

import subprocess
import sys

import pytest

import tfparallel


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_every_public_name_exists():
    for name in tfparallel.__all__:
        assert getattr(tfparallel, name) is not None
        assert name in dir(tfparallel)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="NoSuchStrategy"):
        tfparallel.NoSuchStrategy  # noqa: B018


def test_importing_it_does_not_start_tensorflow():
    ran = run_python("import sys, tfparallel; assert 'tensorflow' not in sys.modules")
    assert ran.returncode == 0, ran.stderr


def test_without_tensorflow_the_error_names_the_extras():
    ran = run_python("import sys; sys.modules['tensorflow'] = None; import tfparallel")
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
