"""Cells of two processes that share the state, of two devices each: pipelines, matrices in parts.

In float64, each beside one device. `worker_of_shares` has optimizers that look at whole weights.
"""

import functools
import os
import shutil

import keras

import tfparallel
from tests.helpers import assert_same_training, in_float64
from tests.hybrid.matrix import BATCHES, Interrupt, results_of, trained_under
from tests.hybrid.meshes import over_processes
from tests.hybrid.pairwise import pairwise
from tfparallel.callbacks import BackupAndRestore

_MICROBATCHES = 2
MESHES: dict[str, dict] = {
    "shard x model": {"sizes": {"shard": 2, "model": 2}},
    "shard x pipeline": {"sizes": {"shard": 2, "pipeline": 2}},
    "data in parts x model, collectives": {
        "sizes": {"data": 2, "model": 2},
        "shard": "optimizer",
        "transport": "collectives",
    },
    "shard x pipeline, collectives": {
        "sizes": {"shard": 2, "pipeline": 2},
        "transport": "collectives",
    },
}
GATHERED: dict[str, dict] = {  # meshes whose weights are in pieces too, between steps
    f"{mesh}, weights too": {**MESHES[mesh], "shard": "parameters"}
    for mesh in ("shard x model", "shard x pipeline", "shard x pipeline, collectives")
}
_OPTIONS = {**MESHES, **GATHERED}
OPTIMIZERS = (
    "momentum",
    "clipped",
    "clipped each",
    "accumulated, clipped",
    "averaged",
    "nadam",
    "rmsprop",
    "loss scale",
)
MODELS = ("plain", "masked lstm", "attention", "dropout", "batch norm", "two optimizers")
RUNS = ("a step", "two steps", "killed and restored", "from rows alone", "on one device")
MEMORIES = {"kept": None, "computed again": tfparallel.MemoryPolicy("full")}
CELLS = pairwise(
    {
        "mesh": tuple(MESHES),
        "optimizer": OPTIMIZERS,
        "model": MODELS,
        "batch": tuple(BATCHES),
        "run": RUNS,
        "memory": tuple(MEMORIES),
    }
)
CELLS += pairwise(
    {
        "mesh": tuple(GATHERED),
        "optimizer": ("momentum", "accumulated, clipped", "averaged", "loss scale"),
        "model": ("masked lstm", "attention", "dropout", "batch norm", "two optimizers"),
        "batch": tuple(BATCHES),
        "run": RUNS,
        "memory": tuple(MEMORIES),
    }
)


def check(
    folder: str, mesh: str, optimizer: str, model: str, batch: str, run: str, memory: str
) -> None:
    """Fails where a cell differs from one device.

    Args:
        folder: for backups, of all processes.
    """
    microbatches = 2 * _MICROBATCHES if "pipeline" in mesh else None
    trained = functools.partial(trained_under, optimizer=optimizer, model=model, batch=batch)
    options = {"steps_per_execution": 2} if run == "two steps" else {}
    candidate = functools.partial(trained, compile_options=options)
    reference = functools.partial(trained, None, compile_options={}, parts=microbatches)

    def strategy(**others) -> tfparallel.HybridStrategy:
        keras.backend.clear_session()  # layouts go by the numbers in layers' names
        return strategy_of(**{**_OPTIONS[mesh], **others}, model=model, memory=MEMORIES[memory])

    with in_float64():
        if run in ("a step", "two steps"):
            received = candidate(strategy())
        else:
            others = {"sizes": _with_rows_alone(mesh), "shard": None}
            _interrupt(candidate, strategy(**(others if run == "from rows alone" else {})), folder)
            if run == "on one device":  # each process for itself, from what all have written
                own = shutil.copytree(folder, f"{folder}-{os.getpid()}")
                received = reference(callbacks=[_backups(own)])
            else:
                received = candidate(strategy(), callbacks=[_backups(folder)])
        keras.backend.clear_session()
        expected = reference()
    assert_same_training(results_of(model, expected), results_of(model, received), atol=1e-9)


def _with_rows_alone(mesh: str) -> dict[str, int]:
    """The sizes of the same mesh, of which rows alone go over processes."""
    sizes = dict(_OPTIONS[mesh]["sizes"])
    return {"data": sizes.pop("shard", 2), **sizes}


def strategy_of(
    sizes: dict[str, int],
    model: str,
    memory: tfparallel.MemoryPolicy | None,
    shard: str | None = "gradients",
    transport: str = "auto",
    host: str | None = None,
) -> tfparallel.HybridStrategy:
    options: dict = {"memory": memory, "seed_by": "row" if model == "dropout" else "replica"}
    if "pipeline" in sizes:
        batch_norm = "deferred" if model == "batch norm" else "per_microbatch"
        options["pipeline"] = tfparallel.PipelineOptions(_MICROBATCHES, batch_norm=batch_norm)
    if shard is not None:
        options["shard"] = tfparallel.Sharding(shard, min_size=1, host=host)
    return over_processes(sizes, transport, **options)


def _interrupt(trained, strategy, folder: str) -> None:
    try:
        trained(strategy, callbacks=[_backups(folder), Interrupt()])
    except KeyboardInterrupt:
        return
    raise AssertionError("The training was not interrupted.")


def _backups(folder: str) -> BackupAndRestore:
    return BackupAndRestore(folder, save_freq=1, asynchronous=False)
