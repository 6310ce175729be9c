"""The program of two workers that make variables, over the ring or Horovod."""

import os

import keras
import numpy as np

import tfparallel
from benchmarks.network import sent_by_this_process
from tests.helpers import open_logical_cpus
from tests.multi_process.answering import answer_requests

_strategies: list = []


def make(seeds: list[int], shape: list[int], dtype: str) -> dict:
    """The weight of `shape` that each worker draws with its own seed, and what making it sent."""
    is_horovod = "HOROVOD_RANK" in os.environ
    if not _strategies:
        kind = "HorovodStrategy" if is_horovod else "MultiWorkerMirroredStrategy"
        _strategies.append(getattr(tfparallel, kind)())
    strategy = _strategies[0]
    rank = strategy.extended._id_in_cluster
    keras.utils.set_random_seed(seeds[rank])
    before = sent_by_this_process()
    with strategy.scope():
        weight = keras.Variable("random_normal", tuple(shape), dtype)
    # Of what is still on its way, an exchange of all workers waits for the end.
    strategy.extended._agreement.exchange("count bytes", None)
    value = weight.numpy().astype("float64")
    sent = sent_by_this_process() - before
    keras.utils.set_random_seed(seeds[0])
    expected = np.asarray(keras.Variable("random_normal", tuple(shape), dtype)).astype("float64")
    return {"is_that_of_rank_zero": bool((value == expected).all()), "bytes": sent}


if __name__ == "__main__":
    answer_requests(make, lambda: open_logical_cpus(1))
