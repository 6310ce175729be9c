"""What the callback does beside resuming exactly: when it saves, and what errors it raises."""

import datetime
import os
import signal
import threading
import types

import keras
import numpy as np
import pytest

import tfparallel
from tests.helpers import assert_same_training, tiny_compile_options, tiny_data, train
from tfparallel.callbacks import BackupAndRestore, BackupError
from tfparallel.callbacks.backup.model_state import mirrored_state, replica_state
from tfparallel.callbacks.backup.snapshot import Restoration
from tfparallel.callbacks.backup.storage import Storage
from tfparallel.callbacks.preemption import EXIT_STATUS
from tfparallel.coordination.writer import writer_for

pytestmark = pytest.mark.turns

BATCHES = 3  # of an epoch


def fit(*callbacks, epochs=2, units=4, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(units), keras.layers.Dense(3)])
    model.compile(optimizer="adam", **tiny_compile_options(), run_eagerly=True)
    x, y = tiny_data(4 * BATCHES)
    options = {"batch_size": 4, "epochs": epochs, "verbose": 0, **options}
    return model.fit(x, y, callbacks=list(callbacks), **options)


class Interrupt(keras.callbacks.Callback):
    """Calls `action` after so many batches; by default the training fails there."""

    def __init__(self, batches, action=None):
        super().__init__()
        self._left, self._action = batches, action

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left == 0 and self._action is None:
            raise KeyboardInterrupt
        if self._left == 0:
            self._action()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "backups"


def interrupted(folder, batches=4, **options):
    with pytest.raises(KeyboardInterrupt):
        fit(BackupAndRestore(folder, **{"save_freq": 1, **options}), Interrupt(batches))
    writer_for(folder).wait()
    return Storage(folder)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_training_goes_on_without_changing_a_snapshot(jit_compile):
    """A snapshot shares memory with the variables: dense, sparse and compiled updates leave it."""
    model = keras.Sequential([keras.layers.Embedding(9, 4), keras.layers.Dense(3)])
    model.compile("adam", "mse", jit_compile=jit_compile)
    x, y = np.arange(4).reshape(2, 2), np.ones((2, 2, 3))
    model.train_on_batch(x, y)
    arrays = mirrored_state(model)["arrays"]
    before = [np.array(array) for array in arrays]
    for _ in range(3):
        model.train_on_batch(x, y)
    for array, expected in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, expected)
    assert not np.array_equal(mirrored_state(model)["arrays"][0], before[0])


# ---- when it saves -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_freq", "num_saves"),
    [("epoch", 2), (1, 6), (4, 1), (False, 0), (datetime.timedelta(microseconds=1), 6)],
)
def test_saves_as_often_as_asked(folder, save_freq, num_saves):
    fit(BackupAndRestore(folder, save_freq=save_freq, keep=1, delete_on_success=False))
    assert Storage(folder).numbers() == ([num_saves] if num_saves else [])


def test_keeps_as_many_as_asked(folder):
    fit(BackupAndRestore(folder, save_freq=1, keep=3, delete_on_success=False))
    assert Storage(folder).numbers() == [4, 5, 6]


def test_deletes_on_success_unless_told_not_to(folder):
    fit(BackupAndRestore(folder))
    assert not folder.exists()


def test_training_goes_on_while_a_backup_is_written(folder, monkeypatch):
    """And what is written is the state at the time of the save."""
    gate, weights = threading.Event(), {}
    begin = Storage.begin
    monkeypatch.setattr(Storage, "begin", lambda *a, **k: gate.wait(10) and begin(*a, **k))
    backup = BackupAndRestore(folder, save_freq=2, delete_on_success=False)

    def remember(name):
        weights[name] = backup.model.get_weights()

    def go_on():
        remember("later")
        assert not Storage(folder).numbers()
        gate.set()

    fit(Interrupt(2, lambda: remember("saved")), Interrupt(3, go_on), backup, epochs=1)
    monkeypatch.undo()
    resumed = BackupAndRestore(folder, save_freq=False)
    fit(
        resumed,
        Interrupt(1, lambda: None),
        keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: weights.setdefault(
                f"restored {batch}", resumed.model.get_weights()
            )
        ),
        epochs=1,
    )
    assert all(map(np.array_equal, weights["restored 2"], weights["saved"]))
    assert not any(map(np.array_equal, weights["later"], weights["saved"]))


# ---- where it resumes ----------------------------------------------------------------------------


