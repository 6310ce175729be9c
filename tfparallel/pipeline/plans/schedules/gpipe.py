"""GPipe: all forward passes, then all backward passes."""

from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.counts import check_counts
from tfparallel.pipeline.plans.schedule import Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Schedule all forward passes, then all backward passes, the last microbatch first.

        device 0  F0 F1 F2 .  .  .  .  B2 B1 B0
        device 1  .  F0 F1 F2 .  .  B2 B1 B0 .
        device 2  .  .  F0 F1 F2 B2 B1 B0 .  .

    Bubble, with S stages, M microbatches and the same forward time F and backward time B on every
    stage: each device is idle for `(S - 1) * (F + B)`, a fraction `(S - 1) / (M + S - 1)` of the
    makespan `(M + S - 1) * (F + B)`.

    Live activations: M on every stage.

    Args:
        num_stages: stages, each on a device of its own.
        num_microbatches: microbatches of a batch; any number, also below `num_stages`.

    Raises:
        ValueError: if a count is not a whole number of at least 1.

    Source: GPipe, Huang et al. 2019, figure 2, https://arxiv.org/abs/1811.06965
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    return Schedule(
        "gpipe",
        [
            [Action(stage, microbatch, "forward") for microbatch in microbatches]
            + [Action(stage, microbatch, "backward") for microbatch in reversed(microbatches)]
            for stage in range(num_stages)
        ],
    )
