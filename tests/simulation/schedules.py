"""The scenarios, and what runs one schedule of them."""

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

from tests.simulation import backups, launcher, rings, servers, stores, workers
from tests.simulation.choices import Choices, shrunk
from tests.simulation.fit import played_keras
from tests.simulation.world import World

SCENARIOS: dict[str, Callable[[Choices], World]] = {
    "backups": backups.run,
    "launcher": launcher.run,
    "rings": rings.run,
    "servers": servers.run,
    "stores": stores.run,
    "workers": workers.run,
}


@dataclass(frozen=True)
class Failure:
    """A schedule in which something happened that must never happen.

    Attributes:
        scenario, seed: which.
        what: in words.
        numbers: what was drawn.
    """

    scenario: str
    seed: int
    what: str
    numbers: tuple[int, ...]


def failure_of(scenario: str, seed: int, given: Sequence[int] | None = None) -> Failure | None:
    """Runs one schedule.

    Args:
        scenario: of `SCENARIOS`.
        seed: draws it.
        given: numbers to repeat instead.
    """
    choices = Choices(seed, given)
    logger = logging.getLogger("tensorflow")
    was = logger.disabled
    logger.disabled = True
    try:
        with played_keras():
            SCENARIOS[scenario](choices)
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{text} ({where.name}, line {where.lineno})"
        return Failure(scenario, seed, what, tuple(choices.made))
    finally:
        logger.disabled = was
    return None


def told(failure: Failure) -> list[str]:
    """What happened in a schedule, line by line."""
    logs: list[list[str]] = []
    begin = World.__init__

    def noting(world: World, *arguments: object, **options: object) -> None:
        begin(world, *arguments, **options)  # type: ignore[arg-type]
        world.is_told = True
        logs.append(world.log)

    with mock.patch.object(World, "__init__", noting):
        failure_of(failure.scenario, failure.seed, failure.numbers)
    return [*logs[-1], failure.what]


def shortest(failure: Failure, most_tries: int = 300) -> Failure:
    """The same failure, of fewer faults."""
    kind = failure.what.split(" ")[0]

    def fails(numbers: Sequence[int]) -> bool:
        found = failure_of(failure.scenario, failure.seed, numbers)
        return found is not None and found.what.split(" ")[0] == kind

    numbers = shrunk(failure.numbers, fails, most_tries)
    return failure_of(failure.scenario, failure.seed, numbers) or failure
