"""What is told of a whole training, put together of its epochs."""

import pytest

from tfparallel.measure.record import Record, whole_training
from tfparallel.measure.shares import CATEGORIES


def epoch(number, imbalance_s, slowest):
    seconds = dict.fromkeys(CATEGORIES, 0.0) | {"imbalance": imbalance_s, "compute": 1.0}
    sums = {"traces": 0, "bytes_sent": 0, "collectives_s": 0.0, "iterators_s": 0.0, "python_s": 0.0}
    names = {"callbacks_s": {}, "saving_s": {}, "input_stage": {}, "slowest": slowest}
    return Record(number, 10, 80, 1.0 + imbalance_s, seconds, details={**sums, **names})


@pytest.mark.parametrize("first", ["rank 0", "rank 2"])
def test_the_slowest_rank_is_the_one_that_was_waited_for_longest(first):
    """Not that of the first epoch, in which ranks trace, each as long as it takes."""
    epochs = [epoch(0, 0.1, first), epoch(1, 2.0, "rank 1"), epoch(2, 0.3, "rank 0")]
    assert whole_training(epochs).details["slowest"] == "rank 1"


def test_one_process_has_no_slowest():
    alone = epoch(0, 0.0, "")
    del alone.details["slowest"]
    assert "slowest" not in whole_training([alone, alone]).details
