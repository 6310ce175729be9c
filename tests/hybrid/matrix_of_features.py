"""Cells in which each thing that a training may have is a factor of its own, over two processes.

In `matrix.py` BatchNorm and Dropout, or clipping and averages, are values of one factor, and never
meet. Here any two of them do, and compression is among them; two devices are in each process.
"""

import functools

import keras
import numpy as np
from keras import layers

import tfparallel
from tests.helpers import Training, assert_same_training, in_float64, numbered, train
from tests.hybrid.matrix import MEMORIES, SCHEDULES, Interrupt
from tests.hybrid.matrix_over_processes import BATCHES
from tests.hybrid.meshes import over_processes
from tests.hybrid.models_of_matrix import InParts, TwoOptimizers
from tests.hybrid.pairwise import pairwise
from tfparallel.callbacks import BackupAndRestore

_MICROBATCHES = 2  # of each process
MESHES: dict[str, tuple[dict, dict]] = {
    "data": ({"data": 4}, {}),
    "full shard": ({"shard": 4}, {}),
    "hybrid shard": ({"data": 2, "shard": 2}, {}),
    "tensor": ({"data": 2, "model": 2}, {}),
    **{
        f"pipeline, {name}": ({"data": 2, "pipeline": 2}, options)
        for name, options in SCHEDULES.items()
    },
}
RUNS = ("", "killed and restored", "restored on another mesh")
FACTORS = {
    "mesh": tuple(MESHES),
    "batch": tuple(BATCHES),
    "memory": tuple(MEMORIES),
    "run": RUNS,
    **{
        name: ("", name)
        for name in (
            "global clip",
            "accumulation",
            "averages",
            "mixed precision",
            "batch norm",
            "dropout",
            "masks",
            "compression",
            "two steps at once",
            "two optimizers",
        )
    },
}
# Before the first step, by the name of each in "Combining": a process has its part of each sum.
REFUSED = {("full shard", "compression"): "`compression`, `check_weights_every`"}
CELLS = pairwise(FACTORS, never=REFUSED)


def check(folder: str, mesh: str, *features: str) -> float:
    """Fails where a cell differs from one device; gives the share of bytes that are sent.

    Args:
        folder: for backups, of all processes.
    """
    with in_float64():
        own = strategy_of(mesh, features)
        trained = functools.partial(_trained, mesh=mesh, features=features)
        if set(features).isdisjoint(RUNS[1:]):
            received = trained(own)
        else:
            other = _another(mesh) if RUNS[2] in features else mesh
            _interrupt(strategy_of(other, features), other, features, folder)
            received = trained(own, callbacks=[_backups(folder)])
        keras.backend.clear_session()
        expected = trained(None)
    assert_same_training(_results(expected), _results(received), atol=_atol(features))
    reports = own.compression_report()
    return min([each.bytes_sent / each.bytes_uncompressed for each in reports], default=1.0)


def _atol(features: tuple[str, ...]) -> float:
    """Compressed gradients are of float32; of float16 one ulp at 1 is 1e-3."""
    if "mixed precision" in features:
        return 1e-2
    return 2e-4 if "compression" in features else 1e-9


def _another(mesh: str) -> str:
    """A mesh that takes what this one does."""
    names = [name for name in MESHES if name != "full shard"]
    return names[(names.index(mesh) + 3) % len(names)] if mesh in names else names[0]


def strategy_of(mesh: str, features: tuple[str, ...]) -> tfparallel.HybridStrategy:
    keras.backend.clear_session()  # layouts go by the numbers in layers' names
    sizes, schedule = MESHES[mesh]
    (memory,) = [MEMORIES[name] for name in features if name in MEMORIES]
    options: dict = {
        "memory": memory,
        "seed_by": "row" if "dropout" in features else "replica",
        # All of a gradient of five rows.
        "compression": tfparallel.compression.PowerSGD(7) if "compression" in features else None,
    }
    if "pipeline" in sizes:
        batch_norm = "deferred" if "batch norm" in features else "per_microbatch"
        options["pipeline"] = tfparallel.PipelineOptions(
            _MICROBATCHES, batch_norm=batch_norm, **schedule
        )
    return over_processes(sizes, **options)


