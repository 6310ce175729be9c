"""A file says nothing of the strategy that wrote it: it equals the file of plain Keras.

Each strategy writes, name for name, the file that plain Keras writes, and reads the file that
plain Keras writes; so what one strategy saves every other one loads.
"""

import io
import json
import zipfile

import h5py
import keras
import numpy as np
import tensorflow as tf

from tests.conformance.case import Run, case
from tests.conformance.models import MODELS
from tests.helpers import ODD_BATCH, Training, tiny_data, train

# Weights that do not train and an optimizer's slots: both must survive.
MODEL = "nested_with_state"


def _adam() -> keras.Optimizer:
    return keras.optimizers.Adam(0.01)


def _train(run: Run, **options) -> Training:
    options = {"optimizer": _gentle, **options}
    return run.train(MODEL, **options)


def _gentle() -> keras.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


@case(core=True)
def keras_file(run: Run):
    training, path = _train(run), run.own_folder / "model.keras"
    training.model.save(path)
    with zipfile.ZipFile(path) as archive:
        training.extra["config"] = _normal_json(archive.read("config.json"))
        training.extra.update(_datasets(io.BytesIO(archive.read("model.weights.h5"))))
    loaded = keras.models.load_model(path)  # without the strategy
    return _continued(loaded, training)


@case()
def weights_file(run: Run):
    training, path = _train(run), run.own_folder / "model.weights.h5"
    training.model.save_weights(path)
    training.extra.update(_datasets(path))
    return training.results()


@case(core=True)
def checkpoint(run: Run):
    """`tf.train.Checkpoint`: the same keys with the same values."""
    training, path = _train(run), str(run.own_folder / "checkpoint")
    model = training.model
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    reader = tf.train.load_checkpoint(path)
    training.extra["keys"] = sorted(reader.get_variable_to_shape_map())
    for key, dtype in reader.get_variable_to_dtype_map().items():
        if dtype != tf.string:
            training.extra[f"checkpoint/{key}"] = reader.get_tensor(key)
    return training.results()


@case()
def plain_keras_file_loads_under_the_strategy(run: Run):
    """Saved by plain Keras, loaded in the scope, trained on: slots and iterations included."""
    path = run.own_folder / "plain.keras"
    _plain(run).model.save(path)
    with run.scope():
        loaded = keras.models.load_model(path)
    return _continued(loaded, Training(loaded, {}))


@case()
def plain_weights_file_loads_under_the_strategy(run: Run):
    path = run.own_folder / "plain.weights.h5"
    _plain(run).model.save_weights(path)
    training = _train(run, epochs=1)
    training.model.load_weights(path)
    return _continued(training.model, training)


@case()
def plain_checkpoint_loads_under_the_strategy(run: Run):
    path = str(run.own_folder / "plain")
    plain = _plain(run).model
    path = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).write(path)
    training = _train(run, epochs=1)
    model = training.model
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.read(path).assert_existing_objects_matched()
    return _continued(model, training)


@case()
def checkpoint_without_the_strategy(run: Run):
    """A checkpoint of the strategy, read by plain Keras, which trains on."""
    training, path = _train(run), str(run.own_folder / "checkpoint")
    model = training.model
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    plain = _plain(run, epochs=1)
    checkpoint = tf.train.Checkpoint(model=plain.model, optimizer=plain.model.optimizer)
    checkpoint.read(path).assert_existing_objects_matched()
    return _continued(plain.model, plain)


@case()
def another_strategy_loads(run: Run):
    """Saved here, loaded and trained on under a second strategy of the same kind."""
    training, path = _train(run), run.own_folder / "model.keras"
    training.model.save(path)
    other = run.row.make()
    with other.scope() if other else run.scope():
        loaded = keras.models.load_model(path)
    return _continued(loaded, Training(loaded, {}))


@case()
def exported_model_serves(run: Run):
    """`model.export` writes a SavedModel that answers as the model does."""
    training, path = _train(run), run.own_folder / "served"
    training.model.export(path, verbose=False)
    x, _ = tiny_data(5)
    served = tf.saved_model.load(str(path))
    training.extra["served"] = served.serve(x).numpy()
    return training.results()


@case()
def cloned_model(run: Run):
    """`clone_model` in the scope and `set_weights` carry a model over."""
    training = _train(run)
    with run.scope():
        clone = keras.models.clone_model(training.model)
        clone.compile(optimizer=_gentle(), **MODELS[MODEL].compile_options())
    clone.set_weights(training.model.get_weights())
    return _continued(clone, Training(clone, {}))


def _plain(run: Run, **options) -> Training:
    chosen = MODELS[MODEL]
    options = {"optimizer": _gentle, **options}
    return train(None, chosen.build, chosen.compile_options, chosen.data, **options)


def _continued(model: keras.Model, training: Training) -> dict:
    """The results after one more epoch of `model`."""
    x, y = tiny_data(ODD_BATCH, seed=5)
    history = model.fit(x, y, batch_size=ODD_BATCH, shuffle=False, verbose=0).history
    continued = Training(model, {f"continued/{key}": value for key, value in history.items()})
    return {**training.results(), **{f"then/{k}": v for k, v in continued.results().items()}}


def _datasets(file) -> dict[str, np.ndarray]:
    """Every array of an HDF5 file by its path."""
    found = {}
    with h5py.File(file) as root:
        root.visititems(
            lambda name, item: (
                found.update({f"h5/{name}": item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    return found


def _normal_json(text: bytes) -> str:
    """A model's configuration without the memory addresses Keras puts into it."""

    def without_addresses(found: dict) -> dict:
        return {key: value for key, value in found.items() if key != "shared_object_id"}

    return json.dumps(json.loads(text, object_hook=without_addresses), sort_keys=True)
