import random
from itertools import combinations, pairwise

import pytest

from tfparallel.pipeline.plans.partition import balanced_cuts, match_patterns, matches


def all_cuts(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield [range(start, stop) for start, stop in pairwise([0, *inner, num_layers])]


def score(stages, costs, memory, boundary_costs):
    """The goals of a cut in their order: slowest stage, fullest stage, unevenness."""
    times = [
        sum(costs[i] for i in stage) + sum(boundary_costs[stage.stop - 1 : stage.stop])
        for stage in stages
    ]
    sizes = [sum(memory[i] for i in stage) for stage in stages]
    return max(times), max(sizes), sum(time**2 for time in times)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed):
    draw = random.Random(seed)
    num_layers = draw.randint(1, 9)
    costs = [draw.randint(0, 9) for _ in range(num_layers)]
    memory = [draw.randint(0, 9) for _ in range(num_layers)]
    boundary_costs = [draw.randint(0, 4) for _ in range(num_layers - 1)]
    for num_stages in range(1, num_layers + 1):
        cuts = [*all_cuts(num_layers, num_stages)]
        scores = [score(cut, costs, memory, boundary_costs) for cut in cuts]
        options = {"memory": memory, "boundary_costs": boundary_costs}

        stages = balanced_cuts(costs, num_stages, **options)
        assert stages in cuts
        assert score(stages, costs, memory, boundary_costs) == min(scores)

        smallest_limit = min(size for _, size, _ in scores)
        for limit in (smallest_limit, smallest_limit + 2):
            stages = balanced_cuts(costs, num_stages, memory_limit=limit, **options)
            within = [s for s in scores if s[1] <= limit]
            assert score(stages, costs, memory, boundary_costs) == min(within)

        with pytest.raises(ValueError, match=f"smallest limit that would do is {smallest_limit}."):
            balanced_cuts(costs, num_stages, memory_limit=smallest_limit - 1, **options)


def sizes(stages):
    return [len(stage) for stage in stages]


def test_stages_are_ranges_of_layers():
    assert balanced_cuts([1, 1, 1, 3], 2) == [range(3), range(3, 4)]
    assert balanced_cuts([3, 1, 1, 1], 2) == [range(1), range(1, 4)]


def test_equally_fast_cuts_are_told_apart_by_memory_then_by_evenness():
    costs = [6, 1, 1, 1, 1]  # the first layer makes the slowest stage, wherever the others go
    assert sizes(balanced_cuts(costs, 3)) == [1, 2, 2]
    assert sizes(balanced_cuts(costs, 3, memory=[0, 0, 0, 9, 3])) == [1, 3, 1]


def test_a_memory_limit_moves_the_cut():
    costs, memory = [1, 1, 1, 3], [4, 4, 4, 0]
    assert sizes(balanced_cuts(costs, 2, memory=memory)) == [3, 1]
    assert sizes(balanced_cuts(costs, 2, memory=memory, memory_limit=8)) == [2, 2]


def test_memory_may_differ_by_stage():
    """The first stage holds four microbatches' activations of 2 bytes, the last one holds one."""
    costs, memory = [1, 1, 1, 1], [[8, 8, 8, 8], [2, 2, 2, 2]]
    assert sizes(balanced_cuts(costs, 2, memory=memory)) == [2, 2]
    assert sizes(balanced_cuts(costs, 2, memory=memory, memory_limit=8)) == [1, 3]
    with pytest.raises(ValueError, match="a list for each of 2 stages. Received: 1"):
        balanced_cuts(costs, 2, memory=[[1, 1, 1, 1]])


def test_the_stage_before_a_cut_pays_for_sending():
    assert sizes(balanced_cuts([2, 2, 2, 2], 2)) == [2, 2]
    assert sizes(balanced_cuts([2, 2, 2, 2], 2, boundary_costs=[0, 5, 5])) == [1, 3]


