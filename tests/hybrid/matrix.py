"""The cells of the matrix: which there are, and how one is trained beside one device."""

import functools
import tempfile
from collections.abc import Sequence

import keras
import numpy as np

import tfparallel
from tests.helpers import assert_same_training, numbered, train
from tests.hybrid.meshes import hybrid
from tests.hybrid.models_of_matrix import MODELS, data_of
from tests.hybrid.pairwise import pairwise
from tfparallel.callbacks import BackupAndRestore
from tfparallel.pipeline.extended import PipelineExtended
from tfparallel.replicas.base import KerasStrategy

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "zero bubble": {"schedule": "zero_bubble"},
    "interleaved": {"schedule": "interleaved_1f1b", "chunks_per_device": 2},
}
_PIPELINES = {
    "pipeline": {"pipeline": 4},
    "data x pipeline": {"data": 2, "pipeline": 2},
    "shard x pipeline": {"shard": 2, "pipeline": 2},
    "pipeline x model": {"pipeline": 2, "model": 2},
}
MESHES: dict[str, tuple[dict, dict]] = {
    "data 4": ({"data": 4}, {}),
    "shard 4": ({"shard": 4}, {}),
    "shard 4, ZeRO 1": ({"shard": 4}, {"what": "optimizer"}),
    "shard 4, ZeRO 2": ({"shard": 4}, {"what": "gradients"}),
    "model 4": ({"model": 4}, {}),
    "data x shard": ({"data": 2, "shard": 2}, {}),
    "data x model": ({"data": 2, "model": 2}, {}),
    "shard x model": ({"shard": 2, "model": 2}, {}),
    **{
        f"{name}, {schedule}": ({**sizes, **smaller}, options)
        for name, sizes in _PIPELINES.items()
        for schedule, options in SCHEDULES.items()
        for smaller in [{"pipeline": 2} if schedule == "interleaved" else {}]
    },
}
# As some of those, with weights that are kept whole beside their pieces: a matrix of its own.
MESHES_THAT_KEEP: dict[str, tuple[dict, dict]] = {
    "shard x model, ZeRO 1": ({"shard": 2, "model": 2}, {"what": "optimizer"}),
    "shard x model, ZeRO 2": ({"shard": 2, "model": 2}, {"what": "gradients"}),
    **{
        f"shard x pipeline, {schedule}, ZeRO {stage}": (
            MESHES[f"shard x pipeline, {schedule}"][0],
            {**options, "what": what},
        )
        for schedule, options in SCHEDULES.items()
        for stage, what in {1: "optimizer", 2: "gradients"}.items()
    },
}
# Stages of several devices, which take microbatches in turn, or compute a stage in parts.
_ONE_TWO_ONE = ["CPU:0", ["CPU:1", "CPU:2"], "CPU:3"]
_TWO_EACH = [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]
_IN_PARTS = ["cpu:0", "cpu:0", "cpu:1", "cpu:2", "cpu:3", "cpu:3"]
MESHES_OF_SEVERAL: dict[str, tuple[dict, dict]] = {
    **{
        f"1 + 2 + 1 in turn, {schedule}": (
            {"pipeline": 3},
            {**SCHEDULES[schedule], "devices": _ONE_TWO_ONE},
        )
        for schedule in ("gpipe", "1f1b", "zero bubble")
    },
    **{
        f"2 + 2 in turn, {schedule}": (
            {"pipeline": 2},
            {**SCHEDULES[schedule], "devices": _TWO_EACH},
        )
        for schedule in ("1f1b", "interleaved")
    },
    "chosen, in turn": ({"pipeline": 4}, {"num_stages": 3}),
    **{
        f"1 + 2 + 1 in parts, {schedule}": (
            {"pipeline": 3, "model": 2},
            {**SCHEDULES[schedule], "devices": _IN_PARTS},
        )
        for schedule in ("1f1b", "zero bubble")
    },
}
# Three axes, on eight devices.
MESHES_OF_EIGHT: dict[str, tuple[dict, dict]] = {
    "data x shard x model": ({"data": 2, "shard": 2, "model": 2}, {}),
    **{
        f"data x shard x pipeline, {schedule}": (
            {"data": 2, "shard": 2, "pipeline": 2},
            SCHEDULES[schedule],
        )
        for schedule in ("1f1b", "zero bubble")
    },
    "data x pipeline x model": ({"data": 2, "pipeline": 2, "model": 2}, {}),
    "shard x pipeline x model": ({"shard": 2, "pipeline": 2, "model": 2}, {}),
}
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped each": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.05),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "accumulated, clipped": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.1
    ),
    "averaged": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**10, dynamic_growth_steps=2
    ),
}
BATCHES = {"even": (24, 8), "uneven": (26, 13), "fewer rows than replicas": (7, 3)}
RUNS = ("a step", "two steps", "killed and restored", "restored on another mesh")
MEMORIES = {
    "kept": None,
    "computed again": tfparallel.MemoryPolicy("full"),
    "on the host": tfparallel.MemoryPolicy(offload="full"),
    "again, from the host": tfparallel.MemoryPolicy("full", offload="full"),
}
FACTORS = {
    "mesh": tuple(MESHES),
    "optimizer": tuple(OPTIMIZERS),
    "model": tuple(MODELS),
    "batch": tuple(BATCHES),
    "run": RUNS,
    "memory": tuple(MEMORIES),
}
CELLS = pairwise(FACTORS)
CELLS_THAT_KEEP = pairwise({**FACTORS, "mesh": tuple(MESHES_THAT_KEEP)})
CELLS_OF_SEVERAL = pairwise(
    {**FACTORS, "mesh": tuple(MESHES_OF_SEVERAL)},
    # A PipelineStrategy has no `seed_by`.
    never=[(name, "dropout") for name in MESHES_OF_SEVERAL if "+ " in name and "turn" in name],
)
CELLS_OF_EIGHT = pairwise({**FACTORS, "mesh": tuple(MESHES_OF_EIGHT)})
_MATRICES = (MESHES, MESHES_THAT_KEEP, MESHES_OF_SEVERAL, MESHES_OF_EIGHT)
_ALL_MESHES = functools.reduce(dict.__or__, _MATRICES)
_FLOAT16_ATOL = 1e-2


