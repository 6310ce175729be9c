"""Of pipelines beside one another the first updates for all, whatever other axes divide."""

import pytest

from tests.hybrid.meshes import hybrid
from tests.hybrid.updates_once import CELLS
from tests.pipeline.test_operations_of_a_step import dense, num_operations

pytestmark = pytest.mark.turns

EVERY = 30  # of which cell one is asked by default


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, marks=[] if i % EVERY == EVERY - 1 else pytest.mark.long)
        for i, c in enumerate(CELLS)
    ],
    ids="; ".join,
)
def test_all_copies_are_trained_as_by_one_device_and_one_has_slots(of_eight, cell):
    of_eight.ask({"updated_once": cell}, timeout_s=570)


@pytest.mark.parametrize("axis", ["model", "shard"])
def test_parts_beside_one_another_are_written_down_as_one_update(axis):
    options = {"pipeline": 1, axis: 2}
    partition = [["pool", "dense_[0-7]"]]
    one, two = (
        num_operations(hybrid({"data": n, **options}, partition=partition), dense, "adam", rows=8)
        for n in (1, 2)
    )
    assert two <= 1.3 * one
