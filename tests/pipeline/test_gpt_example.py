"""The example of a pipeline runs as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_gpt.py"
TIMEOUT_S = 300.0


def test_the_quick_example_trains_and_writes():
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--quick", "--microbatches", "2", "--schedule", "zero_bubble"],
        capture_output=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "TF_NUM_INTEROP_THREADS": "8"},
    )
    output = run.stdout.decode("ascii", "replace")
    assert run.returncode == 0, run.stderr.decode()[-3000:]
    assert "Stages of model 'gpt'" in output and "zero_bubble: " in output
    loss = float(re.search(r"^loss ([\d.]+)$", output, re.MULTILINE)[1])
    assert loss < 4.8  # nats; that of equal odds is log(128) = 4.85
    assert len(output.partition("\ndef ")[2].rstrip("\n")) >= 30
