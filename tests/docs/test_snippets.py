"""Every snippet of README and docs runs as it is shown, or says what it needs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.docs.snippets import snippets


def build_model() -> keras.Model:
    """Four layers, so that a pipeline of four stages has one each."""
    hidden = [keras.layers.Dense(10, activation="tanh") for _ in range(3)]
    last = keras.layers.Dense(10, activation="softmax")
    return keras.Sequential([keras.Input((32,)), *hidden, last])


def reader() -> dict:
    """What the reader of a page has: a model under a strategy, data, and the usual imports."""
    x = np.random.default_rng(0).normal(size=(128, 32)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, 128)
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(10)])
        model.compile("adam", loss, metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
    return {
        "json": json,
        "os": os,
        "layers": keras.layers,
        "ops": keras.ops,
        "build_model": build_model,
        "load_all_data": lambda: (x, y),
        "loss_function": loss,
        "optimizer": model.optimizer,
        "keras": keras,
        "np": np,
        "tf": tf,
        "tfparallel": tfparallel,
        "x": x,
        "y": y,
        "strategy": strategy,
        "model": model,
        "dataset": dataset,
    }


def run_pasted(code: str, folder: Path) -> None:
    """Runs a script as whoever pastes it does: nothing is imported, nothing is set."""
    script = folder / "pasted.py"
    script.write_text(code)
    command = [sys.executable, script.name]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "num_replicas=2" in ran.stderr


@pytest.fixture
def _keras_as_it_was():
    """A page turns on what Keras lacks for a whole process: the next test has it off again."""
    yield
    tfparallel.keras_distribution.disable()


@pytest.mark.usefixtures("_keras_as_it_was")
@pytest.mark.parametrize("snippet", snippets(), ids=lambda snippet: snippet.name)
def test_snippet(snippet, tmp_path, monkeypatch):
    # A laptop has no GPU: its logical CPUs stand for them.
    code = compile(re.sub("(?i)gpu:", "CPU:", snippet.code), snippet.name, "exec")
    if snippet.needs == "a process of its own":
        run_pasted(snippet.code, tmp_path)
        return
    if snippet.needs is not None:
        pytest.skip(f"needs {snippet.needs}")
    monkeypatch.chdir(tmp_path)
    exec(code, reader())


def test_snippets_are_found():
    assert len(snippets()) > 30
