"""Comparing what trainings wrote."""

import numpy as np


def assert_equal_results(expected_path, received_path, atol=0.0):
    expected, received = np.load(expected_path), np.load(received_path)
    assert sorted(expected) == sorted(received)
    pairs = {name: (expected[name], received[name]) for name in expected}
    differing = {n: p for n, p in pairs.items() if not np.allclose(*p, rtol=0, atol=atol)}
    assert not differing
