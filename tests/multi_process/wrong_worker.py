"""One of three workers, of which one's memory fails: `python wrong_worker.py RANK bit|NaN`."""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

import tfparallel

wrong_rank, what = int(sys.argv[1]), sys.argv[2]
is_horovod = "HOROVOD_RANK" in os.environ
name = "HorovodStrategy" if is_horovod else "MultiWorkerMirroredStrategy"
strategy = getattr(tfparallel, name)(check_weights_every=4)
rank = strategy.rank if is_horovod else strategy.cluster_resolver.task_id


class Fails(keras.callbacks.Callback):
    """After step 6, what is wrong is in the memory of one rank."""

    def on_train_batch_end(self, batch, logs=None):
        print("step", batch + 1, flush=True)
        if batch == 5 and rank == wrong_rank:
            copy = self.model.trainable_variables[0].value.values[0]
            value = copy.numpy()
            if what == "bit":
                value.view(np.uint32)[2, 1] ^= 1  # the last of the mantissa
            else:
                value[0, 0] = np.nan
            with tf.init_scope():
                copy.assign(value)


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
x = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
model.fit(x, x[:, :2], batch_size=12, shuffle=False, verbose=0, callbacks=[Fails()])
print("trained", flush=True)
