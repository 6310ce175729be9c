"""What the tests let every rank do: `horovodrun -np 3 python -m tests.horovod.training WHAT`."""

import os
import sys
import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.helpers import momentum_sgd, tiny_compile_options, tiny_data
from tfparallel.compression import PowerSGD
from tfparallel.coordination.agreement import DisagreementError


class AfterThreeBatches(keras.callbacks.Callback):
    """Calls `action` after the third batch."""

    def __init__(self, action):
        super().__init__()
        self._action = action

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self._action()


def fit(strategy, units=5, restored=False, callbacks=(), steps_per_execution=1):
    """A trained model; `restored` begins with ones instead of random weights, and is in motion."""
    keras.backend.clear_session()  # names begin anew, whatever a rank has built before
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [
            keras.Input((6,)),
            keras.layers.Dense(units, name="middle"),
            keras.layers.Dense(3),
        ]
        model = keras.Sequential(layers)
        model.compile(
            momentum_sgd(), **tiny_compile_options(), steps_per_execution=steps_per_execution
        )
        model.optimizer.build(model.trainable_variables)
    if restored:
        for weight, momentum in zip(model.variables, model.optimizer.momentums, strict=True):
            weight.assign(np.ones(weight.shape))
            momentum.assign(np.full(weight.shape, 0.01))
    x, y = tiny_data(64)
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=list(callbacks))
    return model


def hold_up():
    """Rank 1 stops, and rank 2 has something else to do, after the third batch."""
    strategy = tfparallel.HorovodStrategy(stall_timeout_s=6.0)
    action = {
        0: lambda: None,
        1: lambda: os.kill(os.getpid(), 19),
        2: lambda: time.sleep(120),
    }[strategy.rank]
    fit(strategy, callbacks=[AfterThreeBatches(action)])
    print("trained", flush=True)


def sums_of_halves(strategy):
    """Sums over three ranks of values that differ by rank and place; the collectives of them."""
    parts = [np.arange(5) * rank / 8 for rank in range(3)]
    mine = parts[strategy.rank]

    @tf.function
    def add():
        tensors = [tf.cast(mine, dtype) for dtype in (tf.bfloat16, tf.float32, tf.float16)]
        return strategy.extended._transport.all_reduce_sum(tensors)

    for total in add():
        np.testing.assert_array_equal(tf.cast(total, tf.float32), np.sum(parts, 0))
    operations = add.get_concrete_function().graph.get_operations()
    return sorted(each.type for each in operations if each.type.startswith("Horovod"))


def in_process_sets(folder):
    """Ranks 0 and 1 train together from what rank 0 has restored, and rank 2 by itself.

    Then ranks 0 and 1 build different models, all ask for a reduction that needs MPI, and all three
    train with compression.
    """
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])]
    hvd.init(process_sets=sets)
    options = {"process_set": sets[hvd.rank() // 2], "gradient_predivide_factor": 2.0}
    model = fit(tfparallel.HorovodStrategy(**options), restored=hvd.rank() != 1)
    np.savez(f"{folder}/{hvd.rank()}.npz", *model.get_weights())
    try:
        fit(tfparallel.HorovodStrategy(**options), units=5 + hvd.rank())
    except DisagreementError as error:
        print(error, flush=True)
    try:
        tfparallel.HorovodStrategy(reduction="adasum")
    except ValueError as error:
        print(error, flush=True)
    print(*sums_of_halves(tfparallel.HorovodStrategy(compression="bf16")), flush=True)
    strategy = tfparallel.HorovodStrategy(compression=PowerSGD(2))
    model = fit(strategy, restored=True, steps_per_execution=4)
    np.savez(f"{folder}/compressed{hvd.rank()}.npz", *model.get_weights())
    hvd.allreduce(tf.zeros(1), name="end")  # a rank that ends takes all of Horovod with it


def in_buckets():
    """Trains 16 steps; the largest of the gradients fills a bucket."""
    fit(tfparallel.HorovodStrategy(bucket_bytes=6 * 512 * 4), units=512)


if __name__ == "__main__":
    programs = {"hold up": hold_up, "in process sets": in_process_sets, "in buckets": in_buckets}
    programs[sys.argv[1]](*sys.argv[2:])
