"""Callbacks decide, write and stop as on one device, and one worker writes a file."""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.case import Run, case, claim
from tests.helpers import numbered, tiny_data, tiny_model

callbacks = keras.callbacks
VALIDATION = tiny_data(13, seed=1)


@case()
def early_stopping(run: Run):
    """Stops after the same epoch and restores the same weights."""
    stop = callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    return _train(run, stop, epochs=6, optimizer=_too_fast).results()


@case()
def reduce_lr_on_plateau(run: Run):
    slow = callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)
    training = _train(run, slow, epochs=4)
    training.extra["rate"] = training.model.optimizer.learning_rate.numpy()
    return training.results()


@case()
def learning_rate_scheduler(run: Run):
    return _train(run, callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))).results()


@case(core=True)
def model_checkpoint(run: Run):
    """All workers name the same files; what lies there afterwards is whole and right."""
    template = str(run.folder / "epoch{epoch}.weights.h5")
    training = _train(run, callbacks.ModelCheckpoint(template, save_weights_only=True))
    run.barrier()
    for epoch in (1, 2):
        saved = tiny_model()
        saved.load_weights(run.folder / f"epoch{epoch}.weights.h5")
        training.extra.update(numbered(f"epoch{epoch}", saved.get_weights()))
    training.extra["files"] = sorted(file.name for file in run.folder.glob("epoch*"))
    return training.results()


@case()
def model_checkpoint_of_the_best(run: Run):
    path = run.folder / "best.keras"
    keep = callbacks.ModelCheckpoint(str(path), monitor="val_loss", save_best_only=True)
    training = _train(run, keep, epochs=4, optimizer=_too_fast)
    run.barrier()
    training.extra.update(numbered("best", keras.models.load_model(path).get_weights()))
    return training.results()


@case()
def tensorboard(run: Run):
    """One writer for `train` and one for `validation`, however many workers there are."""
    training = _train(run, callbacks.TensorBoard(run.folder / "logs", update_freq=1))
    run.barrier()
    for name in ("train", "validation"):
        files = sorted((run.folder / "logs" / name).glob("*.tfevents.*"))
        events = [event for file in files for event in _scalars(file)]
        training.extra[f"{name}/files"] = len(files)
        training.extra[f"{name}/names"] = [f"{tag} {step}" for tag, step, _ in events]
        training.extra[f"{name}/values"] = [value for *_, value in events]
    return training.results()


@case()
def csv_logger(run: Run):
    training = _train(run, callbacks.CSVLogger(run.folder / "log.csv"))
    run.barrier()
    with open(run.folder / "log.csv") as file:
        header, *rows = csv.reader(file)
    training.extra.update(header=header, rows=np.array(rows, dtype="float64"))
    return training.results()


@case()
def lambda_callback(run: Run):
    calls = []
    record = callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: calls.append(f"begin {epoch}"),
        on_epoch_end=lambda epoch, logs: calls.append(f"end {epoch} {sorted(logs)}"),
        on_train_batch_begin=lambda batch, logs: calls.append(f"batch {batch}"),
        on_train_end=lambda logs: calls.append("stop"),
    )
    training = _train(run, record)
    training.extra["calls"] = calls
    return training.results()


@case()
def weights_read_and_set_while_training(run: Run):
    """A callback may read a model's weights, halve them, and evaluate in between."""

    class Halve(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.set_weights([weight / 2 for weight in self.model.get_weights()])

    return _train(run, Halve()).results()


@case(core=True)
def measure(run: Run):
    """The shares of the time sum up, and samples per second are rows over time; no bit differs."""
    from tfparallel.callbacks import Measure  # in the process of the strategy

    measured = Measure(run.folder, verbose=0)
    training = _train(run, measured)
    for record in [*measured.records, measured.total]:
        assert sum(record.seconds.values()) == pytest.approx(record.wall_s, rel=5e-3)
        assert min(record.seconds.values()) >= 0
        assert record.rows_per_s == pytest.approx(record.rows / record.wall_s)
        if run.row.name in ("multi_worker_2x1", "horovod_2"):  # whose sums are measured
            assert record.seconds["communication"] + record.seconds["imbalance"] > 0
        assert record.utilisation and all(0 <= each <= 1 for each in record.utilisation.values())
    training.extra["rows"] = [record.rows for record in measured.records]
    training.extra["steps"] = [record.steps for record in measured.records]
    return training.results()


@claim(core=True)
def noise_scale(run: Run):
    """Of replicas, ranks and microbatches alike: 13 rows cut by their number, as evenly as can be.

    Of three steps the first and the last are looked at.

    A softmax regression, whose gradients are written out, by McCandlish's two equations. Where
    there is one replica, nothing is told.
    """
    from tfparallel.callbacks import Measure  # in the process of the strategy

    groups, batch, batches = run.row.num_replicas, 13, 3
    measured = Measure(verbose=0, noise_every=2)
    training = run.train(
        build=lambda: keras.Sequential(  # two stages have a layer each
            [keras.Input((6,)), keras.layers.Dense(3), keras.layers.Activation("linear")]
        ),
        optimizer=lambda: keras.optimizers.SGD(0.0),
        rows=batch * batches,
        batch_size=batch,
        epochs=1,
        shuffle=False,
        callbacks=[measured],
    )
    noise = measured.total.details.get("noise")
    if groups == 1:
        assert noise is None
        return
    x, y = tiny_data(batch * batches)
    by_row = _softmax_gradients(training.model, x, y)
    squared, variance = np.mean(
        [_two_equations(each, groups) for each in np.split(by_row, batches)[::2]], axis=0
    )
    np.testing.assert_allclose(noise["squared_gradient"], squared, rtol=1e-4)
    np.testing.assert_allclose(noise["variance"], variance, rtol=1e-4)


def _softmax_gradients(model: keras.Model, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of each row's loss by all weights, `[rows, weights]`: x (p - onehot) and p - onehot."""
    kernel, bias = (weight.astype("float64") for weight in model.get_weights())
    odds = np.exp(x @ kernel + bias)
    error = odds / odds.sum(1, keepdims=True) - np.eye(3)[y]
    return np.concatenate([(x[:, :, None] * error[:, None]).reshape(len(x), -1), error], axis=1)


def _two_equations(by_row: np.ndarray, groups: int) -> tuple[float, float]:
    """Solves E L = |G|^2 + R S / N and E T = |G|^2 + S / N for |G|^2 and S."""
    rows = len(by_row)
    parts = np.array_split(by_row, groups)  # the first ones have a row more
    alone = sum(len(part) / rows * np.sum(part.mean(0) ** 2) for part in parts)
    together = np.sum(by_row.mean(0) ** 2)
    return tuple(np.linalg.solve([[1, groups / rows], [1, 1 / rows]], [alone, together]))


def _train(run: Run, callback, **options):
    return run.train(callbacks=[callback], validation_data=VALIDATION, **options)


def _too_fast() -> keras.Optimizer:
    return keras.optimizers.SGD(3.0)  # the validation loss soon grows


def _scalars(file) -> list[tuple[str, int, float]]:
    """Every number written to an event file as (tag, step, value)."""
    found = []
    for record in tf.data.TFRecordDataset(str(file)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                found.append((value.tag, event.step, float(tf.make_ndarray(value.tensor))))
    return sorted(found)
