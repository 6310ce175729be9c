"""The example of a pipeline runs as its first lines say, and trains as one device does."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.helpers import assert_same_training, train
from tfparallel import PipelineStrategy

pytestmark = pytest.mark.turns

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


def test_its_model_trains_as_on_one_device():
    shared = EXAMPLE.with_name("small_gpt.py")
    spec = importlib.util.spec_from_file_location("small_gpt", shared)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    text = np.frombuffer(EXAMPLE.read_bytes(), np.uint8)
    options = {
        "build": lambda: example.build_gpt(16, 2),
        "compile_options": lambda: {
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        },
        "data": lambda rows: example.windows(text, rows),
        "rows": 15,
        "batch_size": 5,
        "epochs": 1,
    }
    strategy = PipelineStrategy(["CPU:0", "CPU:1"], 2, rematerialize="full")
    assert_same_training(train(None, **options), train(strategy, **options))