def test_a_thousand_layers_are_cut_in_no_time():
    assert sizes(balanced_cuts([1.0] * 1000, 8)) == [125] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 0}, "num_stages must be a whole number"),
        (
            {"num_stages": 4},
            "Every stage must have a layer. Received: num_stages=4 for 3 layers. Use at most 3 st",
        ),
        ({"costs": [1, -1, 1]}, r"costs must be finite and not .* Received: costs\[1\]=-1.0"),
        ({"costs": [1, 1, float("nan")]}, r"Received: costs\[2\]=nan"),
        ({"memory": [1, 2]}, "memory must have 3 numbers, one per layer. Received: 2"),
        ({"memory": [1, 2, float("inf")]}, r"Received: memory\[2\]=inf"),
        ({"memory_limit": 5}, "A memory limit needs .* Received: memory_limit=5, memory=None"),
        ({"boundary_costs": [1, 1, 1]}, "must have 2 numbers, one between .* Received: 3"),
        ({"boundary_costs": [1, -1]}, r"Received: boundary_costs\[1\]=-1.0"),
    ],
)
def test_rejects_what_cannot_be_cut(arguments, message):
    with pytest.raises(ValueError, match=message):
        balanced_cuts(**{"costs": [1, 1, 1], "num_stages": 2, **arguments})


def test_a_memory_limit_that_cannot_be_met_says_which_could():
    message = "memory_limit=9 for 2 stages, the smallest limit that would do is 10. .* more stages"
    with pytest.raises(ValueError, match=message):
        balanced_cuts([1] * 4, 2, memory=[5, 5, 5, 5], memory_limit=9)


def test_a_layer_that_exceeds_the_memory_limit_alone_is_named():
    costs, memory = [1, 1, 1], [5, 20, 5]
    message = r"memory_limit=9 .* too large alone: layer 1 \(20\); .* 25. Raise the limit.$"
    with pytest.raises(ValueError, match=message):
        balanced_cuts(costs, 2, memory=memory, memory_limit=9)
    with pytest.raises(ValueError, match=r"too large alone: conv \(20\)"):
        balanced_cuts(costs, 2, memory=memory, memory_limit=9, layer_names=["in", "conv", "out"])


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("base", {"base/conv", "base/block/conv", "base/block/norm"}),
        ("b*", {"base/conv", "base/block/conv", "base/block/norm"}),
        ("base/block", {"base/block/conv", "base/block/norm"}),
        ("base/conv", {"base/conv"}),
        ("*/conv", {"base/conv", "base/block/conv"}),
        ("*/block/*", {"base/block/conv", "base/block/norm"}),
        ("base/[!b]*", {"base/conv"}),
        ("conv", {"conv"}),  # as without nested models: of the top only
        ("*/base", set()),
    ],
)
def test_patterns_of_paths(pattern, paths):
    every = ["base/conv", "base/block/conv", "base/block/norm", "conv"]
    assert {path for path in every if matches(path, pattern)} == paths


LAYERS = ["embedding", "block_0", "block_1", "block_2", "head"]


def test_patterns_give_every_layer_its_stage():
    patterns = [["embedding", "block_[01]"], ["block_2", "h??d", "he*"]]
    assert match_patterns(LAYERS, patterns) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([["embedding"], ["block_*"]], "Every layer must match .* Received: 'head', which match"),
        ([["*"], ["HEAD"]], r"Every pattern must match .* 'HEAD' \(stage 1\), .* are 'embedding'"),
        (
            [["embedding", "block_*"], ["block_2", "head"]],
            r"one stage only. Received: 'block_2' \(stages 0, 1\)",
        ),
        ([["*"], []], r"a list of patterns, .* Received: \[\] for stage 1"),
        (["embedding", ["*"]], "a list of patterns, .* Received: 'embedding' for stage 0"),
        ([1, 4], "a list of patterns, .* Received: 1 for stage 0"),
        ([], "Every layer must match a pattern .* Received: 'embedding', 'block_0'"),
    ],
)
def test_rejects_patterns_that_are_no_partition(patterns, message):
    with pytest.raises(ValueError, match=message):
        match_patterns(LAYERS, patterns)


def test_messages_list_the_first_names_only():
    with pytest.raises(ValueError, match="'layer_9' and 20 more, which match none"):
        match_patterns(["first", *(f"layer_{i}" for i in range(30))], [["first"]])
