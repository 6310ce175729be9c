"""What an earlier release has written loads in this one; `old_files.py` wrote it."""

import json
import shutil
import zipfile

import keras
import numpy as np
import pytest
from packaging.version import Version

from tests.release.old_files import (
    EPOCHS,
    EPOCHS_BEFORE,
    FILES,
    STRATEGIES,
    compiled_model,
    data,
    train,
    weights_of,
)

pytestmark = pytest.mark.turns

FOLDERS = sorted(path for path in FILES.glob("*/*") if path.is_dir())
_CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(params=FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def old(request, tmp_path):
    """What a release wrote under a strategy, in a folder that may be written to."""
    return shutil.copytree(request.param, tmp_path / request.param.name)


@pytest.fixture
def strategy(old):
    return STRATEGIES[old.name]()


def saved(old) -> dict[str, np.ndarray]:
    with np.load(old / "saved.npz") as arrays:
        return dict(arrays)


def assert_holds_what_was_saved(model: keras.Model, old) -> None:
    expected = saved(old)
    predicted = expected.pop("predicted")
    received = weights_of(model)
    assert received.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(received[path], value, err_msg=path)
    np.testing.assert_allclose(model.predict(data()[0][:8], verbose=0), predicted, **_CLOSE)


def test_there_are_files_of_a_release():
    assert {folder.name for folder in FOLDERS} == set(STRATEGIES)


def test_a_model_loads_without_a_strategy(old):
    with zipfile.ZipFile(old / "model.keras") as file:
        written_by = json.loads(file.read("metadata.json"))["keras_version"]
    if Version(keras.__version__) < Version(written_by):
        pytest.skip(f"Keras {keras.__version__} does not load models of Keras {written_by}")
    assert_holds_what_was_saved(keras.models.load_model(old / "model.keras"), old)


def test_weights_load_under_the_strategy(old, strategy):
    model = compiled_model(strategy)
    model.load_weights(old / "model.weights.h5")
    assert_holds_what_was_saved(model, old)


def test_a_backup_goes_on_as_if_there_had_been_one_training(old, strategy, tmp_path):
    model = compiled_model(strategy)
    history = train(model, old / "backups", EPOCHS)
    undisturbed = compiled_model(strategy)
    expected = train(undisturbed, tmp_path / "unused", EPOCHS)
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, **_CLOSE)
    for path, value in weights_of(undisturbed).items():
        np.testing.assert_allclose(weights_of(model)[path], value, **_CLOSE, err_msg=path)


def test_a_backup_is_taken_and_not_begun_anew(old, strategy, capsys):
    model = compiled_model(strategy)
    assert len(train(model, old / "backups", EPOCHS_BEFORE)["loss"]) == EPOCHS_BEFORE
    assert_holds_what_was_saved(model, old)  # nothing was trained: all epochs are done