class Interrupt(keras.callbacks.Callback):
    """The training fails behind its first batch."""

    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def check(cell: Sequence[str]) -> None:
    """Fails where a cell, a value of each of `FACTORS`, differs from one device."""
    mesh, optimizer, model, batch, *_ = cell
    parts = _parts_of_batch(mesh) if model == "batch norm" else None
    expected = reference(optimizer, model, batch, parts)
    assert_same_training(expected, _candidate(*cell), atol=_atol_of(model))


def _atol_of(model: str) -> float:
    """One ulp of float16 at 1 is 1e-3, and splitting a batch moves a sum by some.

    Behind a BatchNorm of three rows Adam divides gradients of 1e-6 by their like: 5e-5 in one
    cell, 2e-14 in float64.
    """
    return {"float16": _FLOAT16_ATOL, "batch norm": 1e-4}.get(model, 3e-5)


@functools.cache
def reference(optimizer: str, model: str, batch: str, parts: int | None) -> dict:
    """What one device gives, without a strategy.

    Args:
        parts: of a batch that BatchNorm sees each for itself; None where it sees all rows.
    """
    options = {"parts": parts} if model == "batch norm" else {}
    return results_of(model, trained_under(None, optimizer, model, batch, {}, **options))


def _candidate(mesh: str, optimizer: str, model: str, batch: str, run: str, memory: str) -> dict:
    """What a cell gives."""
    trained = functools.partial(
        trained_under,
        optimizer=optimizer,
        model=model,
        batch=batch,
        compile_options={"steps_per_execution": 2} if run == "two steps" else {},
    )
    strategy = functools.partial(_strategy, model=model, memory=memory)
    if "restored" not in run:
        return results_of(model, trained(strategy(mesh)))
    other = _another(mesh) if "another" in run else mesh
    with tempfile.TemporaryDirectory() as folder:
        backups = functools.partial(BackupAndRestore, folder, save_freq=1, asynchronous=False)
        try:
            trained(strategy(other), callbacks=[backups(), Interrupt()])
        except KeyboardInterrupt:
            return results_of(model, trained(strategy(mesh), callbacks=[backups()]))
    raise AssertionError("The training was not interrupted.")


