"""Every strategy is asked every case: a training must equal that of one device."""

import pytest

from tests.conformance.cases import CASES
from tests.conformance.strategies import (
    RANKS_AS_ON_GPUS,
    SHARDED_RANKS_AS_ON_GPUS,
    SHARDED_WORKERS_AS_ON_GPUS,
    STRATEGIES,
    TENSORFLOW_COLLECTIVES,
    WORKERS_AS_ON_GPUS,
)
from tests.helpers import assert_same_training
from tests.slices import slice_of_this_run

_OF_OTHERS = [
    (
        TENSORFLOW_COLLECTIVES,
        "models.mlp",
        "collectives.a_group_is_on_one_kind_of_device",
        "inputs.sparse_gradients_of_many_sizes",
        "inputs.sparse_gradients_of_many_sizes_in_a_loop",
        "optimizers.sparse_gradients_stay_sparse_in_a_loop",
    ),
    (
        WORKERS_AS_ON_GPUS,
        "batch_norm.the_average_is_what_is_saved",
        "collectives.a_group_is_on_one_kind_of_device",
        "inputs.sparse_gradients_of_many_sizes",
        "inputs.steps_per_execution",
        "metrics.binary",
        "models.positions",
        "optimizers.sparse_gradients_stay_sparse",
    ),
    (
        RANKS_AS_ON_GPUS,
        "batch_norm.the_average_is_what_is_saved",
        "inputs.last_batch_of_one_row",
        "inputs.steps_per_execution",
    ),
    *(
        (
            row,
            "inputs.last_batch_of_one_row",
            "inputs.steps_per_execution",
            "models.embedding",
            "optimizers.global_clipnorm",
            "saving.checkpoint",
        )
        for row in (SHARDED_WORKERS_AS_ON_GPUS, SHARDED_RANKS_AS_ON_GPUS)
    ),
]


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--everything")
    slice_of_pairs = slice_of_this_run()
    pairs = [
        (row, case)
        for row in STRATEGIES
        for case in CASES.values()
        if row.is_asked(case, everything, slice_of_pairs)
    ]
    pairs += [(row, CASES[name]) for row, *names in _OF_OTHERS for name in names]
    ids = [f"{row.name}-{case.name}" for row, case in pairs]
    metafunc.parametrize("row, case", pairs, ids=ids)


@pytest.mark.timeout(300)
def test_conforms(row, case, workers_of, one_device):
    workers = workers_of(row)
    if not case.claims:
        one_device.start(case.name)  # computes while the workers do
    workers.start(case.name)
    candidates = workers.results()
    if not case.claims:
        reference = one_device.results(case.name)
        for candidate in candidates:
            assert_same_training(reference, candidate, case.atol)
