"""Inputs of microbatches are cut on the host of the first stage, targets on that of the last."""

import numpy as np

from tfparallel.pipeline.batch_on_hosts import batch_on_hosts


def test_each_microbatch_has_its_rows_of_inputs_targets_and_weights():
    x, y, weights = np.arange(6.0).reshape(3, 2), np.arange(3), np.array([0.5, 1.0, 2.0])
    (on_host,) = batch_on_hosts((x, y, weights), "CPU:0", "CPU:1", range(2))
    parts, rows, total = on_host.cut(2)
    assert (rows, total) == ([2, 1], 3)
    for part, own in zip(parts, (slice(0, 2), slice(2, 3)), strict=True):
        for received, expected in zip(part, (x, y, weights), strict=True):
            np.testing.assert_array_equal(received, expected[own])
