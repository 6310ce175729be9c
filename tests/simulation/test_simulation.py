"""Two thousand schedules of each day; `make simulate` runs others until it is told to stop."""

import pytest

from tests.simulation.choices import Choices, shrunk
from tests.simulation.fit import Truth, played_keras
from tests.simulation.schedules import SCENARIOS, failure_of, shortest, told
from tests.simulation.world import Violation, World

pytestmark = pytest.mark.turns

SCHEDULES, PARTS = 2000, 20


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_and_nothing_hangs(part):
    size = -(-SCHEDULES // PARTS // len(SCENARIOS))  # rounded up
    for scenario in SCENARIOS:
        for seed in range(part * size, (part + 1) * size):
            failure = failure_of(scenario, seed)
            assert failure is None, "\n".join(told(shortest(failure)))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_schedule_is_determined_by_its_seed_and_by_its_numbers(scenario):
    with played_keras():
        first, again = Choices(5), Choices(5)
        worlds = [SCENARIOS[scenario](first)]
    with played_keras():
        worlds.append(SCENARIOS[scenario](again))
    with played_keras():
        worlds.append(SCENARIOS[scenario](Choices(given=first.made)))
    assert first.made == again.made
    assert len({world.now_s for world in worlds}) == 1 and worlds[0].now_s > 0
    assert worlds[0].log == worlds[1].log == worlds[2].log


def test_shrinking_leaves_what_the_failure_needs():
    numbers = [0, 3, 0, 7, 1, 1, 0, 2, 5, 9, 0, 4]
    assert shrunk(numbers, lambda given: 7 in given and 9 in given) == [7, 9]


@pytest.mark.parametrize("scenario", ["backups", "stores", "workers"])
def test_trainings_really_go_on_from_backups(scenario, monkeypatch):
    """What is played may have fallen behind what the package's code asks for."""
    seen, resumed = [], Truth.resumed

    def noted(truth, num_steps, *arguments):
        seen.append(num_steps)
        resumed(truth, num_steps, *arguments)

    monkeypatch.setattr(Truth, "resumed", noted)
    assert all(failure_of(scenario, seed) is None for seed in range(5))
    assert 0 in seen and max(seen) > 0


def test_a_mistake_in_what_is_played_is_a_violation():
    world = World(Choices(0))
    world.process("player", lambda process: process.no_such_name, "host")
    with pytest.raises(Violation, match="player is played wrongly"):
        world.run()
