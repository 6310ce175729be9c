"""For every device of a pipeline, its actions in order, and what each of them waits for."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tfparallel.pipeline.plans.action import Action


@dataclass(frozen=True)
class Orders:
    """For every device of a pipeline, its actions in order.

    They say nothing of time: a device starts its next action as soon as it is done with
    the one before and has what the action depends on.

    Attributes:
        name: what messages call it.
        orders: one sequence of actions (or of plain `(stage, microbatch, kind)`) per device.
    """

    name: str
    orders: Sequence[Sequence[Action]]

    def __post_init__(self) -> None:
        orders = tuple(tuple(Action(*action) for action in order) for order in self.orders)
        object.__setattr__(self, "orders", orders)

    @property
    def num_devices(self) -> int:
        return len(self.orders)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max(action.stage for action in self.actions)

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max(action.microbatch for action in self.actions)

    @cached_property
    def device_of(self) -> dict[int, int]:
        """The device of every stage."""
        return {
            action.stage: device for device, order in enumerate(self.orders) for action in order
        }

    def device_that_runs(self, action: Action) -> int:
        """The device of an action's stage."""
        return self.device_of[action.stage]

    @cached_property
    def actions(self) -> frozenset[Action]:
        """All actions of all devices."""
        return frozenset(action for order in self.orders for action in order)

    def dependencies(self, action: Action) -> tuple[Action, ...]:
        """Return what must be done before `action`, on any device."""
        stage, microbatch, kind = action
        if kind == "forward":
            return (Action(stage - 1, microbatch, "forward"),) if stage else ()
        if kind == "backward_weight":
            return (Action(stage, microbatch, "backward_input"),)
        forward = Action(stage, microbatch, "forward")
        if stage == self.num_stages - 1:
            return (forward,)
        half = Action(stage + 1, microbatch, "backward_input")
        whole = Action(stage + 1, microbatch, "backward")
        return (forward, half if half in self.actions else whole)

    def steps(self) -> Iterator[Action]:
        """Yield every action of every device once, each after all that it depends on.

        The devices take turns, as if all actions took equally long.

        Raises:
            ValueError: when every device waits for another one, naming what each waits for.
        """
        done: set[Action] = set()
        waiting = [deque(order) for order in self.orders]
        while any(waiting):
            ready = [
                order for order in waiting if order and done.issuperset(self.dependencies(order[0]))
            ]
            if not ready:
                raise ValueError(self._describe_deadlock([o[0] for o in waiting if o], done))
            for order in ready:
                action = order.popleft()
                done.add(action)
                yield action

    def _describe_deadlock(self, heads: Sequence[Action], done: set[Action]) -> str:
        waits = []
        for action in heads:
            missing = [needed for needed in self.dependencies(action) if needed not in done]
            waits.append(
                f"device {self.device_that_runs(action)} is at {action}, which needs "
                + " and ".join(f"{m} (device {self.device_of.get(m.stage)})" for m in missing)
            )
        return (
            f"The devices of schedule {self.name!r} must not wait for one another in a circle. "
            f"Received: {'; '.join(waits)}. Move one of these actions behind what it needs."
        )
