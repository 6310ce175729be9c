"""A training that is interrupted on one mesh goes on, on another one, as if nothing had been."""

import keras
import pytest

from tests.helpers import assert_same_training, train
from tests.hybrid.meshes import SIZES, hybrid
from tfparallel.callbacks import BackupAndRestore

BATCHES = 6  # of two epochs
THREE = [{"pipeline": 2, "model": 2}, {"shard": 2, "pipeline": 2}, {"shard": 2, "model": 2}]
MESHES = [*THREE, *(sizes for sizes in SIZES if sizes not in THREE)]


class Interrupt(keras.callbacks.Callback):
    """The training fails behind its first batch."""

    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def train_under(strategy, *callbacks):
    def adam():
        return keras.optimizers.Adam(0.01, global_clipnorm=0.5)

    return train(strategy, rows=36, batch_size=12, optimizer=adam, callbacks=list(callbacks))


@pytest.mark.turns
@pytest.mark.parametrize(
    "meshes",
    [
        MESHES[: BATCHES // 2],
        pytest.param(MESHES[BATCHES // 2 : BATCHES + 2], marks=pytest.mark.long),
        pytest.param(MESHES[BATCHES + 2 :], marks=pytest.mark.long),
    ],
    ids=lambda meshes: ", ".join(" x ".join(each) for each in meshes),
)
def test_each_mesh_goes_on_where_the_one_before_it_was_interrupted(tmp_path, meshes):
    assert len(meshes) < BATCHES
    options = {"save_freq": 1, "asynchronous": False}
    for sizes in meshes:
        with pytest.raises(KeyboardInterrupt):
            train_under(hybrid(sizes), BackupAndRestore(tmp_path, **options), Interrupt())
    received = train_under(None, BackupAndRestore(tmp_path, **options))
    assert_same_training(train_under(None), received)
