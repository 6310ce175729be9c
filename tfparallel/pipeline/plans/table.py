"""A schedule drawn as text, device by time slot, as the papers draw it."""

from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.counts import check_counts
from tfparallel.pipeline.plans.orders import Orders
from tfparallel.pipeline.plans.simulation import simulate

_LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}


def draw_table(
    schedule: Orders,
    *,
    forward_slots: int = 1,
    backward_slots: int = 1,
    backward_input_slots: int = 1,
    backward_weight_slots: int = 1,
) -> str:
    """Draw a schedule as text, one row per device and one column per time slot.

        device 0  F0 F1 .  .  B1 B0
        device 1  .  F0 F1 B1 B0 .

    `F0` is the forward pass of microbatch 0, `B0` its backward pass. Where the backward pass is
    split, `B0` is the gradient of the input and `W0` that of the weights, as in the paper on zero
    bubbles. Where a device holds several stages, a letter says which: `F0a` is on its first. A dot
    is an idle slot, a dash continues the action before it.

    Args:
        schedule: what to draw.
        forward_slots: columns of a forward pass. All four default to 1, the narrowest table; the
            papers on 1F1B draw a backward pass twice as wide as a forward pass.
        backward_slots: columns of a whole backward pass.
        backward_input_slots: columns of the first half of a split backward pass.
        backward_weight_slots: columns of its second half.

    Raises:
        ValueError: if a number of slots is not a whole number of at least 1, or if the devices
            wait for one another in a circle.
    """
    check_counts(
        forward_slots=forward_slots,
        backward_slots=backward_slots,
        backward_input_slots=backward_input_slots,
        backward_weight_slots=backward_weight_slots,
    )
    timeline = simulate(
        schedule, forward_slots, backward_slots, backward_input_slots, backward_weight_slots
    )
    rows = [["."] * int(timeline.makespan) for _ in schedule.orders]
    for action, device, start, end in timeline.events:
        rows[device][int(start) : int(end)] = ["-"] * int(end - start)
        rows[device][int(start)] = _label(action, schedule)
    width = max(len(cell) for row in rows for cell in row)
    lines = (" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
    margin = len(f"device {len(rows) - 1}")
    return "\n".join(f"{f'device {d}'.ljust(margin)}  {line}" for d, line in enumerate(lines))


def _label(action: Action, schedule: Orders) -> str:
    device = schedule.device_of[action.stage]
    stages = sorted(stage for stage, home in schedule.device_of.items() if home == device)
    chunk = chr(ord("a") + stages.index(action.stage)) if len(stages) > 1 else ""
    return f"{_LETTERS[action.kind]}{action.microbatch}{chunk}"
