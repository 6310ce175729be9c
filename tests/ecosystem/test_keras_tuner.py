"""Keras Tuner searches under our strategies as under none: one argument more."""

import keras
import numpy as np
import pytest

import tfparallel

keras_tuner = pytest.importorskip("keras_tuner", reason="keras-tuner is not installed")

STRATEGIES = {
    "mirrored": lambda: tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central_storage": lambda: tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0"),
}


def build(choice) -> keras.Model:
    keras.utils.set_random_seed(0)
    units = choice.Choice("units", [2, 8])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def search(folder, strategy) -> dict[int, float]:
    """The validation loss by number of units."""
    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    y = x.sum(1)
    tuner = keras_tuner.GridSearch(
        build, "val_loss", directory=folder, distribution_strategy=strategy
    )
    tuner.search(x, y, epochs=2, batch_size=16, shuffle=False, validation_data=(x, y), verbose=0)
    trials = tuner.oracle.get_best_trials(2)
    return {trial.hyperparameters.get("units"): trial.score for trial in trials}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_search_scores_as_on_one_device(tmp_path, name):
    expected = search(tmp_path / "plain", None)
    received = search(tmp_path / name, STRATEGIES[name]())
    assert set(expected) == {2, 8}
    assert received == pytest.approx(expected, rel=1e-5)
