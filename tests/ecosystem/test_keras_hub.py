"""The tests of KerasHub's models, with a KerasHub of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Without what it asks for beside these: its tensorflow-text would bring another TensorFlow.
PACKAGES = ("keras-hub==0.32.0", "regex", "tokenizers")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="this KerasHub needs Python 3.11")
def test_kerashub_s_models_train_as_on_one_device(tmp_path):
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv, which installs KerasHub for this test, is not installed")
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
    subprocess.run([*install, "--target", tmp_path, *PACKAGES], check=True)
    tests = ["-n", "0", "tests/ecosystem/keras_hub_models.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    summary = ran.stdout.splitlines()[-1]
    assert ran.returncode == 0 and "passed" in summary, ran.stdout[-4000:]
    assert "skipped" not in summary, ran.stdout[-4000:]
