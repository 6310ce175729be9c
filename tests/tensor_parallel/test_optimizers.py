"""What optimizers do beside the update, of weights in parts: in float64, as on one device."""

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel.layouts import layout_map

pytestmark = pytest.mark.turns

PAIR = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
ROWS, COLUMNS = (
    {**PAIR, ".*embeddings": axes} for axes in [("model", None), (None, "model")]
)  # of the table of words
SCALED, ADAM, ADAMW, SGD = (
    keras.optimizers.LossScaleOptimizer,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.SGD,
)


def _words(rows):
    rng = np.random.default_rng(0)
    return rng.integers(0, 7, (rows, 5)), rng.integers(0, 3, rows)


def _build(slope=1.0):
    """Of seven words each row has some several times."""
    tokens = keras.Input((5,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(7, 6, name="table")(tokens))
    x = layers.Dense(6, name="down")(layers.Dense(9, "tanh", name="up")(x))
    return keras.Model(tokens, layers.Rescaling(slope)(layers.Dense(3)(x)))


def _assert_same(layouts, optimizer, replicas=1, atol=1e-9, build=_build):
    options = {
        "build": build,
        "data": _words,
        "optimizer": optimizer,
        "rows": 24,
        "batch_size": 7,
        "epochs": 1,
        "compile_options": lambda: {
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        },
    }
    strategy = tfparallel.TensorParallelStrategy(layout_map(replicas, 2, layouts))
    candidate = helpers.train(strategy, **options)
    helpers.assert_same_training(helpers.train(None, **options), candidate, atol)
    return candidate


class Centralised(SGD):
    """Overrides what the strategy has Keras's optimizers do by parts."""

    def _clip_gradients(self, gradients):
        return [each - keras.ops.mean(each) for each in super()._clip_gradients(gradients)]

    def _update_model_variables_moving_average(self, variables):
        super()._update_model_variables_moving_average(variables)
        for average in self._model_variables_moving_average:
            average.assign(average / (1.0 + keras.ops.norm(average)))


class NeverFinite(SCALED):
    def check_finite(self, gradients):
        return keras.ops.logical_and(super().check_finite(gradients), self.iterations != 1)


CASES = {
    "accumulation": (ROWS, lambda: ADAM(0.1, gradient_accumulation_steps=2)),
    "accumulation and a norm of all": (
        ROWS,
        lambda: SGD(0.5, momentum=0.9, gradient_accumulation_steps=2, global_clipnorm=0.05),
    ),
    "accumulation and a norm of each": (
        COLUMNS,
        lambda: SGD(0.5, gradient_accumulation_steps=3, clipnorm=0.05),
    ),
    "accumulation and a limit": (
        ROWS,
        lambda: SGD(0.5, gradient_accumulation_steps=2, clipvalue=1e-2),
    ),
    "a loss scale": (ROWS, lambda: SCALED(ADAM(0.1, clipnorm=0.05), initial_scale=64.0)),
    "a loss scale that grows": (
        COLUMNS,
        lambda: SCALED(ADAM(0.1, global_clipnorm=0.05), dynamic_growth_steps=2),
    ),
    "averages": (ROWS, lambda: ADAM(0.1, use_ema=True, ema_momentum=0.8)),
    "averages that overwrite": (
        COLUMNS,
        lambda: ADAM(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    ),
}


CASES["a user's own"] = ROWS, lambda: Centralised(0.5, use_ema=True, global_clipnorm=0.05)
CASES["a loss scale of a user's own"] = ROWS, lambda: NeverFinite(ADAM(0.1), initial_scale=64.0)


def _all():
    inner = ADAMW(
        0.1,
        gradient_accumulation_steps=2,
        global_clipnorm=0.05,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=3,
    )
    return SCALED(inner, initial_scale=64.0)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_device(name):
    with helpers.in_float64():
        _assert_same(*CASES[name])


@pytest.mark.parametrize("layouts", [ROWS, pytest.param(COLUMNS, marks=pytest.mark.long)])
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.long)])
def test_all_of_it_together(layouts, replicas):
    with helpers.in_float64():
        _assert_same(layouts, _all, replicas)


def test_a_step_that_overflows_is_skipped_and_halves_the_scale():
    """Of float32, whose largest number is just below 2^128: the first steps are infinite."""
    scale = 2.0**127.5
    candidate = _assert_same(
        ROWS,
        lambda: SCALED(SGD(0.5, gradient_accumulation_steps=2), initial_scale=scale),
        atol=1e-5,
        build=lambda: _build(slope=32.0),
    )
    assert float(candidate.model.optimizer.dynamic_scale) <= scale / 2


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: SGD(0.1, gradient_accumulation_steps=2),
        lambda: SGD(0.1, use_ema=True, ema_momentum=0.8),
    ],
    ids=["accumulation", "averages"],
)
def test_a_step_outside_of_run_is_that_of_all_copies(optimizer):
    with helpers.in_float64():
        layouts = layout_map(2, 2, {".*kernel": ("model", None)})
        reference, candidate = (
            helpers.steps_outside_of_run(helpers.train(each, optimizer=optimizer), each)
            for each in (None, tfparallel.TensorParallelStrategy(layouts))
        )
        helpers.assert_same_training(reference, candidate, 1e-9)
