"""Reads pretrained weights as one of several workers, and tells what it took of memory.

For each request, `{"path": a file of weights, "out": how files begin}`, this builds the model anew,
from a seed that no other worker has, reads its weights, and writes what it has of them, built and
read.
"""

import tracemalloc

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.multi_process.answering import answer_requests
from tests.replicas.test_pretrained import NUM_LAYERS, WIDTH, build


def allocated() -> dict[str, int]:
    """What TensorFlow has in use, from here on counted anew."""
    found = tf.config.experimental.get_memory_info("CPU:0")
    tf.config.experimental.reset_memory_stats("CPU:0")
    return found


def load(path: str, out: str) -> dict[str, int]:
    keras.backend.clear_session()
    extended = STRATEGY.extended
    ring, before = extended._ring_all_reduce._ring, allocated()["current"]
    keras.utils.set_random_seed(extended._id_in_cluster)
    with STRATEGY.scope():
        model = build(WIDTH, NUM_LAYERS)
    built, sent = allocated(), ring.bytes_sent
    write_parts(model, f"{out}_built")
    tracemalloc.start()
    try:
        tfparallel.load_weights(model, path)
        of_arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    of_tensors = allocated()["peak"] - built["current"]
    sent = ring.bytes_sent - sent
    write_parts(model, out)
    return {
        "stored": built["current"] - before,
        "of_build": built["peak"] - before,
        "of_arrays": of_arrays,
        "of_tensors": of_tensors,
        "sent": sent,
    }


def write_parts(model: keras.Model, out: str) -> None:
    parts = [weight.value.numbers_here().numpy() for weight in model.weights]
    np.savez(f"{out}_{STRATEGY.extended._id_in_cluster}.npz", *parts)


def start() -> None:
    global STRATEGY
    STRATEGY = tfparallel.ShardedStrategy(min_size=1)


if __name__ == "__main__":
    answer_requests(load, start)
