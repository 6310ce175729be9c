"""Random models under random strategies train as one device does; a failure is shrunk."""

from hypothesis import HealthCheck, given, settings

from tests.random_models.draw import local_trials, pipeline_trials
from tests.random_models.training import assert_trains_as_on_one_device

ATOL = 1e-6
settings.register_profile("slow", suppress_health_check=list(HealthCheck))


@settings(max_examples=3)
@given(local_trials())
def test_replicas(trial):
    assert_trains_as_on_one_device(trial, ATOL)


@settings(max_examples=2)
@given(pipeline_trials())
def test_pipelines(trial):
    assert_trains_as_on_one_device(trial, ATOL)
