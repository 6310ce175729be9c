"""Trains on a mesh of the devices of several processes, beside one device, in float64."""

import sys

import keras
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, in_float64, open_logical_cpus, tiny_data, train
from tests.hybrid.architectures import MODELS
from tests.hybrid.models_of_matrix import dropping, plain, sequences
from tests.multi_process.answering import answer_requests
from tests.tensor_parallel.layouts import LayoutOfAnything

_ATOL = 1e-9
_MODELS = {
    **MODELS,
    "plain": {"build": plain, "data": tiny_data},
    "dropout": {"build": dropping, "data": sequences},
}


def answer(sizes: dict[str, int], model: str = "plain", transport: str = "auto", **options) -> dict:
    """Fails where anything differs from one device; replies with what this process stores.

    Args:
        options: of the strategy.
    """
    data = {**_MODELS[model], "rows": 13, "batch_size": 5, "optimizer": _optimizer}
    with in_float64():
        keras.backend.clear_session()  # `LayoutOfAnything` goes by the numbers in layers' names
        strategy = _strategy(sizes, transport=transport, **options)
        candidate = train(strategy, **data)
        stored = [_numbers_of(v) for v in candidate.model.trainable_weights]
        whole = [int(tf.size(v)) for v in candidate.model.trainable_weights]
        keras.backend.clear_session()
        assert_same_training(train(None, **data), candidate, atol=_ATOL)
    return {"stored": sum(stored), "whole": sum(whole), "shown": str(strategy)}


def _optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


def _strategy(sizes, **options):
    if "shard" in sizes:
        options["shard"] = tfparallel.Sharding(min_size=1)
    if "pipeline" in sizes:
        options["pipeline"] = tfparallel.PipelineOptions(2)
    if "model" in sizes:
        options["layout_map"] = LayoutOfAnything(None)
    return tfparallel.HybridStrategy(sizes, **options)


def _numbers_of(variable: keras.Variable) -> int:
    """What this process stores of it."""
    behind = variable.value
    parts = getattr(behind, "parts", None) or behind.values
    copies = {id(x): x for x in tf.nest.flatten(list(parts))}.values()
    return sum(x.shape.num_elements() for x in copies)


if __name__ == "__main__":
    count = int(sys.argv[1])
    answer_requests(answer, lambda: open_logical_cpus(count))