def _another(mesh: str) -> str:
    """One of the first matrix."""
    names = list(MESHES)
    (own,) = [list(each) for each in _MATRICES if mesh in each]
    return names[(own.index(mesh) + 7) % len(names)]


def _parts_of_batch(mesh: str) -> int | None:
    """How many parts of a batch BatchNorm sees each for itself; None for the batch as it is."""
    sizes, _ = _ALL_MESHES[mesh]
    if "pipeline" not in sizes:
        return None
    return _num_microbatches(mesh) * sizes.get("data", 1) * sizes.get("shard", 1)


def _num_microbatches(mesh: str) -> int:
    """Of a pipeline; of all that take them in turn."""
    return (4 if "interleaved" in mesh else 3) * (2 if "in turn" in mesh else 1)


def _strategy(mesh: str, model: str, memory: str) -> KerasStrategy:
    sizes, options = _ALL_MESHES[mesh]
    if "pipeline" in sizes:
        options = {"num_microbatches": _num_microbatches(mesh), **options}
        options["batch_norm"] = "deferred" if model == "batch norm" else "per_microbatch"
    if "in turn" in mesh and "devices" in options:
        return tfparallel.PipelineStrategy(memory=MEMORIES[memory], **options)
    seed_by = "row" if model == "dropout" else "replica"
    return hybrid(sizes, memory=MEMORIES[memory], seed_by=seed_by, **options)


def trained_under(strategy, optimizer, model, batch, compile_options, parts=None, **options):
    """A training under `strategy`, or on one device; arguments as of a cell."""
    rows, batch_size = BATCHES[batch]

    def make():
        own = OPTIMIZERS[optimizer]()
        if model == "float16" and hasattr(own, "epsilon"):
            # Else rounding of 1e-4 is divided by its like: oneDNN joins operations where a CPU
            # computes in float16, other ones where their results go to the host.
            own.epsilon = 1e-3
        return own

    def build():
        if model == "two optimizers":
            return MODELS[model](make)
        if model == "batch norm":
            sees_all = strategy is not None and not isinstance(strategy.extended, PipelineExtended)
            return MODELS[model](parts, synchronized=sees_all)
        return MODELS[model]()

    def all_compile_options():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = None if model == "two optimizers" else ["accuracy"]  # its step has none
        return {"loss": loss, "metrics": metrics, **compile_options}

    return train(
        strategy,
        build=build,
        compile_options=all_compile_options,
        # The loop of two optimizers does not use a third one, which Keras at the end of an epoch
        # would ask for averages that it does not have.
        optimizer=OPTIMIZERS["momentum"] if model == "two optimizers" else make,
        data=data_of(model),
        rows=rows,
        batch_size=batch_size,
        **options,
    )


def results_of(model: str, training) -> dict[str, np.ndarray]:
    """What is compared of a training of a `model`."""
    results = training.results()
    if model in ("two optimizers", "float16"):
        # The first has its own; slots of float16 hold rounding noise.
        results = {k: v for k, v in results.items() if not k.startswith("optimizer")}
    if model == "two optimizers":
        slots = [v.numpy() for each in training.model.both for v in each.variables]
        results |= numbered("own_optimizer", slots)
    seeds = [v.numpy() for v in training.model.variables if "seed" in v.path]
    return results | (numbered("seed", seeds) if model == "dropout" else {})
