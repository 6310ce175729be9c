"""The program of two workers that train in rounds of local steps, over the ring or Horovod."""

import os

import keras
import numpy as np

import tfparallel
from tests.helpers import open_logical_cpus
from tests.multi_process.answering import answer_requests
from tfparallel.compression import DiLoCo, LocalSGD

ROWS, BATCH, EPOCHS = 48, 13, 2  # batches of 13, 13, 13 and 9 rows
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0),
    "adam": lambda: keras.optimizers.Adam(0.01),
}
MEETINGS = {
    "none": lambda: None,
    "every_1": lambda: LocalSGD(every=1),
    "every_2": lambda: LocalSGD(every=2),
    "every_3": lambda: LocalSGD(every=3),
    "every_4": lambda: LocalSGD(every=4),
    "plain_outer": lambda: DiLoCo(every=1, outer=lambda: keras.optimizers.SGD(1.0)),
    "plain_outer_3": lambda: DiLoCo(every=3, outer=lambda: keras.optimizers.SGD(1.0)),
    "plain_outer_4": lambda: DiLoCo(every=4, outer=lambda: keras.optimizers.SGD(1.0)),
    "diloco": lambda: DiLoCo(every=2),
}


class Killed(Exception):
    """What a training ends with in the middle of a round."""


class EndAfter(keras.callbacks.Callback):
    """Ends the training after so many batches."""

    def __init__(self, batches: int):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise Killed


def data() -> tuple[np.ndarray, np.ndarray]:
    """Rows of 6 numbers and their class of three."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 6)).astype("float32")
    return x, np.argmax(x @ rng.normal(size=(6, 3)), 1)


def build(optimizer: str, batch_norm: bool) -> keras.Model:
    """A small classifier, of the same weights each time."""
    keras.utils.set_random_seed(1)
    norm = [keras.layers.BatchNormalization()] if batch_norm else []
    layers = [keras.layers.Dense(8, activation="tanh"), *norm, keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"])
    return model


def bytes_sent(strategy) -> int:
    ring = getattr(strategy.extended, "_ring_all_reduce", None)
    return 0 if ring is None else ring._ring.bytes_sent


def train(meeting, optimizer="sgd", batch_norm=False, epochs=EPOCHS, folder=None):
    """What ranks reply: history, weights before and after the last round, bytes of the last epoch.

    With a `folder` for backups the training is stopped in the middle of a round and done again.
    """
    kind = "HorovodStrategy" if "HOROVOD_RANK" in os.environ else "MultiWorkerMirroredStrategy"
    strategy = getattr(tfparallel, kind)(compression=MEETINGS[meeting]())
    x, y = data()
    options = {"batch_size": BATCH, "epochs": epochs, "verbose": 0, "shuffle": False}
    for end_after in (6, None) if folder else (None,):
        with strategy.scope():
            model = build(optimizer, batch_norm)
        callbacks = [EndAfter(end_after)] if end_after else []
        if folder:
            backup = tfparallel.callbacks.BackupAndRestore(folder, save_freq=1)
            callbacks.insert(0, backup)
        try:
            before = bytes_sent(strategy)
            history = model.fit(x, y, callbacks=callbacks, validation_data=(x, y), **options)
        except Killed:
            continue
    return {
        "history": history.history,
        "weights": [w.tolist() for w in model.get_weights()],
        "own": [v.value.values[0].numpy().tolist() for v in model.trainable_variables],
        "bytes": bytes_sent(strategy) - before,
    }


if __name__ == "__main__":
    answer_requests(train, lambda: open_logical_cpus(1))
