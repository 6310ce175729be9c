"""Real `horovodrun`: ranks with a half of all state each, of which one is killed."""

import re

import pytest

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")

from tests.horovod.launching import horovodrun
from tests.horovod.shares import KILLED_IN, STEPS


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("axis", ["model", "pipeline"])
def test_a_job_that_is_started_again_ends_as_one_device(tmp_path, axis):
    status, output = horovodrun("shares", tmp_path, axis)
    assert status != 0 and "steps:" not in output, output
    assert "Process 1 exit with status code 137" in output, output
    status, output = horovodrun("shares", tmp_path, axis)
    assert status == 0, output
    left = STEPS - (KILLED_IN - 1)
    assert re.findall(r"steps: (\d+)", output) == [str(left)] * 2, output
