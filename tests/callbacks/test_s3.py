"""The tests of two jobs in one folder, on an S3 that runs here."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("s3fs", "moto[server]")  # 60 packages with what they need: not worth it in each setup


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tests_of_two_jobs_pass_on_s3(tmp_path):
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv, which installs s3fs and moto for this test, is not installed")
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", tmp_path]
    subprocess.run([*install, f"numpy=={np.__version__}", *PACKAGES], check=True)
    tests = ["-n", "0", "-k", "s3://", "tests/callbacks/test_two_jobs.py"]
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
