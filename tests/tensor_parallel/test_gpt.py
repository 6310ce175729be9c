"""`layout="auto"` has nearly all products of named models in parts; the example trains."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from keras import layers

import tfparallel
from tests.tensor_parallel import test_training
from tests.tensor_parallel.layouts import cpu_mesh

EXAMPLES = Path(__file__).parents[2] / "examples"
IN_PARTS = re.compile(r"([\d.]+)% of the products are in parts")


def _mlp():
    widths = (64, 256, 64, 256, 64)
    hidden = [layers.Dense(width, "gelu", name=f"dense{i}") for i, width in enumerate(widths)]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])


@pytest.mark.parametrize(
    "make, parts", [(test_training._transformer, 2), (test_training._transformer, 3), (_mlp, 4)]
)
def test_nearly_all_products_are_in_parts(make, parts):
    strategy = tfparallel.TensorParallelStrategy("auto", device_mesh=cpu_mesh(1, parts))
    with strategy.scope():
        model = make()
    (share,) = IN_PARTS.findall(str(strategy.summary(model)))
    assert float(share) >= 90


def _printed_by_example(*options):
    command = [sys.executable, EXAMPLES / "tensor_parallel_gpt.py", "--quick", *options]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=540, check=True
    ).stdout
    return printed, float(re.findall(r"^loss ([\d.]+)", printed, re.M)[0])


@pytest.mark.long
@pytest.mark.parametrize("options", [["--parts", "2"], ["--parts", "2", "--replicas", "2"]])
def test_the_example_trains_as_one_device_does(options):
    printed, loss = _printed_by_example(*options)
    _, of_one_device = _printed_by_example("--parts", "1")
    assert loss == pytest.approx(of_one_device, abs=2e-5)
    assert float(IN_PARTS.findall(printed)[0]) >= 90
