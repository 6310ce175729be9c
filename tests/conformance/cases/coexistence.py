"""Our strategies live beside each other, beside plain Keras and beside those of TensorFlow."""

import sys
import types

import keras
import tensorflow as tf

from tests.conformance.case import Run, case, claim
from tests.helpers import (
    BATCH,
    EVEN_ROWS,
    ODD_BATCH,
    Training,
    assert_same_training,
    momentum_sgd,
    tiny_compile_options,
    tiny_data,
    tiny_model,
    train,
)

WATCHED = ("keras.", "tensorflow.python.distribute.", "tensorflow.python.eager.")
_originals: dict[tuple[str, str, str], object] = {}


def remember_originals() -> None:
    """Note every function and method of Keras and tf.distribute; called before tfparallel loads.

    Again, it keeps what it has: a fork remembers what it was forked from has.
    """
    if not _originals:
        assert "tfparallel" not in sys.modules, "Too late: it may have replaced some already."
        _originals.update(_functions_and_methods())


def _functions_and_methods() -> dict[tuple[str, str, str], object]:
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith(WATCHED):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, (types.FunctionType, type)):
                found[module_name, name, ""] = value
            if isinstance(value, type) and value.__module__.startswith(WATCHED):
                for attribute, member in list(vars(value).items()):
                    if callable(member) or isinstance(member, (property, classmethod)):
                        found[module_name, name, attribute] = member
    return found


@claim(core=True)
def keras_and_tf_distribute_are_as_imported(run: Run):
    """No class or function has been replaced, nor have classes gained methods, after training."""
    run.train()
    _assert_as_imported()


@claim(core=True)
def keras_and_tf_distribute_are_as_imported_in_a_step(run: Run):
    """The same while a step is traced, of the user's own too, and layers are put on a stage."""
    looked = []

    class Looking(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True))
                _assert_as_imported()
                looked.append("step")
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"one": tf.ones([])}

    def build():
        layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3, "softmax")]
        return Looking(layers)

    run.train(build=build, compile_options=dict)
    assert looked
    if hasattr(run.strategy, "stage"):
        with run.strategy.stage(0):
            keras.layers.Dense(3)
            _assert_as_imported()


def _assert_as_imported() -> None:
    now = _functions_and_methods()
    changed = [".".join(key) for key, value in _originals.items() if now.get(key) is not value]
    owners = {key[:2] for key in _originals if key[2]}
    gained = [
        ".".join(key) for key in now if key[:2] in owners and key[2] and key not in _originals
    ]
    assert _originals
    assert not changed, changed
    assert not gained, gained


@case()
def plain_keras_afterwards(run: Run):
    run.train(epochs=1)
    return train(None).results()


@case()
def plain_keras_in_between(run: Run):
    """A plain model trained between two epochs of the strategy's model: neither notices."""
    training = run.train()
    plain = train(None)
    x, y = tiny_data(ODD_BATCH, seed=2)
    more = training.model.fit(x, y, batch_size=ODD_BATCH, shuffle=False, verbose=0).history
    training.extra = {f"more/{k}": v for k, v in more.items()}
    training.extra |= {f"plain/{k}": v for k, v in plain.results().items()}
    return training.results()


@claim()
def stock_mirrored_afterwards(run: Run):
    """Where TensorFlow's own strategy is right (even batches) it still is after ours."""
    if run.row.num_workers > 1 or run.row.devices_per_worker == 1:
        return  # stock Mirrored hangs in a task of a cluster, also where all is stock
    run.train(epochs=1)
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert_same_training(_train_even(None), _train_even(stock))


def _train_even(strategy) -> Training:
    return train(strategy, rows=EVEN_ROWS, batch_size=BATCH)


@case(core=True)
def two_models_under_one_strategy(run: Run):
    """Built first, then trained in turn."""
    models = []
    with run.scope():
        for seed in (1, 2):
            keras.utils.set_random_seed(seed)
            model = tiny_model()
            model.compile(optimizer=momentum_sgd(), **tiny_compile_options())
            models.append(model)
    results = {}
    for turn in range(2):
        for number, model in enumerate(models):
            x, y = tiny_data(ODD_BATCH, seed=number)
            history = model.fit(x, y, batch_size=ODD_BATCH, shuffle=False, verbose=0).history
            trained = Training(model, history).results()
            results |= {f"turn {turn}, model {number}: {k}": v for k, v in trained.items()}
    return results


@case(core=True)
def two_strategies_in_one_process(run: Run):
    """A second strategy after the first, and then the first one again."""
    first = run.train()
    second = train(run.row.make())
    x, y = tiny_data(ODD_BATCH, seed=2)
    history = first.model.fit(x, y, batch_size=ODD_BATCH, shuffle=False, verbose=0).history
    again = Training(first.model, history).results()
    return second.results() | {f"first again: {k}": v for k, v in again.items()}


@case()
def many_strategies_in_one_process(run: Run):
    for _ in range(3):
        training = train(run.row.make(), epochs=1)
    return training.results()
