"""The evaluator: when it has nothing left to do."""

import json
import os

import pytest

from tests.parameter_server.cluster import free_addresses
from tfparallel.parameter_server import evaluator


@pytest.fixture(autouse=True)
def gone_chief(monkeypatch):
    """The chief's process has ended."""
    (address,) = free_addresses(1)
    config = {"cluster": {"chief": [address]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_a_training_that_was_over_before_the_evaluator_was_ready_has_ended(tmp_path):
    """It waited for a minute, for a chief that had come and gone while it built its model."""
    ended = tmp_path / "ended"
    ended.touch()
    assert evaluator._Chief().has_ended(ended)


def test_the_end_of_an_earlier_training_is_not_that_of_this_one(tmp_path):
    ended = tmp_path / "ended"
    ended.touch()
    os.utime(ended, (0, 0))
    chief = evaluator._Chief()
    assert not chief.has_ended(ended)
    assert not chief.has_ended(tmp_path / "nothing")
