"""ZB-H1: 1F1B with the backward pass split, so that weight gradients fill the bubble."""

from collections.abc import Iterator

from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.counts import check_counts
from tfparallel.pipeline.plans.schedule import Schedule


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """Schedule input gradients (B) as early as possible, weight gradients (W) in what is left.

        device 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        device 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        device 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    Only B is on the way to the stage before; W can wait. Stage s starts as in 1F1B, then delays
    its first s weight gradients, which fill the end, where 1F1B is idle.

    Bubble, with S stages, M microbatches and the same times F, B and W on every stage: each device
    is idle for `(S - 1) * (F + B - W)`, of a makespan `(M + S - 1) * (F + B) + (M - S + 1) * W`.
    This holds for `W <= F`, `W <= B` and `M >= S`; with equal times the bubble is a third of
    1F1B's. For `M < S` the makespan is `(M + S - 1) * (F + B) + W`: the way of the last microbatch
    through all stages, which no schedule shortens.

    Live activations: `min(M, S)` on every stage, counting those that wait for W; 1F1B's first
    stage holds as many.

    Args:
        num_stages: stages, each on a device of its own.
        num_microbatches: microbatches of a batch; any number, also below `num_stages`.

    Raises:
        ValueError: if a count is not a whole number of at least 1.

    Source: ZB-H1 in Qi et al. 2023, figure 3 (top) and table 2, https://arxiv.org/abs/2401.10241
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    orders = [[*_order(stage, num_stages, num_microbatches)] for stage in range(num_stages)]
    return Schedule("zero_bubble", orders)


def _order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    num_ahead = min(num_microbatches, num_stages - stage)  # forward passes before the first B
    num_delayed = min(num_microbatches, stage)  # weight gradients that wait
    for microbatch in range(num_ahead):
        yield Action(stage, microbatch, "forward")
    for microbatch in range(num_microbatches):
        yield Action(stage, microbatch, "backward_input")
        if microbatch >= num_delayed:
            yield Action(stage, microbatch - num_delayed, "backward_weight")
        if num_ahead + microbatch < num_microbatches:
            yield Action(stage, num_ahead + microbatch, "forward")
    for microbatch in range(num_microbatches - num_delayed, num_microbatches):
        yield Action(stage, microbatch, "backward_weight")
