"""Cells of two processes with two devices each: meshes, compression, and what comes with it.

Compressed or not, each is trained as one device trains. A gradient of a kernel is of no more ranks
than the batch has rows, so that of batches of at most five PowerSGD(7) sends all, in less bytes.
All batches of a training have the same rows: PowerSGD begins where the last step ended, and what is
behind a batch of three rows finds three ranks, and leaves the others for the next step (6e-4 of a
weight, in one cell).
"""

import functools

import keras
from keras import layers

import tfparallel
from tests.helpers import Training, assert_same_training, in_float64, tiny_data, train
from tests.hybrid.matrix import OPTIMIZERS as ALL_OPTIMIZERS
from tests.hybrid.matrix import Interrupt
from tests.hybrid.meshes import over_processes
from tests.hybrid.pairwise import pairwise
from tfparallel.callbacks import BackupAndRestore

MESHES: dict[str, dict] = {
    "data 4": {"sizes": {"data": 4}},
    "data 4, collectives": {"sizes": {"data": 4}, "transport": "collectives"},
    "data x pipeline": {"sizes": {"data": 2, "pipeline": 2}},
    "data x model": {"sizes": {"data": 2, "model": 2}},
    "data x shard": {"sizes": {"data": 2, "shard": 2}},
    "data x shard, ZeRO 2": {"sizes": {"data": 2, "shard": 2}, "what": "gradients"},
}
COMPRESSIONS = {"as they are": None, "of seven ranks": 7}
OPTIMIZERS = ("momentum", "clipped", "accumulated", "averaged", "loss scale")
BATCHES = {"even": (16, 4), "uneven": (15, 5), "fewer rows than replicas": (9, 3)}
RUNS = ("a step", "two steps", "killed and restored")
MEMORIES = {"kept": None, "computed again": tfparallel.MemoryPolicy("full")}


def _wide(*between):
    x = keras.Input((6,))
    y = layers.Dense(16, "tanh", name="dense_0")(x)
    for i, make in enumerate(between or [None, None]):
        y = y if make is None else make(name=f"between_{i}")(y)
        y = layers.Dense(16, "tanh", name=f"dense_{i + 1}")(y)
    return keras.Model(x, layers.Dense(3, name="dense_3")(y))


MODELS = {
    "plain": _wide,
    "dropout": functools.partial(_wide, *[functools.partial(layers.Dropout, 0.3)] * 2),
    "layer norm": functools.partial(_wide, *[layers.LayerNormalization] * 2),
}
CELLS = pairwise(
    {
        "mesh": tuple(MESHES),
        "compression": tuple(COMPRESSIONS),
        "optimizer": OPTIMIZERS,
        "model": tuple(MODELS),
        "batch": tuple(BATCHES),
        "run": RUNS,
        "memory": tuple(MEMORIES),
    }
)


def check(
    folder: str,
    mesh: str,
    compression: str,
    optimizer: str,
    model: str,
    batch: str,
    run: str,
    memory: str,
) -> float:
    """Fails where a cell differs from one device; gives the share of bytes that are sent.

    Args:
        folder: for backups, of all processes.
    """
    rank = COMPRESSIONS[compression]
    rows, batch_size = BATCHES[batch]
    trained = functools.partial(
        train,
        build=MODELS[model],
        optimizer=ALL_OPTIMIZERS[optimizer],
        data=tiny_data,
        rows=rows,
        batch_size=batch_size,
    )

    def strategy() -> tfparallel.HybridStrategy:
        return over_processes(
            **MESHES[mesh],
            compression=None if rank is None else tfparallel.compression.PowerSGD(rank),
            seed_by="row" if model == "dropout" else "replica",
            memory=MEMORIES[memory],
        )

    with in_float64():
        keras.backend.clear_session()  # layouts go by the numbers in layers' names
        steps = 2 if run == "two steps" else 1
        trained = functools.partial(trained, compile_options=functools.partial(_compile, steps))
        own = strategy()
        candidate = _killed(trained, strategy, own, folder) if "kill" in run else trained(own)
        keras.backend.clear_session()
        expected = trained(None)
    # Compressed gradients are of float32.
    assert_same_training(expected, candidate, atol=1e-9 if rank is None else 2e-4)
    reports = own.compression_report()
    return min([each.bytes_sent / each.bytes_uncompressed for each in reports], default=1.0)


def _compile(steps: int) -> dict:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss, "metrics": ["accuracy"], "steps_per_execution": steps}


def _killed(trained, strategy, again, folder: str) -> Training:
    backups = functools.partial(BackupAndRestore, folder, save_freq=1, asynchronous=False)
    try:
        trained(strategy(), callbacks=[backups(), Interrupt()])
    except KeyboardInterrupt:
        return trained(again, callbacks=[backups()])
    raise AssertionError("The training was not interrupted.")