def test_a_second_fit_runs_all_its_epochs(folder):
    interrupted(folder)
    backup = BackupAndRestore(folder)
    assert fit(backup).epoch == [0, 1]  # of the whole run: History is restored
    assert fit(backup).epoch == [0, 1]
    assert backup.model._initial_epoch is None


def test_a_finished_run_is_not_trained_again(folder):
    first = fit(BackupAndRestore(folder, delete_on_success=False))
    second = fit(BackupAndRestore(folder), Interrupt(1))
    assert second.history == first.history


def test_a_run_that_was_stopped_stays_stopped(folder):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    fit(BackupAndRestore(folder, delete_on_success=False), Stop())
    assert fit(BackupAndRestore(folder), Interrupt(1)).epoch == [0]


def test_is_told_last_and_once(folder):
    calls = []
    backup = BackupAndRestore(folder)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: calls.append("other"))
    save = backup._save
    backup._save = lambda: (calls.append("save"), save())
    fit(backup, note)
    assert calls == ["other", "save"] * 2


def test_is_alone(folder):
    with pytest.raises(BackupError, match="A training has one BackupAndRestore"):
        fit(BackupAndRestore(folder), BackupAndRestore(folder))


def test_is_for_fit_only(folder):
    backup = BackupAndRestore(folder)
    callbacks = keras.callbacks.CallbackList([backup], model=keras.Sequential())
    with pytest.raises(BackupError, match="a callback of Model.fit"):
        callbacks.on_train_begin()


@pytest.mark.parametrize("batches", [2, 3, 4])
def test_another_strategy_goes_on_from_there(folder, caplog, batches):
    """In the middle of an epoch, at its last batch, and in the next one."""

    def train_under(strategy, *callbacks):
        return train(strategy, rows=36, batch_size=12, callbacks=list(callbacks))

    expected = train_under(None)
    three = tfparallel.MirroredStrategy([f"CPU:{i}" for i in range(3)])
    two = tfparallel.CentralStorageStrategy(["CPU:0", "CPU:1"])
    backup = {"save_freq": 1, "asynchronous": False}
    stages = tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2)
    for strategy in (three, two, stages):
        with pytest.raises(KeyboardInterrupt):
            stop = Interrupt(batches if strategy is three else 1)
            train_under(strategy, BackupAndRestore(folder, **backup), stop)
    received = train_under(None, BackupAndRestore(folder, **backup))
    assert_same_training(expected, received)
    assert "Not carried over: random numbers that differ by replica" in caplog.text


@pytest.mark.parametrize(("rank", "saved_by", "expected"), [(1, 2, 7), (0, 2, 7), (1, 3, 0)])
def test_sums_over_other_replicas_of_as_many_workers_stay_where_they_were(rank, saved_by, expected):
    """Each worker has read its own part, of one replica here. Of others all read all parts.

    Where workers but the first began at zero, the first epoch's logs lacked their rows.
    """
    model = train(tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]), epochs=1).model
    count = len(replica_state(model))
    restoration = types.SimpleNamespace(
        _shared={"num_workers": saved_by}, _call=types.SimpleNamespace(model=model)
    )
    workers = types.SimpleNamespace(num_workers=2, is_chief=rank == 0)
    saved = [{"metrics": [[np.float32(7)]] * count}]
    received = Restoration._metrics_for(restoration, saved, workers)
    assert received == [[expected, 0]] * count


# ---- what cannot be restored ---------------------------------------------------------------------


def test_a_damaged_backup_is_reported_and_the_one_before_it_taken(folder, caplog):
    storage = interrupted(folder)
    newest = storage.numbers()[-1]
    os.truncate(storage.path(newest) / "shared.safetensors", 10)
    assert fit(BackupAndRestore(folder)).epoch == [0, 1]
    assert f"backup-{newest:08d}" in caplog.text


def test_never_starts_anew_when_all_backups_are_damaged(folder):
    storage = interrupted(folder)
    for number in storage.numbers():
        (storage.path(number) / "worker-0.json").unlink()
    with pytest.raises(BackupError, match="(?s)valid for all workers.*worker-0.json.*empty"):
        fit(BackupAndRestore(folder))
    assert len(storage.numbers()) == 2


def test_refuses_the_backup_of_another_model(folder):
    interrupted(folder)
    with pytest.raises(BackupError, match=r"kernel float32\[6, 5\].*\[6, 4\]"):
        fit(BackupAndRestore(folder), units=5)


def test_says_which_callbacks_were_not_carried_over(folder, caplog):
    interrupted(folder)
    fit(BackupAndRestore(folder), keras.callbacks.EarlyStopping("loss"))
    assert "Not carried over: EarlyStopping-0." in caplog.text


