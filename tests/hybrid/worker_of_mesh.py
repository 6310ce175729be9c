"""Trains on a mesh of the devices of several processes, beside one device."""

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.helpers import (
    assert_same_training,
    in_float64,
    momentum_sgd,
    open_logical_cpus,
    tiny_data,
    train,
)
from tests.hybrid import matrix, matrix_of_features, updates_once
from tests.hybrid.architectures import MODELS
from tests.hybrid.matrix_over_processes import MODELS as WIDE
from tests.hybrid.matrix_over_processes import check
from tests.hybrid.meshes import over_processes
from tests.hybrid.models_of_matrix import dropping, plain, sequences
from tests.multi_process.answering import answer_requests
from tfparallel.callbacks import BackupAndRestore

_MODELS = {
    **MODELS,
    "plain": {"build": plain, "data": tiny_data},
    "dropout": {"build": dropping, "data": sequences},
    "wide": {"build": WIDE["plain"], "data": tiny_data},
}


def answer(
    wrong: int | None = None,
    on_mesh: list | None = None,
    cell: list | None = None,
    features: list | None = None,
    drawn: dict[str, int] | None = None,
    backups: str | None = None,
    updated_once: list | None = None,
    **request,
) -> dict:
    """What a process replies: of a training, one that goes wrong, of a matrix, or a drawn step."""
    if updated_once is not None:
        return {"same": updates_once.check(*updated_once)}
    if drawn is not None:
        return _drawn(drawn)
    if backups is not None:
        return _resumed(backups, **request)
    if on_mesh is not None:
        return {"same": matrix.check(on_mesh)}
    if cell is not None:
        return {"share": check(*cell)}
    if features is not None:
        return {"share": matrix_of_features.check(*features)}
    return _trained(**request) if wrong is None else _wrong(wrong, **request)


def _trained(
    sizes: dict[str, int], model: str = "plain", rank: int | None = None, **options
) -> dict:
    """Fails where anything differs from one device; replies with what this process stores.

    In float64; compressed gradients are of float32.

    Args:
        rank: of `PowerSGD`; None compresses nothing.
        options: of the strategy.
    """
    data = {**_MODELS[model], "rows": 13, "batch_size": 5, "optimizer": _adam}
    atol, is_compressed = 1e-9, rank is not None
    if is_compressed:
        data["optimizer"], atol = momentum_sgd, 2e-5
        options["compression"] = tfparallel.compression.PowerSGD(rank)
    with in_float64():
        keras.backend.clear_session()  # `LayoutOfAnything` goes by the numbers in layers' names
        strategy = over_processes(sizes, **options)
        candidate = train(strategy, **data)
        stored = [_numbers_of(v) for v in candidate.model.trainable_weights]
        whole = [int(tf.size(v)) for v in candidate.model.trainable_weights]
        keras.backend.clear_session()
        expected = train(None, **data)
    if is_compressed:
        (report,) = strategy.compression_report()
        assert report.bytes_sent < report.bytes_uncompressed, report
    assert_same_training(expected, candidate, atol=atol)
    return {
        "stored": sum(stored),
        "whole": sum(whole),
        "shown": str(strategy),
        "summary": str(strategy.summary(candidate.model)),
    }


def _drawn(sizes: dict[str, int]) -> dict:
    """The step of a mesh of these sizes: its lanes, with the kinds of what ran on each."""
    strategy = over_processes(sizes)
    with strategy.scope():
        model = plain()
        model.compile("adam", "mse")
    x = tf.ones((8, 6))
    before = [np.array(v) for v in model.variables]
    step = strategy.profile(model, (x, x[:, :3]))
    for one, other in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(one, np.array(other))
    kinds = [
        sorted({box.kind for box in step.boxes if box.lane == i}) for i in range(len(step.lanes))
    ]
    return {"kinds": dict(zip(step.lanes, kinds, strict=True)), "boxes": step.boxes}


def _resumed(folder: str, sizes: dict[str, int], killed: int | None = None) -> dict:
    """Goes on with what is in `folder`; fails where the end differs from one device.

    Args:
        folder: for backups, of all processes.
        sizes: of the axes of the mesh.
        killed: the rank that the operating system ends, behind the fourth of twelve batches.
    """
    data = {**_MODELS["plain"], "rows": 26, "batch_size": 5, "optimizer": _adam}
    batches: list[int] = []
    with in_float64():
        keras.backend.clear_session()  # layouts go by the numbers in layers' names
        strategy = over_processes(sizes)

        def count(batch: int, logs: dict | None = None) -> None:
            batches.append(batch)
            if len(batches) == 4 and strategy.extended._id_in_cluster == killed:
                os.kill(os.getpid(), signal.SIGKILL)

        counts = keras.callbacks.LambdaCallback(on_train_batch_end=count)
        backups = BackupAndRestore(folder, save_freq=1, asynchronous=False)
        candidate = train(strategy, callbacks=[backups, counts], **data)
        keras.backend.clear_session()
        assert_same_training(train(None, **data), candidate, atol=1e-9)
    return {"batches": len(batches)}


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


def _wrong(wrong: int, sizes: dict[str, int], transport: str = "auto") -> dict:
    """One process's memory fails after the third step: replies with what the training says."""
    strategy = over_processes(sizes, transport, check_weights_every=2)
    rank = strategy.extended._id_in_cluster

    def fail(batch, logs=None):
        if batch == 2 and rank == wrong:
            with tf.init_scope():
                for copy in _copies(strategy_model.trainable_variables[0]):
                    copy.assign_add(tf.ones_like(copy) / 8)

    fails = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        strategy_model = plain()
        strategy_model.compile("sgd", "mse")
    x = tf.ones((40, 6))
    try:
        strategy_model.fit(x, x[:, :3], batch_size=5, verbose=0, callbacks=[fails])
    except Exception as error:
        return {"told": str(error)}
    return {"told": ""}


def _numbers_of(variable: keras.Variable) -> int:
    """What this process stores of it."""
    return sum(x.shape.num_elements() for x in _copies(variable))


def _copies(variable: keras.Variable) -> list[tf.Variable]:
    """What this process has of it: copies, parts, or pieces."""
    behind = variable.value
    parts = getattr(behind, "parts", None) or behind.values
    return list({id(x): x for x in tf.nest.flatten(list(parts))}.values())


if __name__ == "__main__":
    count = int(sys.argv[1])
    answer_requests(answer, lambda: open_logical_cpus(count))
