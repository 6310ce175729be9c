"""Comparing what trainings wrote."""

import numpy as np


def assert_equal_results(expected_path, received_path, atol=0.0):
    expected, received = np.load(expected_path), np.load(received_path)
    assert sorted(expected) == sorted(received)
    pairs = {name: (expected[name], received[name]) for name in expected}
    differing = {
        name: f"expected {one}, received {other}"
        for name, (one, other) in pairs.items()
        if one.shape != other.shape or not np.allclose(one, other, rtol=0, atol=atol)
    }
    assert not differing, "\n".join(f"{name}: {text}" for name, text in differing.items())
