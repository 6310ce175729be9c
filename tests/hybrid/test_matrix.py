"""Meshes, optimizers, models, batches, ways to run and to keep: any two together, each cell exact.

Three cells by default, all with `--everything`.
"""

import itertools

import numpy as np
import pytest

from tests.helpers import assert_same_training
from tests.hybrid import models_of_matrix
from tests.hybrid.matrix import (
    CELLS,
    CELLS_OF_EIGHT,
    CELLS_OF_SEVERAL,
    CELLS_THAT_KEEP,
    FACTORS,
    OPTIMIZERS,
    check,
    reference,
)

pytestmark = pytest.mark.turns

EVERY = 111  # of which cell one is asked by default


def test_any_two_values_come_together():
    for (i, a), (j, b) in itertools.combinations(enumerate(FACTORS.values()), 2):
        wanted = set(itertools.product(a, b))
        assert {(cell[i], cell[j]) for cell in CELLS} == wanted
    assert len(CELLS) >= 250


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, marks=[] if i % EVERY == 0 else pytest.mark.long)
        for i, c in enumerate(CELLS)
    ],
    ids="; ".join,
)
def test_a_cell_trains_as_one_device_does(cell):
    check(cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS_THAT_KEEP, ids="; ".join)
def test_so_does_one_whose_weights_are_kept_whole(cell):
    check(cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS_OF_SEVERAL, ids="; ".join)
def test_so_does_one_whose_stages_have_several_devices(cell):
    check(cell)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS_OF_EIGHT, ids="; ".join)
def test_so_does_one_of_three_axes(of_eight, cell):
    of_eight.ask({"on_mesh": cell}, timeout_s=570)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounding_is_not_amplified_behind_parts_of_one_row(monkeypatch, optimizer):
    """One device beside itself, with weights that are moved by an ulp of 1.

    With offsets of BatchNorm that begin at zero Adafactor divided gradients of 1e-9 by their like:
    weights were 6e-3 apart here, and 2e-2 in a cell of one-row parts.
    """
    of_one_row = optimizer, "batch norm", "fewer rows than replicas", 6
    expected = reference(*of_one_row)
    monkeypatch.setitem(models_of_matrix.MODELS, "batch norm", _moved_by_an_ulp)
    moved = reference.__wrapped__(*of_one_row)
    same = {name for name in expected if "accuracy" not in name}  # of rows whose best two are near
    assert_same_training(
        {name: expected[name] for name in same}, {name: moved[name] for name in same}, atol=1e-5
    )


def _moved_by_an_ulp(parts, synchronized):
    model = models_of_matrix.normalized(parts, synchronized)
    random = np.random.default_rng(1)
    # Biases stay zero: Lamb takes another way for a weight of norm 0.
    for weight in [x for x in model.trainable_weights if not x.path.endswith("bias")]:
        ulp = np.finfo(weight.dtype).eps
        weight.assign(weight.numpy() + ulp * random.choice([-1, 1], weight.shape))
    return model
