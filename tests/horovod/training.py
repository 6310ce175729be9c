"""What the tests let every rank do: `horovodrun -np 2 python training.py WHAT`."""

import os
import sys
import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.helpers import momentum_sgd, tiny_compile_options, tiny_data


class At(keras.callbacks.Callback):
    """Calls `action` after the third batch on rank 1."""

    def __init__(self, rank, action):
        super().__init__()
        self._action = action if rank == 1 else None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and self._action is not None:
            print(f"PID {os.getpid()}", flush=True)
            self._action()


def process_set() -> dict:
    """Ranks 0 and 1 train together, and rank 2 by itself."""
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])]
    hvd.init(process_sets=sets)
    return {"process_set": sets[hvd.rank() // 2], "gradient_predivide_factor": 2.0}


def main(what: str, folder: str = "") -> None:
    options = process_set() if what == "process sets" else {}
    strategy = tfparallel.HorovodStrategy(stall_timeout_s=6.0, **options)
    rank = strategy.rank
    keras.utils.set_random_seed(1)
    units = 5 + rank if what == "other model" else 5
    with strategy.scope():
        layers = [
            keras.Input((6,)),
            keras.layers.Dense(units, name="middle"),
            keras.layers.Dense(3),
        ]
        if what == "more layers" and rank == 1:
            layers.append(keras.layers.Dense(3))
        model = keras.Sequential(layers)
        model.compile(momentum_sgd(), **tiny_compile_options())
    if what == "restored on rank 0" and rank == 0:
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
    actions = {
        "killed": lambda: os.kill(os.getpid(), 9),
        "stopped": lambda: os.kill(os.getpid(), 19),
        "busy": lambda: time.sleep(120),
    }
    x, y = tiny_data(64)
    callbacks = [At(rank, actions[what])] if what in actions else []
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    if folder:
        np.savez(f"{folder}/{hvd.rank()}.npz", *model.get_weights())
    if what == "process sets":
        hvd.allreduce(tf.zeros(1), name="end")  # a rank that ends takes all of Horovod with it
    print("trained", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
