"""Loss scaling and mixed precision: one overflow anywhere is an overflow everywhere."""

import keras
import numpy as np
import tensorflow as tf

from tests.conformance.case import Run, case, claim
from tests.helpers import ODD_BATCH, ODD_ROWS, Training, momentum_sgd, tiny_data, tiny_model

# One ulp of float16 at 1 is 1e-3, of bfloat16 8e-3; splitting a batch moves a sum by some.
FLOAT16_ATOL = 4e-3
BFLOAT16_ATOL = 4e-2


def _with_policy(policy: str):
    def build():
        keras.config.set_dtype_policy(policy)
        return tiny_model()

    return build


def _float32_results(training) -> dict:
    """Slots hold rounding noise in float16; weights and logs are what must agree."""
    return {k: v for k, v in training.results().items() if not k.startswith("optimizer")}


@case(atol=FLOAT16_ATOL)
def mixed_float16(run: Run):
    return _float32_results(run.train(build=_with_policy("mixed_float16")))


@case(atol=BFLOAT16_ATOL)
def mixed_bfloat16(run: Run):
    return _float32_results(run.train(build=_with_policy("mixed_bfloat16")))


@case()
def loss_scale_optimizer(run: Run):
    return run.train(optimizer=lambda: _scaled(momentum_sgd())).results()


@case()
def loss_scale_optimizer_with_clipnorm(run: Run):
    return run.train(
        optimizer=lambda: _scaled(keras.optimizers.Adam(0.01, global_clipnorm=0.02))
    ).results()


@case()
def loss_scale_optimizer_with_accumulation(run: Run):
    return run.train(
        optimizer=lambda: _scaled(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    ).results()


@case()
def loss_scale_optimizer_outside_of_replicas(run: Run):
    """One gradient for all replicas, as any optimizer takes in the scope; the third overflows."""

    def step(scale):
        gradients = [scale * tf.ones(v.shape) for v in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)

    keras.utils.set_random_seed(1)
    with run.scope():
        model, optimizer = tiny_model(), _scaled(momentum_sgd())
        for function, scale in [(step, 8.0), (tf.function(step), 8.0), (step, np.inf)]:
            function(scale)
    model.optimizer = optimizer
    return Training(model, {}).results()


@case()
def loss_scale_optimizer_on_an_embedding(run: Run):
    return run.train("embedding", optimizer=lambda: _scaled(momentum_sgd())).results()


@case(core=True)
def overflow_on_one_replica(run: Run):
    """Float32 gradients that overflow on the last rows of a batch alone: every replica skips."""
    return _train_with_overflow(run, momentum_sgd).results()


@case(core=True, atol=FLOAT16_ATOL)
def float16_overflow_on_one_replica(run: Run):
    """The same in float16, where a gradient overflows because the loss scale is too large."""
    training = run.train(
        build=_with_policy("mixed_float16"),
        data=lambda rows: _data_with_large_rows(rows, 1e3),  # 1e3 * scale / rows > 65504
        optimizer=lambda: _scaled(keras.optimizers.SGD(0.1), initial_scale=2.0**15),
    )
    assert all(np.isfinite(weight).all() for weight in training.model.get_weights())
    return _float32_results(training) | {"scale": training.model.optimizer.dynamic_scale.numpy()}


@claim()
def the_scale_halves_and_the_step_is_skipped(run: Run):
    training = _train_with_overflow(run, momentum_sgd, epochs=1, rows=ODD_BATCH)
    optimizer = training.model.optimizer
    assert optimizer.dynamic_scale.numpy() == 2.0**14, optimizer.dynamic_scale.numpy()
    assert optimizer.iterations.numpy() == 0, optimizer.iterations.numpy()


@case()
def overflow_on_one_replica_with_adam_and_accumulation(run: Run):
    make = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)  # noqa: E731
    return _train_with_overflow(run, make).results()


def _train_with_overflow(run: Run, make_optimizer, epochs: int = 2, rows: int = ODD_ROWS):
    return run.train(
        build=lambda: keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(3), keras.layers.Activation("linear")]
        ),
        data=lambda rows: _data_with_large_rows(rows, 1e36),
        optimizer=lambda: _scaled(make_optimizer(), initial_scale=2.0**15),
        rows=rows,
        epochs=epochs,
    )


def _data_with_large_rows(rows: int, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """The last two rows of the first batch alone have a gradient that overflows.

    With 2, 3 or 4 replicas they are on the last one. They differ in nothing but their class, so
    that whatever a model says, it is wrong about one of them.
    """
    x, y = tiny_data(rows)
    x[ODD_BATCH - 2 : ODD_BATCH] = factor * x[0]
    y[ODD_BATCH - 2 : ODD_BATCH] = 0, 1
    return x, y


def _scaled(inner: keras.Optimizer, initial_scale: float = 1024.0) -> keras.Optimizer:
    return keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=initial_scale, dynamic_growth_steps=2
    )
