"""Real `horovodrun -np 4`: ranks of two devices, each with a pipeline of its own inside."""

import re

import pytest

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")

from tests.horovod.launching import horovodrun


@pytest.mark.long
@pytest.mark.timeout(600)
def test_four_ranks_train_as_one_device():
    status, output = horovodrun("inner", num_ranks=4)
    assert status == 0, output
    ranks = re.findall(r"same as one device: (\d) 4", output)
    assert sorted(ranks) == ["0", "1", "2", "3"], output
