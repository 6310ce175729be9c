"""A slice of `benchmarks/kills.py`: lives that are killed again and again, exact to the bit."""

import pytest

from benchmarks import kills

pytestmark = pytest.mark.turns


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["cnn/one_device", pytest.param("gan/multi_worker", marks=pytest.mark.long)]
)
def test_a_life_of_kills_ends_as_the_undisturbed_one(tmp_path, name):
    campaign = kills.run([name], kills=3, seed=3, folder=tmp_path, minutes=4)
    tally = campaign.tallies[name]
    assert tally.num_kills >= 3
    assert not tally.different
