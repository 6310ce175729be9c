"""Which layers go on which stage."""

import itertools
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import numpy as np

from tfparallel.pipeline.plans.counts import check_counts

_MOST_NAMES = 10  # that a message lists


def balanced_cuts(
    costs: Sequence[float],
    num_stages: int,
    *,
    memory: Sequence[float] | Sequence[Sequence[float]] | None = None,
    memory_limit: float | None = None,
    boundary_costs: Sequence[float] | None = None,
    layer_names: Sequence[str] | None = None,
    num_devices: Sequence[int] | None = None,
) -> list[range]:
    """Cut layers into contiguous stages, the slowest of which is as fast as can be.

    A pipeline runs at the pace of its slowest stage. The result is exact: no other cut has a
    faster slowest stage within the memory limit. Of the cuts that are equally fast, it is one
    whose fullest stage needs the least memory, and of those one that is the most even (the
    smallest sum of squared times).

    Args:
        costs: time of each layer, forward and backward together, in topological order.
        num_stages: how many stages, each of at least one layer.
        memory: bytes of each layer, or for each stage a list of the bytes of each layer on it, as
            stages hold the activations of different numbers of microbatches. Default: none, which
            neither limits nor breaks ties.
        memory_limit: the most bytes of a stage. Default: no limit.
        boundary_costs: `boundary_costs[i]` is the time to send what layer i and those before it
            have made to the layers behind it, paid only by a cut after layer i, and by the stage
            before the cut, whose device sends; one fewer than there are layers. Default: sending
            takes no time.
        layer_names: names for messages. Default: the layers' numbers.
        num_devices: of each stage; several take microbatches in turn, so that the stage takes its
            time divided by their number. Default: one each.

    Returns:
        For each stage, the range of its layers' indices.

    Raises:
        ValueError: if there are more stages than layers, if a sequence has the wrong length or a
            number that is negative or not finite, or if no cut is within the memory limit.

    Source: the partitioner of PipeDream, Harlap et al. 2018, https://arxiv.org/abs/1806.03377,
    for stages whose devices are given; `replication.py` chooses those
    too. There sending is a stage of its own; here the sender pays, as a copy may well wait for the
    computation before it.
    """
    _check_can_be_cut(len(costs), num_stages, memory, memory_limit)
    times = _times_of_runs(costs, boundary_costs, num_devices)
    bytes_ = _bytes_per_stage(memory, num_stages, len(costs))
    sizes = np.stack([run_totals(stage_bytes) for stage_bytes in bytes_])
    if memory_limit is not None:
        smallest_limit, _ = _best_cut(sizes, num_stages, np.maximum)
        if smallest_limit > memory_limit:
            names = layer_names or [f"layer {i}" for i in range(len(costs))]
            _raise_too_large(bytes_.min(axis=0), names, num_stages, memory_limit, smallest_limit)
        times = np.where(sizes <= memory_limit, times, math.inf)
    # Each goal in turn; the ones before it become limits.
    slowest, _ = _best_cut(times, num_stages, np.maximum)
    fullest, _ = _best_cut(np.where(times <= slowest, sizes, math.inf), num_stages, np.maximum)
    allowed = (times <= slowest) & (sizes <= fullest)
    _, stages = _best_cut(np.where(allowed, times**2, math.inf), num_stages, np.add)
    return stages


def _check_can_be_cut(
    num_layers: int, num_stages: int, memory: object, memory_limit: float | None
) -> None:
    check_counts(num_stages=num_stages)
    if num_stages > num_layers:
        raise ValueError(
            f"Every stage must have a layer. Received: num_stages={num_stages} for {num_layers} "
            f"layers. Use at most {num_layers} stages."
        )
    if memory_limit is not None and memory is None:
        raise ValueError(
            f"A memory limit needs the layers' bytes. Received: memory_limit={memory_limit}, "
            "memory=None. Pass memory too."
        )


def _times_of_runs(
    costs: Sequence[float],
    boundary_costs: Sequence[float] | None,
    num_devices: Sequence[int] | None,
) -> np.ndarray:
    """Time of layers start to stop - 1 as a stage `[stage, start, stop]`; one if all are alike."""
    times = run_totals(_checked("costs", costs, len(costs)))[None]
    if boundary_costs is not None:
        times[:, :, 1:-1] += _checked("boundary_costs", boundary_costs, len(costs) - 1)
    if num_devices is not None:
        times = times / np.asarray(num_devices, np.float64)[:, None, None]
    return times


def _bytes_per_stage(memory: Sequence | None, num_stages: int, num_layers: int) -> np.ndarray:
    """Bytes `[stage, layer]`; one row if all stages are alike."""
    if memory is None:
        return np.zeros((1, num_layers))
    if not memory or not isinstance(memory[0], Sequence):
        return _checked("memory", memory, num_layers)[None]
    if len(memory) != num_stages:
        raise ValueError(
            f"memory must have a list for each of {num_stages} stages. Received: {len(memory)}."
        )
    return np.stack([_checked("memory", stage_memory, num_layers) for stage_memory in memory])


