import pytest

from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.schedule import Schedule

MINE = [
    [(0, 0, "forward"), (0, 1, "forward"), (0, 0, "backward"), (0, 1, "backward")],
    [
        (1, 0, "forward"),
        (1, 0, "backward_input"),
        (1, 1, "forward"),
        (1, 1, "backward_input"),
        (1, 0, "backward_weight"),
        (1, 1, "backward_weight"),
    ],
]


def test_counts_and_homes_come_from_the_actions():
    schedule = Schedule("mine", MINE)
    assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (2, 2, 2)
    assert schedule.device_of == {0: 0, 1: 1}


def test_an_action_depends_on_its_neighbours():
    schedule = Schedule("mine", MINE)
    forward, backward_input = Action(1, 0, "forward"), Action(1, 0, "backward_input")
    assert schedule.dependencies(Action(0, 0, "forward")) == ()
    assert schedule.dependencies(forward) == (Action(0, 0, "forward"),)
    assert schedule.dependencies(backward_input) == (forward,)
    assert schedule.dependencies(Action(1, 0, "backward_weight")) == (backward_input,)
    assert schedule.dependencies(Action(0, 0, "backward")) == (
        Action(0, 0, "forward"),
        backward_input,
    )


def test_steps_follow_time_and_dependencies():
    steps = [str(action) for action in Schedule("mine", MINE).steps()]
    assert steps == [
        "forward of microbatch 0 on stage 0",
        "forward of microbatch 1 on stage 0",
        "forward of microbatch 0 on stage 1",
        "backward_input of microbatch 0 on stage 1",
        "backward of microbatch 0 on stage 0",
        "forward of microbatch 1 on stage 1",
        "backward_input of microbatch 1 on stage 1",
        "backward of microbatch 1 on stage 0",
        "backward_weight of microbatch 0 on stage 1",
        "backward_weight of microbatch 1 on stage 1",
    ]


def test_all_forward_first_moves_nothing_else():
    first, second = Schedule("mine", MINE).all_forward_first().orders
    assert [tuple(action) for action in first] == MINE[0]
    assert [tuple(action) for action in second] == [
        (1, 0, "forward"),
        (1, 1, "forward"),
        (1, 0, "backward_input"),
        (1, 1, "backward_input"),
        (1, 0, "backward_weight"),
        (1, 1, "backward_weight"),
    ]


def test_devices_that_wait_for_one_another_are_named():
    orders = [
        [(0, 0, "forward"), (0, 0, "backward"), (0, 1, "forward"), (0, 1, "backward")],
        [(1, 0, "forward"), (1, 1, "forward"), (1, 0, "backward"), (1, 1, "backward")],
    ]
    message = (
        "device 0 is at backward of microbatch 0 on stage 0, which needs "
        r"backward of microbatch 0 on stage 1 \(device 1\); "
        "device 1 is at forward of microbatch 1 on stage 1, which needs "
        r"forward of microbatch 1 on stage 0 \(device 0\)"
    )
    with pytest.raises(ValueError, match=message):
        [*Schedule("mine", orders).steps()]
