"""`strategy.check` says what is, and leaves a model as it was."""

import random

import keras
import numpy as np

from tests.conformance.case import Run, claim
from tests.helpers import numbered, tiny_data


def _state(model: keras.Model) -> dict[str, np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {
        **numbered("variables", [np.array(variable) for variable in variables]),
        "seeds": np.array([random.getstate()[1][-1], np.random.get_state()[2]]),
    }


@claim(core=True)
def an_equal_step_leaves_no_trace(run: Run):
    if run.strategy is None:
        return
    training = run.train(epochs=1)
    before = _state(training.model)
    result = run.strategy.check(training.model, tiny_data(13, seed=3))
    after = _state(training.model)
    assert result.verdict == "equal", str(result)
    assert max(each.difference for each in result.differences) < 1e-5
    assert max(each.change for each in result.differences) > 1e-3
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, name)


@claim(core=True)
def a_step_is_drawn(run: Run):
    """`strategy.profile`: lanes on which something runs, and a model as it was before."""
    if run.strategy is None:
        return
    training = run.train(epochs=1)
    before = _state(training.model)
    drawn = run.strategy.profile(training.model, tiny_data(13, seed=3))
    for name, value in before.items():
        np.testing.assert_array_equal(_state(training.model)[name], value, name)
    events = drawn.trace()["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    boxes = [event for event in events if event["ph"] == "X"]
    assert {box["cat"] for box in boxes} & {"compute", "forward"}
    assert min(box["ts"] for box in boxes) == 0 and min(box["dur"] for box in boxes) >= 0
    assert {box["tid"] for box in boxes} == set(lanes)
    if run.row.num_workers > 1 and hasattr(drawn, "lanes"):  # of all ranks, on one clock
        ranks = {name.split()[1] for name in lanes.values()}
        assert ranks == {str(rank) for rank in range(run.row.num_workers)}
        assert drawn.seconds < 60
    if run.row.name.startswith("parameter_server"):  # servers are seen from the chief
        seen = {(*lanes[box["tid"]].split()[:2], box["cat"]) for box in boxes}
        computing = {i for task, i, kind in seen if (task, kind) == ("worker", "compute")}
        if run.row.num_replicas > 1:
            assert computing == {"0", "1"}
        else:  # one step at a time (max_staleness=0), which the next free worker takes
            assert computing and computing <= {"0", "1"}
        assert {task for task, _, kind in seen if kind == "update"} == {"ps"}


@claim()
def dropout_is_named(run: Run):
    """What differs with Dropout, and not without, differs by Dropout."""
    if run.strategy is None or run.row.num_replicas == 1:
        return

    def build():
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(3)]
        )

    training = run.train(build=build, epochs=1)
    before = _state(training.model)
    result = run.strategy.check(training.model, tiny_data(13, seed=3))
    assert result.verdict == "explained", str(result)
    assert "Dropout 'dropout" in result.causes[0]
    for name, value in before.items():
        np.testing.assert_array_equal(_state(training.model)[name], value, name)
