"""PipelineStrategy.profile: one step as it really ran."""

import json

import keras
import numpy as np
import pytest
from keras import layers

from tests.helpers import momentum_sgd, tiny_compile_options, tiny_data
from tfparallel import PipelineStrategy
from tfparallel.pipeline.swimlane import Swimlane

CPUS = ["CPU:0", "CPU:1"]


@pytest.fixture(scope="module", params=["1f1b", "zero_bubble"])
def profiled(request):
    strategy = PipelineStrategy(CPUS, 3, request.param)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(3)]
        )
        model.compile(optimizer=momentum_sgd(), **tiny_compile_options())
    before = model.get_weights()
    swimlane = strategy.profile(model, tiny_data(12))
    return strategy, model, before, swimlane


def test_the_passes_are_those_of_the_schedule_in_its_order(profiled):
    strategy, _, _, swimlane = profiled
    for device, order in enumerate(strategy.schedule.orders):
        events = [event for event in swimlane.timeline.events if event.device == device]
        assert all(before.end <= after.start for before, after in zip(events, events[1:]))
        order = [a for a in order if (a.stage, a.kind) != (0, "backward_input")]  # of the data
        assert [event.action for event in events] == order


def test_passes_start_after_what_they_need(profiled):
    strategy, _, _, swimlane = profiled
    ends = {event.action: event.end for event in swimlane.timeline.events}
    for action, _, start, end in swimlane.timeline.events:
        assert start <= end
        for needed in strategy.schedule.dependencies(action):
            assert ends.get(needed, 0.0) <= start
    assert swimlane.ideal.makespan > 0
    assert 0 <= swimlane.timeline.bubble_fraction < 1


def test_the_model_is_as_it_was(profiled):
    _, model, before, _ = profiled
    for ours, theirs in zip(before, model.get_weights()):
        np.testing.assert_array_equal(ours, theirs)
    assert not any(np.any(v.numpy()) for v in model.optimizer.variables[2:])
    assert model.optimizer.iterations.numpy() == 0
    assert not any(np.any(v.numpy()) for v in model.metrics_variables)


def test_it_is_drawn_as_text_trace_and_picture(profiled, tmp_path):
    strategy, _, _, swimlane = profiled
    lines = swimlane.text(80).splitlines()
    assert [line[:5] for line in lines[:2]] == CPUS and max(map(len, lines[:2])) == 80
    assert "F" in lines[0] and "B" in lines[1] and "bubble" in lines[3]
    swimlane.save_trace(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    boxes = [event for event in trace if event["ph"] == "X"]
    assert len(boxes) == len(swimlane.timeline.events)
    assert {event["args"]["name"] for event in trace if event["ph"] == "M"} == set(CPUS)
    assert min(box["ts"] for box in boxes) == 0 and all(box["dur"] >= 0 for box in boxes)
    pytest.importorskip("matplotlib")
    swimlane.save_png(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.json", "step.png"]


@pytest.mark.parametrize(("devices", "is_said"), [(["GPU:0", "GPU:1"], True), (CPUS, False)])
def test_of_gpus_it_says_that_a_time_may_be_of_a_launch(profiled, devices, is_said):
    timeline = profiled[3].timeline
    assert ("launched, before it has run" in str(Swimlane(timeline, tuple(devices)))) == is_said
