"""1F1B: one forward pass, one backward pass, in turns."""

from collections.abc import Iterator

from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.counts import check_counts
from tfparallel.pipeline.plans.schedule import Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Schedule each backward pass as early as possible, forward and backward passes in turns.

        device 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        device 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        device 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    A stage first runs as many forward passes as there are stages behind it. From then on it is
    one forward pass ahead, until none is left.

    Bubble, with S stages, M microbatches and the same forward time F and backward time B on every
    stage: as GPipe's. Each device is idle for `(S - 1) * (F + B)`, a fraction
    `(S - 1) / (M + S - 1)` of the makespan `(M + S - 1) * (F + B)`.

    Live activations: `min(M, S - s)` on stage s, however many microbatches there are.

    Args:
        num_stages: stages, each on a device of its own.
        num_microbatches: microbatches of a batch; any number, also below `num_stages`.

    Raises:
        ValueError: if a count is not a whole number of at least 1.

    Source: PipeDream-Flush in Narayanan et al. 2020, https://arxiv.org/abs/2006.09503; drawn in
    Megatron-LM, Narayanan et al. 2021, figure 4 (top), https://arxiv.org/abs/2104.04473
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    orders = [[*_order(stage, num_stages, num_microbatches)] for stage in range(num_stages)]
    return Schedule("1f1b", orders)


def _order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    num_warmup = min(num_microbatches, num_stages - stage - 1)
    for microbatch in range(num_warmup):
        yield Action(stage, microbatch, "forward")
    for microbatch in range(num_microbatches):
        if num_warmup + microbatch < num_microbatches:
            yield Action(stage, num_warmup + microbatch, "forward")
        yield Action(stage, microbatch, "backward")
