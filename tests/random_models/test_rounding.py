"""What a random model of low precision may differ by."""

import numpy as np
import pytest

from tests.random_models.rounding import beyond_rounding
from tests.random_models.spec import (
    Distribution,
    Fit,
    Layer,
    Model,
    Nested,
    Node,
    Output,
    Trial,
)
from tests.random_models.training import assert_trains_as_on_one_device

ATOL = 0.1


def _beyond(expected, received, *moved) -> dict:
    results = [{"predict/0": np.asarray(each)} for each in (expected, received, *moved)]
    return beyond_rounding(results[0], results[1], results[2:], ATOL)


def test_as_far_as_weights_of_one_place_more_move_it():
    assert _beyond([92.5, 0.1], [92.5, 0.5], [92.25, 0.1], [92.5, 0.2]) == {}


def test_further_than_that():
    found = _beyond([92.5, 0.1], [92.5, 0.7], [92.25, 0.1], [92.5, 0.2])
    assert found == {"predict/0": (pytest.approx(0.6), 0.5)}


def test_what_nothing_moves_may_not_differ():
    assert _beyond([92.5, 0.1], [92.5, 0.5], [92.5, 0.1])


def test_a_number_that_is_none_is_not_rounding():
    assert _beyond([1.0], [np.nan], [3.0])


def _that_diverges() -> Trial:
    """Its loss is 25 times larger after two steps; a prediction near 0 differs by 0.2."""
    gru = {"kind": "GRU", "units": 3, "return_sequences": True}
    last = {"kind": "GRU", "units": 4, "return_sequences": False}
    first = Nested("sequential", (Layer("adds_loss"), Layer("recurrent", gru)))
    nodes = (
        Node((0,), first),
        Node((2,), Nested("sequential", (Layer("layer_norm"),))),
        Node((3,), Layer("recurrent", last)),
    )
    outputs = (
        Output(1, 2, "sum_of_squares", "sum", 1.0, (), ("mse",)),
        Output(4, 2, "sum_of_squares", "mean", 1.0, ("mae",), ()),
    )
    inputs = ((4, 3), (4, 4, 2))
    model = Model(inputs, nodes, outputs, "mixed_bfloat16", "mixed_bfloat16")
    options = {"learning_rate": 0.05, "momentum": 0.9, "use_ema": True, "ema_momentum": 0.5}
    sharded = {"devices": ["CPU:0", "CPU:1"], "shard": "optimizer", "min_size": 10}
    return Trial(model, Fit("SGD", options, 6, 6, None, 1), Distribution("Sharded", sharded))


@pytest.mark.long
def test_a_model_that_diverges_in_bfloat16():
    assert_trains_as_on_one_device(_that_diverges())
