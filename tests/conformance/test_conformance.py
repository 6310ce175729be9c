"""Every strategy is asked every case: a training must equal that of one device."""

import pytest

from tests.conformance.cases import CASES
from tests.conformance.strategies import STRATEGIES
from tests.helpers import assert_same_training


def pytest_generate_tests(metafunc):
    every_case = metafunc.config.getoption("--every-case")
    pairs = [
        pytest.param(row, case, id=f"{row.name}-{case.name}")
        for row in STRATEGIES
        for case in CASES.values()
        if row.is_asked(case, every_case)
    ]
    metafunc.parametrize("row, case", pairs)


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
