"""A program of one process that drives the cores of two hosts, as a TPU Pod's coordinator does.

The other host is a process of TensorFlow's own server; cores are logical CPUs. It prints a line of
JSON: the largest differences to one device, by what differs.

    python -m tests.tpu.two_hosts CASE
"""

import json
import multiprocessing
import socket
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.helpers import SEED, in_float64, momentum_sgd, open_logical_cpus, tiny_data, train
from tests.tpu.on_cpus import CpuStrategy

CORES = 2  # of each host


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def serve(port: int, address_of_other: str) -> None:
    """The other host, until the process that drives it ends."""
    cluster = {"worker": [address_of_other, f"localhost:{port}"]}
    config = tf.compat.v1.ConfigProto(device_count={"CPU": CORES})
    server = tf.distribute.Server(cluster, "worker", 1, protocol="grpc", config=config)
    multiprocessing.parent_process().join()
    del server


def connect() -> CpuStrategy:
    """A strategy on the cores of both hosts."""
    ours, theirs = free_port(), free_port()
    spawning = multiprocessing.get_context("spawn")
    spawning.Process(target=serve, args=(theirs, f"localhost:{ours}"), daemon=True).start()
    open_logical_cpus(CORES)
    cluster = tf.train.ClusterSpec({"worker": [f"localhost:{ours}", f"localhost:{theirs}"]})
    tf.config.experimental_connect_to_cluster(cluster, "worker", 0)
    return CpuStrategy.on_hosts(2, CORES)


def model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(3),
        ]
    )


def arrays(rows: int) -> dict:
    return {"data": tiny_data, "rows": rows, "batch_size": 6, "shuffle": True}


def shuffled(rows: int) -> dict:
    data = tf.data.Dataset.from_tensor_slices(tiny_data(rows)).shuffle(rows, seed=3)
    return {"x": data.batch(6)}


def whole(rows: int) -> dict:
    data = tf.data.Dataset.from_tensor_slices(tiny_data(rows))
    return {"x": data.batch(8, drop_remainder=True)}


def of_python(rows: int) -> dict:
    x, y = tiny_data(rows)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return x[:8], y[:8]

    return {"x": Batches()}


def drawn(rows: int) -> dict:
    """Each host would leave out other rows."""
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(tiny_data(rows))
    return {"x": data.filter(lambda x, y: tf.random.uniform(()) < 0.5).batch(6)}


def generated(rows: int) -> dict:
    x, y = tiny_data(rows)
    spec = (tf.TensorSpec(x.shape[1:], x.dtype), tf.TensorSpec(y.shape[1:], y.dtype))
    data = tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=spec)
    return {"x": data.batch(6)}


def lanes(strategy: CpuStrategy) -> dict:
    """Of a step on the cores of both hosts, what kinds of boxes there are."""
    with strategy.scope():
        drawn_model = model()
        drawn_model.compile("adam", "mse")
    step = strategy.profile(drawn_model, (np.ones((8, 6)), np.ones((8, 3))))
    kinds = {name: set() for name in step.lanes}
    for box in step.boxes:
        kinds[step.lanes[box.lane]].add(box.kind)
    return {name: sorted(own) for name, own in kinds.items()}


def main(case: str) -> dict:
    strategy = connect()
    if case == "lanes":
        return lanes(strategy)
    strategy._batch_rows = 8 if case == "of_python" else None

    def training(scope):
        keras.utils.set_random_seed(SEED)  # before the data, whose shuffle has it, too
        given = globals()[case](17)
        options = {"build": model, "optimizer": momentum_sgd, "data": None, **given}
        found = train(scope, **options)
        x, y = tiny_data(11)
        found.extra = {
            "predicted": found.model.predict(x, batch_size=8, verbose=0),
            "predicted_whole": found.model.predict(x[:8], batch_size=8, verbose=0),
            "on_batch": found.model.predict_on_batch(x[:7]),
            "trained_on_batch": np.asarray(found.model.train_on_batch(x, y)),
        }
        return found.results()

    with in_float64():
        try:
            ours = training(strategy)
        except ValueError as error:
            return {"error": str(error)}
        reference = training(None)
    return {name: float(np.max(np.abs(ours[name] - reference[name]))) for name in reference}


if __name__ == "__main__":
    print("RESULT", json.dumps(main(sys.argv[1])), flush=True)