# ---- what cannot be written ----------------------------------------------------------------------


def test_a_full_disk_ends_the_training_or_not(small_disk, caplog):
    folder = small_disk / "backups"
    storage = interrupted(folder)
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - 8192))
    before = storage.numbers()
    with pytest.raises(BackupError, match="(?s)before it are as they were.*No space left"):
        fit(BackupAndRestore(folder, save_freq=1))
    assert storage.numbers() == before
    options = {"save_freq": 1, "delete_on_success": False}
    assert fit(BackupAndRestore(folder, on_error="warn", **options)).epoch == [0, 1]
    assert "Training goes on without a new backup" in caplog.text
    assert storage.numbers() == before
    for number in before:
        storage.read(number)


def test_a_folder_that_cannot_be_written():
    with pytest.raises(BackupError, match="/proc/backups"):
        fit(BackupAndRestore("/proc/backups"))
    assert fit(BackupAndRestore("/proc/backups", on_error="warn")).epoch == [0, 1]


def test_an_error_surfaces_at_the_next_batch(folder, monkeypatch):
    batches = []

    def fail(*arguments, **options):
        raise OSError("broken")

    monkeypatch.setattr(Storage, "begin", fail)
    backup = BackupAndRestore(folder, save_freq=2)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: batches.append(b))
    pause = Interrupt(3, lambda: backup._writer._thread.join())
    with pytest.raises(BackupError, match="broken"):
        fit(backup, note, pause)
    assert batches == [0, 1, 2]


def test_refuses_the_state_of_a_callback_that_has_no_file_format(folder):
    class Odd(keras.callbacks.Callback):
        def get_state(self):
            return {"seen": {1}}

    with pytest.raises(TypeError, match="Received: set at callbacks/Odd-0/seen"):
        fit(BackupAndRestore(folder), Odd())


# ---- SIGTERM -------------------------------------------------------------------------------------


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_after_the_step_and_exits(folder):
    expected = fit()
    with pytest.raises(SystemExit) as raised:
        fit(BackupAndRestore(folder, save_freq=False), Interrupt(4, sigterm))
    assert raised.value.code == EXIT_STATUS == 143
    assert Storage(folder).manifest(1).about["batch"] == 1
    assert fit(BackupAndRestore(folder)).history == expected.history


@pytest.mark.parametrize("epoch", [1, 2])
def test_sigterm_while_it_validates_saves_and_exits(folder, epoch):
    """Also in the last epoch, after which no step comes: the next run goes on behind `fit`."""
    x, y = tiny_data(4)
    expected = fit(validation_data=(x, y))
    ends = iter([lambda: None] * (epoch - 1) + [sigterm] + [lambda: None])
    stop = keras.callbacks.LambdaCallback()
    stop.on_test_end = lambda logs=None: next(ends)()
    with pytest.raises(SystemExit) as raised:
        fit(BackupAndRestore(folder, save_freq=False), stop, validation_data=(x, y))
    assert raised.value.code == 143
    assert Storage(folder).manifest(1).about["epoch"] == epoch
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: steps.append(b))
    received = fit(BackupAndRestore(folder), count, validation_data=(x, y))
    assert received.history == expected.history
    assert len(steps) == (2 - epoch) * BATCHES
    assert not folder.exists()


def test_sigterm_after_the_last_epoch_is_not_forgotten(folder):
    class Late(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            sigterm()

    with pytest.raises(SystemExit):
        fit(Late(), BackupAndRestore(folder))
    assert Storage(folder).numbers()
    assert fit(BackupAndRestore(folder), Interrupt(1)).epoch == [0, 1]


def test_sigterm_goes_to_its_old_handler_when_no_training_runs(folder):
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        interrupted(folder)  # the training has failed, so nobody gave SIGTERM back
        sigterm()
        assert received == [signal.SIGTERM]
        fit(BackupAndRestore(folder))
        sigterm()
        assert received == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, previous)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backup_dir": ""}, "must name a folder"),
        ({"save_freq": "batch"}, "Received: 'batch'"),
        ({"save_freq": 0}, "Received: 0"),
        ({"save_freq": True}, "Received: True"),
        ({"save_freq": datetime.timedelta(0)}, "timedelta"),
        ({"keep": 0}, "at least 1. Received: 0"),
        ({"on_error": "ignore"}, "Received: 'ignore'"),
    ],
)
def test_refuses_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        tfparallel.callbacks.BackupAndRestore(**{"backup_dir": "backups", **options})
