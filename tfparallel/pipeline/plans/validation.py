"""Whether a schedule can be carried out: each pass once, in an order that no device waits on."""

from collections import Counter
from itertools import product

from tfparallel.pipeline.plans.action import KINDS, Action, Kind
from tfparallel.pipeline.plans.schedule import Schedule

_WHOLE: Counter[Kind] = Counter(["backward"])
_HALVES: Counter[Kind] = Counter(["backward_input", "backward_weight"])


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that cannot be carried out.

    Every microbatch must pass each stage forward once and backward once (whole, or as its two
    halves), all passes of a stage must be on one device, and running each device's order must not
    end with all devices waiting.

    Raises:
        ValueError: at the first mistake, naming the action and its device.
    """
    _check_actions(schedule)
    _check_homes(schedule)
    counts = Counter(action for order in schedule.orders for action in order)
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.num_microbatches)):
        _check_passes(schedule, counts, stage, microbatch)
    _check_local_order(schedule)
    for _ in schedule.steps():  # raises when all devices wait
        pass


def _check_actions(schedule: Schedule) -> None:
    if not schedule.orders:
        raise ValueError(f"Schedule {schedule.name!r} must have a device. Received: no orders.")
    for device, order in enumerate(schedule.orders):
        if not order:
            raise ValueError(
                f"Every device of schedule {schedule.name!r} must have a stage. Received: no "
                f"actions for device {device}. Leave the device out, or give it a stage."
            )
        for action in order:
            if action.kind not in KINDS:
                raise ValueError(
                    f"The kind of an action must be one of {', '.join(KINDS)}. "
                    f"Received: {action} (device {device})."
                )
            if action.stage < 0 or action.microbatch < 0:
                raise ValueError(
                    "Stages and microbatches must be numbered from 0. "
                    f"Received: {action} (device {device})."
                )


def _check_homes(schedule: Schedule) -> None:
    """Check that each stage has a device, and only one."""
    homes: dict[int, int] = {}
    for device, order in enumerate(schedule.orders):
        for action in order:
            home = homes.setdefault(action.stage, device)
            if home != device:
                raise ValueError(
                    f"All actions of stage {action.stage} must be on one device, where its weights "
                    f"are: device {home}. Received: {action} on device {device}. Move it."
                )
    missing = [stage for stage in range(schedule.num_stages) if stage not in homes]
    if missing:
        raise ValueError(
            f"Stages must be numbered 0 to {schedule.num_stages - 1} without a gap. "
            f"Received: no action for stage {missing[0]}."
        )


def _check_passes(schedule: Schedule, counts: Counter[Action], stage: int, microbatch: int) -> None:
    """Check that one microbatch passes one stage once forward and once backward."""
    device = schedule.device_of[stage]
    forward = Action(stage, microbatch, "forward")
    if counts[forward] != 1:
        raise ValueError(
            f"Device {device} must run {forward} exactly once, as schedule {schedule.name!r} has "
            f"{schedule.num_stages} stages and {schedule.num_microbatches} microbatches. "
            f"Received: {counts[forward]} times."
        )
    backward = Counter({kind: counts[forward._replace(kind=kind)] for kind in [*_WHOLE, *_HALVES]})
    if backward not in (_WHOLE, _HALVES):
        received = ", ".join(f"{kind} {count} times" for kind, count in backward.items())
        raise ValueError(
            f"Device {device} must run the backward pass of microbatch {microbatch} on stage "
            f"{stage} exactly once: either backward, or backward_input and backward_weight. "
            f"Received: {received}."
        )


def _check_local_order(schedule: Schedule) -> None:
    """Check each device's order against the dependencies within it."""
    for device, order in enumerate(schedule.orders):
        position = {action: index for index, action in enumerate(order)}
        for action in order:
            for needed in schedule.dependencies(action):
                if position.get(needed, -1) > position[action]:
                    raise ValueError(
                        f"Device {device} must run {needed} before {action}. Received: positions "
                        f"{position[needed]} and {position[action]} of its order. Swap them."
                    )
