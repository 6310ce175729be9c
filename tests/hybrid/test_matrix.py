"""Meshes, optimizers, models, batches, ways to run and to keep: any two together, each cell exact.

Three cells by default, all with `--everything`.
"""

import itertools

import pytest

from tests.helpers import assert_same_training
from tests.hybrid.matrix import (
    CELLS,
    CELLS_THAT_KEEP,
    FACTORS,
    atol_of,
    candidate,
    parts_of_batch,
    reference,
)

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


def check(cell):
    mesh, optimizer, model, batch, *_ = cell
    parts = parts_of_batch(mesh) if model == "batch norm" else None
    expected = reference(optimizer, model, batch, parts)
    assert_same_training(expected, candidate(*cell), atol=atol_of(model))
