"""Every optimizer, and every option that looks at gradients, acts as on one device."""

import math

import keras
import numpy as np
import tensorflow as tf

from tests.conformance.case import Run, add_case, case, claim
from tests.conformance.models import MODELS
from tests.helpers import ODD_BATCH, tiny_model

optimizers = keras.optimizers
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "lion": lambda: optimizers.Lion(0.001),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "exponential_decay": lambda: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    ),
    "cosine_decay": lambda: optimizers.Adam(
        optimizers.schedules.CosineDecay(0.01, decay_steps=5, warmup_target=0.02, warmup_steps=2)
    ),
    "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.05),
    "clipvalue": lambda: optimizers.SGD(0.5, clipvalue=0.01),
    "gradient_accumulation": lambda: optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2
    ),
    "gradient_accumulation_with_clipnorm": lambda: optimizers.Adam(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.05
    ),
    "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "ema_overwrite": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "loss_scale_factor": lambda: optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=64.0),
}
if hasattr(optimizers, "MultiOptimizer"):  # of Keras 3.15
    OPTIMIZERS["multi_optimizer"] = lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.Adam(0.01, global_clipnorm=0.05),
            {".*kernel": optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)},
        )
    )
CORE = ("global_clipnorm", "gradient_accumulation", "ema_overwrite")

for _name, _make in OPTIMIZERS.items():
    add_case(
        f"optimizers.{_name}",
        lambda run, make=_make: run.train(optimizer=make).results(),
        core=_name in CORE,
    )


@case()
def adam_on_an_embedding(run: Run):
    return run.train("embedding", optimizer=lambda: optimizers.Adam(0.01)).results()


@case(core=True)
def adam_on_positions(run: Run):
    """One table of which every replica reads the same rows, one of which each reads its own."""
    return run.train("positions", optimizer=lambda: optimizers.Adam(0.01)).results()


@keras.saving.register_keras_serializable("tests")
class TakesRows(keras.layers.Layer):
    """Looks up in a weight of its own, as an Embedding does and a codebook."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=(20, 4), name="embeddings")

    def call(self, tokens):
        own = keras.ops.take(self.table, tokens, axis=0)
        return own + keras.ops.take(self.table, tokens[:, :1], axis=0)


@case(core=True)
def adam_on_rows_of_a_weight(run: Run):
    """Entries of one row, of one read or of two, are squared apart."""

    def build():
        pooling, classes = keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)
        return keras.Sequential([keras.Input((5,), dtype="int32"), TakesRows(), pooling, classes])

    return run.train("embedding", build=build, optimizer=lambda: optimizers.Adam(0.01)).results()


@case()
def clipnorm_on_an_embedding(run: Run):
    return run.train("embedding", optimizer=lambda: optimizers.SGD(0.5, clipnorm=0.02)).results()


@case()
def gradient_accumulation_on_an_embedding(run: Run):
    return run.train("embedding", optimizer=OPTIMIZERS["gradient_accumulation"]).results()


@case()
def steps_per_execution_with_accumulation_and_clipping(run: Run):
    def options():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss, "metrics": ["accuracy"], "steps_per_execution": 3}

    return run.train(
        rows=5 * ODD_BATCH,
        compile_options=options,
        optimizer=OPTIMIZERS["gradient_accumulation_with_clipnorm"],
    ).results()


@case()
def frozen_weights(run: Run):
    """A frozen layer and, as on one device, no gradient for what the loss does not reach."""

    def build():
        model = tiny_model()
        model.layers[0].trainable = False
        return model

    return run.train(build=build).results()


@claim()
def numbers_read_as_python_reads_them(run: Run):
    """`float(optimizer.learning_rate)` and its like, as with plain Keras."""
    model = run.train(optimizer=lambda: optimizers.Adam(0.25), epochs=1).model
    rate, steps = model.optimizer.learning_rate, model.optimizer.iterations
    assert float(rate) == 0.25 and math.log(rate) == math.log(0.25)
    assert "%.2f, %d" % (rate, steps) == f"0.25, {int(steps)}"  # noqa: UP031, people write so
    assert int(steps) > 0 and complex(rate) == 0.25
    assert np.asarray(rate).shape == () and np.asarray(rate, "float64").dtype == "float64"
    assert float(model.metrics[0].total) >= 0.0


@claim()
def sparse_gradients_stay_sparse(run: Run):
    """An embedding's gradient arrives at the optimizer as rows, not as the whole table."""
    _require_rows(run, steps_per_execution=1)


@claim()
def sparse_gradients_stay_sparse_in_a_loop(run: Run):
    _require_rows(run, steps_per_execution=2)


def _require_rows(run: Run, steps_per_execution: int):
    seen = {}

    class Watching(optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            seen.setdefault(tuple(variable.shape), type(gradient))
            super().update_step(gradient, variable, learning_rate)

    run.train(
        "embedding",
        optimizer=lambda: Watching(0.1),
        epochs=1,
        compile_options=lambda: {
            **MODELS["embedding"].compile_options(),
            "steps_per_execution": steps_per_execution,
        },
    )
    assert issubclass(seen[20, 4], tf.IndexedSlices), seen
    assert not issubclass(seen[4, 3], tf.IndexedSlices), seen


class Normalising(keras.optimizers.SGD):
    """Changes gradients where programs written for older Kerases do."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients(
            [
                (g / (1e-3 + keras.ops.norm(keras.ops.reshape(g, (-1,)))), v)
                for g, v in grads_and_vars
            ]
        )


@case(core=True)
def own_apply_gradients(run: Run):
    """It gets the gradients of all replicas, as `apply` does: a norm is not linear."""
    return run.train(optimizer=lambda: Normalising(0.05)).results()
