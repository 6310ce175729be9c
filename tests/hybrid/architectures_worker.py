"""Trains an architecture on a mesh, or on one in each of several processes, beside one device.

In float64, so that what is wrong by more than rounding shows. In several processes `TF_CONFIG` says
which one this is.
"""

import os
import sys

import keras

import tfparallel
from tests.helpers import assert_same_training, in_float64, open_logical_cpus, train
from tests.hybrid.architectures import MODELS
from tests.hybrid.meshes import hybrid
from tests.multi_process.answering import answer_requests

_ATOL = 1e-9


def answer(model: str, sizes: dict[str, int]) -> dict:
    """Fails where weights, slots, logs or predictions differ from those of one device."""
    options = {**MODELS[model], "rows": 10, "batch_size": 5}
    with in_float64():
        keras.backend.clear_session()  # `LayoutOfAnything` goes by the numbers in layers' names
        if "TF_CONFIG" in os.environ:  # which has to be the first thing that is made
            strategy = tfparallel.MultiWorkerMirroredStrategy(inner=lambda: hybrid(sizes))
        else:
            strategy = hybrid(sizes)
        candidate = train(strategy, **options)
        keras.backend.clear_session()
        assert_same_training(train(None, **options), candidate, atol=_ATOL)
    return {}


if __name__ == "__main__":
    count = int(sys.argv[1])
    answer_requests(answer, lambda: open_logical_cpus(count))
