"""The share of the wall time in which each device computes, as a swimlane would show it."""

from collections.abc import Mapping, Sequence

from tfparallel.measure.shares import Plan


def utilisation(
    seconds: Mapping[str, float],
    wall_s: float,
    plan: Plan,
    own_s: Sequence[float],
    rank: int,
    devices: Sequence[str],
) -> dict[str, float]:
    """Busy over all time, by device: of a pipeline's stages, or of ranks, or of replicas.

    Args:
        seconds: by category, of this rank.
        wall_s: that they sum to.
        plan: of a pipeline; others have none.
        own_s: of each rank, what its steps took outside of collectives.
        rank: of this process.
        devices: of this process, that compute alike.
    """
    if wall_s <= 0:
        return {}
    if plan.utilisation:
        graph_s = seconds["compute"] + seconds["bubble"] + seconds["imbalance"]
        return {name: share * graph_s / wall_s for name, share in plan.utilisation.items()}
    compute = seconds["compute"] / wall_s
    if len(own_s) > 1:
        own = own_s[rank]
        return {
            f"rank {i}": min(1.0, compute * each / own) if own else 0.0
            for i, each in enumerate(own_s)
        }
    return dict.fromkeys(devices, compute)
