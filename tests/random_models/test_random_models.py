"""Random models under random strategies train as one device does; a failure is shrunk.

A failure prints the `Trial`, all that it takes to build and train the model again:
`assert_trains_as_on_one_device(trial)`.
"""

import pytest
from hypothesis import given, settings

from tests.random_models.draw import (
    hybrid_trials,
    local_trials,
    pipeline_trials,
    sharded_trials,
    worker_trials,
)
from tests.random_models.pools import Pools
from tests.random_models.training import assert_trains_as_on_one_device

pytestmark = pytest.mark.turns

CHUNKS = range(6)  # of 50 models: one that fails does not hide what the others find


@pytest.fixture(scope="module")
def pools():
    """The processes of trials under workers."""
    pools = Pools()
    yield pools
    pools.close()


@settings(max_examples=2)
@given(local_trials())
def test_replicas(trial):
    assert_trains_as_on_one_device(trial)


@settings(max_examples=2)
@given(pipeline_trials())
def test_pipelines(trial):
    assert_trains_as_on_one_device(trial)


@settings(max_examples=2)
@given(sharded_trials())
def test_shards(trial):
    assert_trains_as_on_one_device(trial)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "trials", [local_trials, pipeline_trials, sharded_trials, hybrid_trials, worker_trials]
)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_many(chunk, trials, pools):
    """1,500 of them; each chunk draws its own, other ones each time."""

    @settings(max_examples=50)
    @given(trials())
    def train(trial):
        assert_trains_as_on_one_device(trial, pools)

    train()
