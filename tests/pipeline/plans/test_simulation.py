import pytest

from tfparallel.pipeline.plans.schedules.gpipe import gpipe
from tfparallel.pipeline.plans.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b
from tfparallel.pipeline.plans.schedules.one_f_one_b import one_f_one_b
from tfparallel.pipeline.plans.schedules.zero_bubble import zero_bubble
from tfparallel.pipeline.plans.simulation import simulate


def spans(timeline):
    return {
        (*event.action, event.device): (event.start, event.end)
        for event in sorted(timeline.events, key=lambda event: event.start)
    }


def test_events_start_as_early_as_dependencies_allow():
    assert spans(simulate(one_f_one_b(2, 1), forward_time=1, backward_time=2)) == {
        (0, 0, "forward", 0): (0, 1),
        (1, 0, "forward", 1): (1, 2),
        (1, 0, "backward", 1): (2, 4),
        (0, 0, "backward", 0): (4, 6),
    }


def test_times_may_differ_by_stage():
    timeline = simulate(one_f_one_b(2, 2), forward_time=[1, 3], backward_time=[0, 4])
    # stage 1: forward 1-4, backward 4-8, forward 8-11, backward 11-15
    assert timeline.makespan == 15
    assert timeline.utilisation == (2 / 15, 14 / 15)
    assert timeline.bubble_fraction == pytest.approx(14 / 30)


def test_communication_delays_other_devices_only():
    one_hop_each_way = simulate(one_f_one_b(2, 1), communication_time=0.5)
    assert one_hop_each_way.makespan == 6 + 2 * 0.5
    # Both stages on one device: nothing is sent.
    assert simulate(interleaved_one_f_one_b(1, 1), communication_time=0.5).makespan == 6


def test_a_split_backward_pass_takes_as_long_as_a_whole_one_by_default():
    assert simulate(zero_bubble(1, 4), backward_time=3).makespan == 4 * (1 + 3)


def test_stages_of_one_device_count_together():
    timeline = simulate(interleaved_one_f_one_b(1, 2))  # F0a F0b B0b F1a B0a F1b B1b B1a
    assert timeline.peak_live_per_stage == (2, 1)
    assert timeline.peak_live_per_device == (2,)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"forward_time": [1, 2, 3]}, r"forward_time .* one per stage \(2\). Received: 3 numbers"),
        ({"backward_time": -1}, "backward_time must be finite and not negative"),
        ({"backward_input_time": [1, float("nan")]}, "backward_input_time must be finite"),
        ({"backward_weight_time": float("inf")}, "backward_weight_time must be finite"),
        ({"communication_time": -0.5}, "communication_time must be finite and not negative"),
    ],
)
def test_rejects_times_that_cannot_be(times, message):
    with pytest.raises(ValueError, match=message):
        simulate(gpipe(2, 2), **times)
