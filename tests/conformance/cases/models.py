"""Every model trains, evaluates and predicts as on one device, with an uneven last batch."""

import time

import keras
import tensorflow as tf

from tests.conformance.case import Run, add_case, case
from tests.conformance.models import MODELS
from tests.helpers import (
    BATCH,
    ODD_BATCH,
    SEED,
    UNEVEN_ROWS,
    Training,
    momentum_sgd,
    numbered,
    tiny_compile_options,
    tiny_data,
    tiny_model,
)


def _train_evaluate_predict(run: Run, model: str) -> dict:
    training = run.train(model, rows=UNEVEN_ROWS, batch_size=BATCH)
    x, y = MODELS[model].data(ODD_BATCH)
    evaluated = training.model.evaluate(x, y, ODD_BATCH, verbose=0, return_dict=True)
    predicted = training.model.predict(x, ODD_BATCH, verbose=0)
    return {
        **training.results(),
        **{f"evaluate/{name}": value for name, value in evaluated.items()},
        **numbered("predict", keras.tree.flatten(predicted)),
    }


for _name in MODELS:
    add_case(
        f"models.{_name}",
        lambda run, name=_name: _train_evaluate_predict(run, name),
        core=_name in ("mlp", "cnn", "embedding", "grouped_convolution"),
    )


@case(core=True)
def initial_weights_are_those_of_the_first_worker(run: Run):
    """Workers that draw different ones start from the same."""
    keras.utils.set_random_seed(run.rank)
    with run.scope():
        model = tiny_model()
        model.compile(optimizer=momentum_sgd(), **tiny_compile_options())
    initial = numbered("initial", model.get_weights())
    keras.utils.set_random_seed(SEED)  # of which the order of the data would depend
    x, y = tiny_data(ODD_BATCH)
    history = model.fit(x, y, batch_size=ODD_BATCH, shuffle=False, verbose=0).history
    return Training(model, history, initial).results()


class _Slow(keras.layers.Layer):
    """Takes `delay_s` whenever it runs outside of a traced step, as where layers are timed."""

    def __init__(self, delay_s: float):
        super().__init__()
        self.delay_s = delay_s

    def call(self, inputs):
        if tf.executing_eagerly():
            time.sleep(self.delay_s)
        return inputs


@case()
def layers_that_take_other_times_on_each_worker(run: Run):
    """What a worker measures must not make its model another one than its peers'."""
    first, last = (0.03, 0.0) if run.rank == 0 else (0.0, 0.03)

    def build() -> keras.Model:
        dense = [keras.layers.Dense(units) for units in (5, 7, 3)]
        return keras.Sequential(
            [keras.Input((6,)), _Slow(first), *dense[:2], _Slow(last), dense[2]]
        )

    return run.train(build=build).results()
