"""Meshes, models, optimizers, batches and ways to run: any two of them together, each cell exact.

Three cells by default, all with `--everything`.
"""

import itertools

import keras
import numpy as np
import pytest
from keras import layers

from tests.helpers import assert_same_training, tiny_model, train
from tests.hybrid.meshes import hybrid
from tests.hybrid.pairwise import pairwise

MESHES = {
    "data 4": ({"data": 4}, {}),
    "shard 4": ({"shard": 4}, {}),
    "model 4": ({"model": 4}, {}),
    "data x shard": ({"data": 2, "shard": 2}, {}),
    "data x model": ({"data": 2, "model": 2}, {}),
    "shard x model": ({"shard": 2, "model": 2}, {}),
    **{
        f"{outer} x pipeline, {schedule}": ({outer: 2, "pipeline": 2}, {"schedule": schedule})
        for outer in ("data", "shard")
        for schedule in ("gpipe", "1f1b", "zero_bubble")
    },
    **{
        f"pipeline x model, {name}": ({"pipeline": 2, "model": 2}, options)
        for name, options in {
            "gpipe": {"schedule": "gpipe"},
            "1f1b": {"schedule": "1f1b"},
            "zero bubble": {"schedule": "zero_bubble"},
            "interleaved": {"schedule": "interleaved_1f1b", "chunks_per_device": 1},
            "rematerialized": {"rematerialize": "full"},
            "offloaded": {"offload": True},
        }.items()
    },
    "shard x pipeline, rematerialized": ({"shard": 2, "pipeline": 2}, {"rematerialize": "full"}),
    "shard x pipeline, offloaded": ({"shard": 2, "pipeline": 2}, {"offload": True}),
}
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped each": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.05),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**10, dynamic_growth_steps=2
    ),
}
BATCHES = {"even": (24, 8), "uneven": (26, 13), "fewer rows than replicas": (7, 3)}
RUNS = {"a step": {}, "two steps": {"steps_per_execution": 2}}


def masked():
    x = keras.Input((5,), dtype="int32")
    y = layers.Embedding(11, 8, mask_zero=True, name="embedding")(x)
    return keras.Model(x, layers.Dense(3, name="dense")(layers.LSTM(6, name="lstm")(y)))


def words(rows):
    random = np.random.default_rng(0)
    return random.integers(0, 11, (rows, 5)), random.integers(0, 3, rows)


def attending():
    x = keras.Input((5,), dtype="int32")
    y = layers.Embedding(11, 8, name="embedding")(x)
    y = layers.Add()([y, layers.MultiHeadAttention(4, 4, name="attention")(y, y)])
    y = layers.LayerNormalization(name="norm")(y)
    return keras.Model(x, layers.Dense(3, name="dense")(layers.GlobalAveragePooling1D()(y)))


def penalized():
    x = keras.Input((6,))
    y = layers.Dense(8, "tanh", kernel_regularizer="l2", name="dense")(x)
    y = layers.ActivityRegularization(0.01)(y)
    shared = layers.Dense(8, "relu", name="hidden", kernel_constraint="max_norm")
    return keras.Model(x, layers.Dense(3, name="scores")(shared(shared(y))))


MODELS = {
    "mlp": {"build": tiny_model},
    "masked lstm": {"build": masked, "data": words},
    "attention": {"build": attending, "data": words},
    "penalties": {"build": penalized},
}
FACTORS = {
    "mesh": tuple(MESHES),
    "optimizer": tuple(OPTIMIZERS),
    "model": tuple(MODELS),
    "batch": tuple(BATCHES),
    "run": tuple(RUNS),
}
CELLS = pairwise(FACTORS)
EVERY = 61  # of which cell one is asked by default


def test_any_two_values_come_together():
    for (i, a), (j, b) in itertools.combinations(enumerate(FACTORS.values()), 2):
        wanted = set(itertools.product(a, b))
        assert {(cell[i], cell[j]) for cell in CELLS} == wanted
    assert len(CELLS) < 200


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, marks=[] if i % EVERY == 0 else pytest.mark.long)
        for i, c in enumerate(CELLS)
    ],
    ids="; ".join,
)
def test_a_cell_trains_as_one_device_does(cell):
    mesh, optimizer, model, batch, run = cell
    (sizes, pipeline), (rows, batch_size) = MESHES[mesh], BATCHES[batch]

    def compile_options():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss, "metrics": ["accuracy"], **RUNS[run]}

    reference, candidate = (
        train(
            strategy,
            compile_options=compile_options,
            optimizer=OPTIMIZERS[optimizer],
            rows=rows,
            batch_size=batch_size,
            **MODELS[model],
        )
        for strategy in (None, hybrid(sizes, **pipeline))
    )
    assert_same_training(reference, candidate, atol=3e-5)
