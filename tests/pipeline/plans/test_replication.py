"""Layers and devices of stages, chosen together; compared with all choices there are."""

import itertools
import random

import pytest

from tfparallel.pipeline.plans.replication import (
    ReplicatedStage,
    StageMemory,
    replicated_stages,
    time_of_slowest,
)


def all_plans(num_layers, num_devices, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = [0, *cuts, num_layers]
        for devices in itertools.product(range(1, num_devices + 1), repeat=num_stages):
            if sum(devices) <= num_devices:
                yield [
                    ReplicatedStage(range(start, stop), count)
                    for start, stop, count in zip(bounds, bounds[1:], devices)
                ]


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_is_faster(seed):
    draw = random.Random(seed)
    num_layers, num_devices = draw.randint(1, 6), draw.randint(1, 5)
    costs = [draw.choice([1, 1, 2, 3, 7, 0.5]) for _ in range(num_layers)]
    sent = [draw.choice([0, 0.5, 2]) for _ in range(num_layers - 1)]
    plan = replicated_stages(costs, num_devices, boundary_costs=sent)
    counts = range(1, min(num_layers, num_devices) + 1)
    every = [p for count in counts for p in all_plans(num_layers, num_devices, count)]
    slowest = min(time_of_slowest(p, costs, sent) for p in every)
    assert time_of_slowest(plan, costs, sent) == slowest
    equal = [p for p in every if time_of_slowest(p, costs, sent) == slowest]
    assert len(plan) == min(map(len, equal))
    assert [i for each in plan for i in each.layers] == list(range(num_layers))
    assert sum(each.num_devices for each in plan) <= num_devices
    for count in counts:
        plan = replicated_stages(costs, num_devices, num_stages=count, boundary_costs=sent)
        of_count = min(time_of_slowest(p, costs, sent) for p in every if len(p) == count)
        assert time_of_slowest(plan, costs, sent) == of_count


def written_out(plan, costs, sent, copies):
    """The time of the slowest stage, of the words of the docstring."""
    times = []
    for stage in plan:
        is_last = stage.layers.stop == len(costs)
        sends = 0 if is_last else sent[stage.layers.stop - 1]
        own = (sum(costs[i] for i in stage.layers) + sends) / stage.num_devices
        times.append(own + (stage.num_devices - 1) * sum(copies[i] for i in stage.layers))
    return max(times)


def held(plan, memory):
    """Bytes on the fullest device."""
    return max(
        sum(
            memory.of_weights[i] + memory.of_outputs[i] * live / stage.num_devices
            for i in stage.layers
        )
        for stage, live in zip(plan, memory.live, strict=True)
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_within_the_limits_is_faster(seed):
    """Copies cost, only some numbers of devices are allowed, and devices hold no more than fits."""
    draw = random.Random(seed)
    num_stages = draw.randint(1, 3)
    num_layers, num_devices = draw.randint(num_stages, 6), draw.randint(num_stages, 6)
    costs = [draw.choice([1, 2, 3, 8]) for _ in range(num_layers)]
    sent = [draw.choice([0, 0.5, 2]) for _ in range(num_layers - 1)]
    copies = [draw.choice([0, 0.25, 1]) for _ in range(num_layers)]
    allowed = draw.choice([[1, 2], [1, 2, 4], [1, 3]])
    sizes = [[draw.choice([1, 2, 4]) for _ in range(num_layers)] for _ in range(2)]
    live = [num_stages - i for i in range(num_stages)]
    plans = [
        plan
        for plan in all_plans(num_layers, num_devices, num_stages)
        if all(stage.num_devices in allowed for stage in plan)
    ]
    unlimited = StageMemory(*sizes, live, 0)
    limit = draw.choice(sorted(held(plan, unlimited) for plan in plans))
    memory = StageMemory(*sizes, live, limit)
    within = [plan for plan in plans if held(plan, memory) <= limit]
    plan = replicated_stages(
        costs,
        num_devices,
        num_stages=num_stages,
        boundary_costs=sent,
        copy_costs=copies,
        allowed_devices=allowed,
        memory=memory,
    )
    assert plan in within
    fastest = min(written_out(each, costs, sent, copies) for each in within)
    assert written_out(plan, costs, sent, copies) == pytest.approx(fastest, rel=1e-12)
    assert time_of_slowest(plan, costs, sent, copies) == pytest.approx(fastest, rel=1e-12)


def test_a_limit_that_nothing_is_within_is_told():
    memory = StageMemory([4, 4], [0, 0], [2, 1], 3)
    with pytest.raises(ValueError, match="a limit of 3 bytes"):
        replicated_stages([1, 1], 3, num_stages=2, memory=memory)


def test_a_layer_twice_as_slow_gets_two_devices():
    plan = replicated_stages([1, 2, 1], 4, num_stages=3)
    assert [each.num_devices for each in plan] == [1, 2, 1]
    assert time_of_slowest(plan, [1, 2, 1]) == 1


def test_a_stage_has_no_more_devices_than_are_allowed():
    assert replicated_stages([6], 4, most_devices=3) == [ReplicatedStage(range(1), 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 3}, "2 would fit"),
        ({"boundary_costs": [1, 1]}, "between each two of 4 layers"),
        ({"copy_costs": [1, 1]}, "for each of 4 layers"),
    ],
)
def test_what_cannot_be_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        replicated_stages([1, 1, 1, 1], 2, **options)