def _interrupt(strategy, mesh: str, features: tuple[str, ...], folder: str) -> None:
    try:
        _trained(strategy, mesh, features, callbacks=[_backups(folder), Interrupt()])
    except KeyboardInterrupt:
        return
    raise AssertionError("The training was not interrupted.")


def _backups(folder: str) -> BackupAndRestore:
    return BackupAndRestore(folder, save_freq=1, asynchronous=False)


def _trained(strategy, mesh: str, features: tuple[str, ...], **options) -> Training:
    """On `mesh`, or (`strategy` is None) on one device as BatchNorm normalises there."""
    (rows, batch_size), *_ = [BATCHES[name] for name in features if name in BATCHES]
    steps = 2 if strategy is not None and "two steps at once" in features else 1
    has_own = "two optimizers" in features

    def compile_options() -> dict:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = None if has_own else ["accuracy"]  # its step has none
        return {"loss": loss, "metrics": metrics, "steps_per_execution": steps}

    return train(
        strategy,
        build=lambda: _model(features, "pipeline" in mesh, strategy is None),
        compile_options=compile_options,
        # At the end of an epoch Keras would ask one that trains nothing for averages.
        optimizer=keras.optimizers.SGD if has_own else lambda: _optimizer(features),
        data=_words,
        rows=rows,
        batch_size=batch_size,
        **options,
    )


def _model(features: tuple[str, ...], has_microbatches: bool, is_reference: bool) -> keras.Model:
    """Layers for four stages; a gradient of each is of no more ranks than the batch has rows."""
    options = {"dtype": "mixed_float16"} if "mixed precision" in features else {}
    x = keras.Input((5,), dtype="int32")
    has_mask = "masks" in features
    y = layers.Embedding(7, 32, mask_zero=has_mask, name="embedding", **options)(x)
    y = layers.GlobalAveragePooling1D(name="pooled", **options)(y)
    y = layers.Dense(32, "tanh", name="dense_0", **options)(y)
    if "batch norm" in features:
        y = _norm(has_microbatches, is_reference, options)(y)
    y = layers.Dense(32, "tanh", name="dense_1", **options)(y)
    if "dropout" in features:
        y = layers.Dropout(0.3, name="dropped", **options)(y)
    y = layers.Dense(32, "tanh", name="dense_2", **options)(y)
    scores = layers.Dense(3, name="dense_3", dtype="float32" if options else None)(y)
    if "two optimizers" not in features:
        return keras.Model(x, scores)
    model = TwoOptimizers(x, scores)
    model.use(lambda: _optimizer(features))
    return model


def _norm(has_microbatches: bool, is_reference: bool, options: dict) -> layers.Layer:
    """Offsets begin away from zero, as in `models_of_matrix.normalized`."""
    offsets = keras.initializers.RandomUniform(-0.5, 0.5, seed=1)
    options = {"momentum": 0.8, "beta_initializer": offsets, "name": "norm", **options}
    if has_microbatches and is_reference:
        return InParts(2 * _MICROBATCHES, **options)
    return layers.BatchNormalization(synchronized=not has_microbatches, **options)


def _optimizer(features: tuple[str, ...]) -> keras.Optimizer:
    options: dict = {"global_clipnorm": 0.1} if "global clip" in features else {}
    if "accumulation" in features:
        options["gradient_accumulation_steps"] = 2
    if "averages" in features:
        options |= {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **options)
    if "mixed precision" not in features:
        return optimizer
    # Times 2**12 the embedding's gradient is 9e3 on one device, and that of the mean of a replica's
    # own row five times as much: some overflowed there in float16, and on one device did not.
    return keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=2.0**4, dynamic_growth_steps=2
    )


def _words(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Many are padding, never all of a row."""
    random = np.random.default_rng(0)
    words = random.integers(0, 7, (rows, 5)) * (random.uniform(size=(rows, 5)) < 0.7)
    words[:, 0] = np.maximum(words[:, 0], 1)
    return words, random.integers(0, 3, rows)


def _results(training: Training) -> dict[str, np.ndarray]:
    """What is compared: with two optimizers the slots of both."""
    own = getattr(training.model, "both", [])
    slots = [v.numpy() for optimizer in own for v in optimizer.variables]
    return training.results() | numbered("own_optimizer", slots)
