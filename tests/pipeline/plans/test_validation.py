import pytest

from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.pipeline.plans.validation import validate


def valid_orders():
    return [
        [(0, 0, "forward"), (0, 1, "forward"), (0, 0, "backward"), (0, 1, "backward")],
        [(1, 0, "forward"), (1, 0, "backward"), (1, 1, "forward"), (1, 1, "backward")],
    ]


def assert_refused(orders, message):
    with pytest.raises(ValueError, match=message):
        validate(Schedule("mine", orders))


def test_accepts_a_schedule_of_ones_own():
    validate(Schedule("mine", valid_orders()))


def test_accepts_whole_and_split_backward_passes_together():
    orders = valid_orders()
    orders[1][1:2] = [(1, 0, "backward_input"), (1, 0, "backward_weight")]
    validate(Schedule("mine", orders))


def test_rejects_no_devices():
    assert_refused([], "must have a device. Received: no orders")


def test_rejects_an_idle_device():
    assert_refused([*valid_orders(), []], "Received: no actions for device 2")


def test_rejects_an_unknown_kind():
    orders = valid_orders()
    orders[1][0] = (1, 0, "forwards")
    assert_refused(orders, r"Received: forwards of microbatch 0 on stage 1 \(device 1\)")


@pytest.mark.parametrize("action", [(-1, 0, "forward"), (1, -1, "forward")])
def test_rejects_negative_numbers(action):
    orders = valid_orders()
    orders[1][0] = action
    assert_refused(orders, r"numbered from 0. Received: forward of .*-1.* \(device 1\)")


def test_rejects_a_stage_on_two_devices():
    orders = valid_orders()
    orders[0].append(orders[1].pop())
    assert_refused(
        orders,
        "stage 1 must be on one device, .*: device 0. "
        "Received: forward of microbatch 0 on stage 1 on device 1",
    )


def test_rejects_a_gap_in_the_stages():
    orders = [valid_orders()[0], [(2, 0, "forward"), (2, 0, "backward")]]
    assert_refused(orders, "numbered 0 to 2 without a gap. Received: no action for stage 1")


def test_rejects_a_missing_forward_pass():
    orders = valid_orders()
    del orders[1][2]
    message = "Device 1 must run forward of microbatch 1 on stage 1 .* Received: 0 times"
    assert_refused(orders, message)


def test_rejects_a_repeated_forward_pass():
    orders = valid_orders()
    orders[0].insert(0, (0, 1, "forward"))
    message = "Device 0 must run forward of microbatch 1 on stage 0 .* Received: 2 times"
    assert_refused(orders, message)


@pytest.mark.parametrize(
    ("backward", "received"),
    [
        ([], "backward 0 times, backward_input 0 times, backward_weight 0 times"),
        (["backward", "backward"], "backward 2 times, backward_input 0 times"),
        (["backward_input"], "backward 0 times, backward_input 1 times, backward_weight 0 times"),
        (["backward", "backward_weight"], "backward 1 times, .* backward_weight 1 times"),
    ],
)
def test_rejects_a_backward_pass_that_does_not_run_exactly_once(backward, received):
    orders = valid_orders()
    orders[1][1:2] = [(1, 0, kind) for kind in backward]
    message = "Device 1 must run the backward pass of microbatch 0 on stage 1 .* Received: "
    assert_refused(orders, message + received)


def test_rejects_a_backward_pass_before_its_forward_pass():
    orders = valid_orders()
    orders[1][:2] = reversed(orders[1][:2])
    assert_refused(
        orders,
        "Device 1 must run forward of microbatch 0 on stage 1 before backward of microbatch 0 on "
        "stage 1. Received: positions 1 and 0",
    )


def test_rejects_a_weight_gradient_before_its_input_gradient():
    orders = valid_orders()
    orders[1][1:2] = [(1, 0, "backward_weight"), (1, 0, "backward_input")]
    assert_refused(orders, "Device 1 must run backward_input .* before backward_weight")


def test_rejects_devices_that_wait_for_one_another():
    orders = valid_orders()
    orders[0][1:3] = reversed(orders[0][1:3])  # device 0 waits for a backward pass of device 1,
    orders[1][1:3] = reversed(orders[1][1:3])  # which waits for a forward pass of device 0
    assert_refused(orders, "must not wait for one another in a circle")
