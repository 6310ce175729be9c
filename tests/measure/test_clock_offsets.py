"""Offsets of clocks, of announcements between clocks that are wrong by a known amount."""

import random

import pytest

from tfparallel.measure.clock_offsets import offsets


def exchange(ahead_s, delays, rounds=8, seed=0):
    """Ranks whose clocks are so much ahead, over links of such delays."""
    rng, now = random.Random(seed), 1000.0
    announced, seen = [], []
    for _ in range(rounds):
        puts = [now + rng.uniform(0, 0.02) for _ in ahead_s]
        gots = [max(puts) + rng.uniform(*delays) for _ in ahead_s]
        announced.append([put + ahead for put, ahead in zip(puts, ahead_s, strict=True)])
        seen.append([got + ahead for got, ahead in zip(gots, ahead_s, strict=True)])
        now = max(gots)
    return announced, seen


@pytest.mark.parametrize("seed", range(20))
def test_the_offset_is_within_its_error(seed):
    ahead_s = (0.0, 3.5, -0.25)
    found = offsets(*exchange(ahead_s, (0.001, 0.03), seed=seed), hosts=("a", "b", "c"))
    assert found[0] == (0.0, 0.0)
    for own, ahead in zip(found, ahead_s, strict=True):
        assert abs(own.seconds - ahead) <= own.error_s + 1e-9
        assert own.error_s < 0.03


def test_processes_of_one_host_read_one_clock():
    assert offsets(*exchange((0.0, 0.0), (0.001, 0.002)), hosts=("a", "a"))[1] == (0.0, 0.0)


def test_a_clock_that_was_set_meanwhile():
    announced, seen = exchange((0.0, 1.0), (0.001, 0.002))
    announced[4:] = [[own, other + 5.0] for own, other in announced[4:]]
    seen[4:] = [[own, other + 5.0] for own, other in seen[4:]]
    with pytest.raises(ValueError, match="was set"):
        offsets(announced, seen, hosts=("a", "b"))
