"""Where the wall time of an epoch went: categories that sum to it, by construction and by check.

    wall     |------------------------------ epoch ------------------------------|
    steps    |input|.......... a step's graph ..........|callbacks|   validation
    graph          |host|compute|communication|imbalance|bubble|tracing

What is measured is taken out first; what a step's graph does beside it is compute, and what is
outside of steps and named by nothing is host (Keras between two steps).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

CATEGORIES = (
    "input",
    "compute",
    "communication",
    "bubble",
    "imbalance",
    "host",
    "saving",
    "tracing",
    "validation",
)


@dataclass
class Spent:
    """Seconds that were measured within one epoch, or one training, of one process.

    Attributes:
        wall_s: from the beginning to the end.
        steps_s: within steps: from when Keras has its iterator to when it asks for the next step.
        input_s: of it, waiting at the iterator.
        iterators_s: making iterators, and letting them go, outside of steps.
        python_s: of the steps, what the main thread computed in steps that traced nothing.
        tracing_s: what those that did took longer.
        linked_s: of the steps, when they had nothing to do but wait for collectives.
        waited_s: of that, until the neighbour had come to the same collective.
        callbacks_s: by name, in the steps.
        outside_s: callbacks by name, outside of the steps.
        validation_s: outside of the steps.
    """

    wall_s: float = 0.0
    steps_s: float = 0.0
    input_s: float = 0.0
    iterators_s: float = 0.0
    python_s: float = 0.0
    tracing_s: float = 0.0
    linked_s: float = 0.0
    waited_s: float = 0.0
    callbacks_s: dict[str, float] = field(default_factory=dict)
    outside_s: dict[str, float] = field(default_factory=dict)
    validation_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What a schedule leaves idle, of the time of a step's graph; zeros where there is none.

    Attributes:
        bubble: with stages of equal time.
        imbalance: what it is more, with stages as they are.
        slowest: the name of the slowest stage.
        utilisation: of each device, by name.
    """

    bubble: float = 0.0
    imbalance: float = 0.0
    slowest: str = ""
    utilisation: Mapping[str, float] = field(default_factory=dict)


NO_PLAN = Plan()


def seconds_by_category(
    spent: Spent, saving: frozenset[str], plan: Plan = NO_PLAN, behind_s: float = 0.0
) -> dict[str, float]:
    """Seconds of each of `CATEGORIES`; they sum to `wall_s`.

    Args:
        spent: what was measured.
        saving: the names of callbacks that save.
        plan: of a pipeline.
        behind_s: how much longer the slowest rank computed than this one: at least so much of the
            time in collectives was waiting for it, also where another rank was in between.
    """
    in_steps = sum(spent.callbacks_s.values())
    graph_s = max(0.0, spent.steps_s - in_steps)
    left = _Left(graph_s)
    input_s = left.take(spent.input_s) + spent.iterators_s
    tracing_s = left.take(spent.tracing_s)
    waited_s = min(max(spent.waited_s, behind_s), spent.linked_s)
    imbalance_s = left.take(waited_s)
    communication_s = left.take(spent.linked_s - waited_s)
    python_s = left.take(spent.python_s)
    bubble_s = left.seconds * plan.bubble
    uneven_s = left.seconds * plan.imbalance
    compute_s = left.seconds - bubble_s - uneven_s
    saving_s = sum(_of(saving, spent.callbacks_s)) + sum(_of(saving, spent.outside_s))
    known = graph_s + spent.iterators_s + saving_s + spent.validation_s
    return {
        "input": input_s,
        "compute": compute_s,
        "communication": communication_s,
        "bubble": bubble_s,
        "imbalance": imbalance_s + uneven_s,
        "host": python_s + max(0.0, spent.wall_s - known),
        "saving": saving_s,
        "tracing": tracing_s,
        "validation": spent.validation_s,
    }


class _Left:
    """A time, of which parts are taken until nothing is left."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def take(self, seconds: float) -> float:
        taken = min(max(0.0, seconds), self.seconds)
        self.seconds -= taken
        return taken


def _of(names: frozenset[str], seconds: Mapping[str, float]) -> list[float]:
    return [value for name, value in seconds.items() if name in names]