def _checked(name: str, values: Sequence[float], length: int) -> np.ndarray:
    if len(values) != length:
        raise ValueError(
            f"{name} must have {length} numbers, "
            f"{'one between each two layers' if name == 'boundary_costs' else 'one per layer'}. "
            f"Received: {len(values)}."
        )
    array = np.asarray(values, dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        raise ValueError(
            f"{name} must be finite and not negative. "
            f"Received: {name}[{wrong[0]}]={array[wrong[0]]}."
        )
    return array


def run_totals(values: np.ndarray) -> np.ndarray:
    """Return the sums `[start, stop]` of all runs of values; infinite where a run is empty."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    totals = sums[None, :] - sums[:, None]
    return np.where(np.tri(len(sums), dtype=bool), math.inf, totals)


def _best_cut(scores: np.ndarray, num_stages: int, combine: np.ufunc) -> tuple[float, list[range]]:
    """Find the cut whose combined score is the least, by dynamic programming.

    Args:
        scores: score of layers start to stop - 1 as a stage, at `[stage, start, stop]`, not
            negative; infinite where there must be no such stage. All stages alike: `[1, ...]`.
        num_stages: how many stages.
        combine: `np.maximum` or `np.add`, from the scores of two runs of stages to that of both.

    Returns:
        The least score, infinite if there is no cut, and the stages.
    """
    num_layers = scores.shape[1] - 1
    best = np.full(num_layers + 1, math.inf)  # of the layers before each position, so far
    best[0] = 0
    last_starts = []
    for stage_scores in itertools.islice(itertools.cycle(scores), num_stages):
        candidates = combine(best[:, None], stage_scores)
        last_starts.append(candidates.argmin(axis=0))
        best = candidates.min(axis=0)
    stages = []
    stop = num_layers
    for starts in reversed(last_starts):
        start = int(starts[stop])
        stages.append(range(start, stop))
        stop = start
    return float(best[num_layers]), stages[::-1]


def _raise_too_large(
    memory: np.ndarray,
    names: Sequence[str],
    num_stages: int,
    memory_limit: float,
    smallest_limit: float,
) -> None:
    alone = [f"{name} ({size:.0f})" for name, size in zip(names, memory) if size > memory_limit]
    reason = f"too large alone: {_list_names(alone)}; " if alone else ""
    way_out = "Raise the limit" if alone else "Raise the limit, or use more stages"
    raise ValueError(
        f"Every stage must fit into memory_limit. Received: memory_limit={memory_limit:.0f} for "
        f"{num_stages} stages, {reason}the smallest limit that would do is {smallest_limit:.0f}. "
        f"{way_out}."
    )


def matches(path: str, pattern: str) -> bool:
    """Whether a shell-style pattern names a layer, or a model that it is in.

    Args:
        path: of the layer: its name, behind those of the nested models around it (`base/conv`).
        pattern: of a path (`base/conv*`, `*/conv*`), or, without `/`, of a name at the top
            (`base` is all of that model).
    """
    names = path.split("/")
    depths = range(2, len(names) + 1) if "/" in pattern else [1]
    return any(fnmatchcase("/".join(names[:depth]), pattern) for depth in depths)


def match_patterns(
    layer_names: Sequence[str], patterns_per_stage: Sequence[Sequence[str]]
) -> list[int]:
    """Give every layer the stage one of whose patterns its name matches.

    Args:
        layer_names: names of the layers, paths where they are in nested models.
        patterns_per_stage: for each stage, patterns as in a shell (`*`, `?`, `[abc]`), see
            `matches`; case matters. `[["embedding", "block_[0-3]*"], ["block_[4-7]*", "head"]]` is
            two stages.

    Returns:
        For each layer, the index of its stage.

    Raises:
        ValueError: if a pattern matches no layer, if a stage has no patterns, if a layer matches
            patterns of two stages, or if a layer matches none.
    """
    for stage, patterns in enumerate(patterns_per_stage):
        if not isinstance(patterns, list | tuple) or not patterns:
            raise ValueError(
                "Every stage must have a list of patterns, and so a layer. "
                f"Received: {patterns!r} for stage {stage}."
            )
    _check_every_pattern_matches(layer_names, patterns_per_stage)
    stages_of = [
        [
            stage
            for stage, patterns in enumerate(patterns_per_stage)
            if any(matches(name, pattern) for pattern in patterns)
        ]
        for name in layer_names
    ]
    several = [
        f"{name!r} (stages {', '.join(map(str, stages))})"
        for name, stages in zip(layer_names, stages_of)
        if len(stages) > 1
    ]
    if several:
        raise ValueError(
            "Every layer must match patterns of one stage only. "
            f"Received: {_list_names(several)}. Make the patterns narrower."
        )
    unmatched = [repr(name) for name, stages in zip(layer_names, stages_of) if not stages]
    if unmatched:
        raise ValueError(
            f"Every layer must match a pattern of a stage. Received: {_list_names(unmatched)}, "
            "which match none. Add a pattern for them."
        )
    return [stage for (stage,) in stages_of]


def _check_every_pattern_matches(
    layer_names: Sequence[str], patterns_per_stage: Sequence[Sequence[str]]
) -> None:
    idle = [
        f"{pattern!r} (stage {stage})"
        for stage, patterns in enumerate(patterns_per_stage)
        for pattern in patterns
        if not any(matches(name, pattern) for name in layer_names)
    ]
    if idle:
        raise ValueError(
            f"Every pattern must match a layer. Received: {_list_names(idle)}, which match none. "
            f"The layers are {_list_names(map(repr, layer_names))}."
        )


def _list_names(names: Iterable[str]) -> str:
    names = [*names]
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
