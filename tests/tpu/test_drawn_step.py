"""`profile` of a TPU's step: on logical CPUs, and of what a TPU is documented to tell."""

import contextlib
import json

import keras
import numpy as np
import pytest

from tests.helpers import tiny_compile_options, tiny_data, tiny_model
from tests.internals.planes_of_a_tpu import space_of_two_cores
from tests.tpu.on_cpus import CpuStrategy
from tfparallel.internals.profile_planes import read_profile
from tfparallel.replicas import step_profile

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module")
def trained():
    """A strategy on two cores, and a model that it has trained."""
    strategy = CpuStrategy()
    with strategy.scope():
        model = tiny_model()
        model.compile("adam", **tiny_compile_options())
    model.fit(*tiny_data(8), batch_size=4, verbose=0)
    return strategy, model


@pytest.fixture
def as_of_a_tpu(monkeypatch, tmp_path):
    """The profiler tells of a step of two cores of a TPU, whatever runs."""
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(space_of_two_cores().SerializeToString())

    @contextlib.contextmanager
    def profiled():
        yield read_profile(path).ran

    monkeypatch.setattr(step_profile, "profiled", profiled)


def test_a_step_on_cpus_is_drawn_and_leaves_no_trace(trained):
    strategy, model = trained
    variables = [*model.variables, *model.optimizer.variables]
    before = [keras.ops.convert_to_numpy(each) for each in variables]
    most_rows = strategy._most_rows
    drawn = strategy.profile(model, tiny_data(13))  # rows of padding fill it up
    assert drawn.lanes[:2] == ("CPU:0", "CPU:1")
    for lane in range(2):
        assert {b.kind for b in drawn.boxes if b.lane == lane} >= {"compute", "update"}
    for value, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(value, keras.ops.convert_to_numpy(variable))
    assert strategy._most_rows == most_rows


def test_a_core_is_a_lane_and_so_is_what_goes_on_beside_it(trained, as_of_a_tpu, tmp_path):
    """Two cores, the second a millisecond later; a column is a millisecond."""
    drawn = step_profile.profile_step(*trained, tiny_data(8))
    assert drawn.text(32).splitlines()[:5] == [
        "TPU:0               vccccccrruu.",
        "TPU:1               .vccccccrruu",
        "TPU:0 SparseCore 1  ..c.........",
        "TPU:0 async         .rrr.c......",
        "TPU:1 async         ..rrr.c.....",
    ]
    assert drawn.seconds == pytest.approx(0.012, rel=1e-4)
    assert drawn.busy_s("reduce")[:2] == pytest.approx([0.002, 0.002], rel=1e-3)
    drawn.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == set(drawn.lanes)


def test_a_profiler_that_tells_nothing_of_the_cores_is_said(trained, as_of_a_tpu):
    strategy, model = trained
    with pytest.raises(RuntimeError, match=r"what \['CPU:0', 'CPU:1'\] ran.*'TPU:0'"):
        strategy.profile(model, tiny_data(8))
