"""Rounds of local steps are what workers do who train alone and average by hand."""

import keras
import numpy as np
import pytest

from tests.communication.rounds_worker import BATCH, EPOCHS, ROWS, build, data
from tests.multi_process.pool import WorkerPool, cluster_environments, horovod_environments
from tfparallel.communication.local_sgd import DiLoCo, LocalSGD, as_meeting
from tfparallel.communication.neighbours import GREETING_BYTES
from tfparallel.compression import PowerSGD

pytestmark = pytest.mark.turns

OVER_HOROVOD_IF_LONG = pytest.mark.parametrize(
    "workers",
    [cluster_environments, pytest.param(horovod_environments, marks=pytest.mark.long)],
    indirect=True,
)


@pytest.fixture(scope="module", params=[cluster_environments, horovod_environments])
def workers(request):
    pool = WorkerPool(["-m", "tests.communication.rounds_worker"], lambda: request.param(2))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def alone():
    pool = WorkerPool(["-m", "tests.communication.rounds_worker"], lambda: cluster_environments(1))
    yield pool
    pool.close()


def trained(workers, **request) -> dict:
    """What rank 0 replies, after both are found to have ended alike."""
    first, second = workers.ask(request)
    for key in ("history", "weights", "own"):
        assert first[key] == second[key], key
    return first


def by_hand(spec, optimizer: str, batch_norm: bool) -> list[np.ndarray]:
    """Weights after two plain Keras models train on half of each batch, and meet after rounds."""
    x, y = data()
    models = [build(optimizer, batch_norm) for _ in range(2)]
    anchor = [v.numpy().astype("float64") for v in models[0].trainable_variables]
    momenta = [np.zeros_like(a) for a in anchor]
    shares, steps = np.zeros(2), 0
    starts = list(range(0, ROWS, BATCH))
    for _ in range(EPOCHS):
        for start in starts:
            rows = min(BATCH, ROWS - start)
            middle = start + rows // 2 + rows % 2
            parts = [slice(start, middle), slice(middle, start + rows)]
            for i, (model, part) in enumerate(zip(models, parts, strict=True)):
                model.train_on_batch(x[part], y[part])
                shares[i] += (part.stop - part.start) / rows
            steps += 1
            if steps < spec.every and start != starts[-1]:
                continue
            own = [[v.numpy() for v in m.trainable_variables] for m in models]
            for j, (a, b) in enumerate(zip(*own, strict=True)):
                outer, mean = spec.outer, np.average([a, b], 0, shares)
                change = anchor[j] - mean
                momenta[j] = outer.momentum * momenta[j] + change
                step = change + outer.momentum * momenta[j] if outer.nesterov else momenta[j]
                anchor[j] = anchor[j] - outer.learning_rate * step if spec.has_anchor else mean
                for model in models:
                    model.trainable_variables[j].assign(anchor[j])
            shares, steps = np.zeros(2), 0
    return anchor


@pytest.mark.parametrize("workers", [cluster_environments], indirect=True)
def test_what_is_made_before_the_strategy_does_not_start_tensorflow(workers):
    """The first of these tests: its workers are new."""
    assert trained(workers, meeting="diloco", epochs=1)["history"]
    workers.close()
    assert trained(workers, meeting="plain_outer", epochs=1)["history"]


@OVER_HOROVOD_IF_LONG
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_workers_average_their_weights(workers, optimizer):
    result = trained(workers, meeting="every_3", optimizer=optimizer)
    expected = by_hand(LocalSGD(every=3), optimizer, batch_norm=False)
    for ours, theirs in zip(result["own"], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_an_outer_optimizer_takes_the_mean_change(workers):
    result = trained(workers, meeting="diloco", optimizer="adam")
    expected = by_hand(DiLoCo(every=2), "adam", batch_norm=False)
    for ours, theirs in zip(result["own"], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@OVER_HOROVOD_IF_LONG
def test_rounds_of_one_step_are_synchronous_training(workers):
    synchronous = trained(workers, meeting="none", optimizer="adam")
    assert (
        trained(workers, meeting="every_1", optimizer="adam")["weights"] == synchronous["weights"]
    )
    synchronous = trained(workers, meeting="none", batch_norm=True)
    plain = trained(workers, meeting="plain_outer", batch_norm=True)
    for ours, theirs in zip(plain["weights"], synchronous["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    for name, values in synchronous["history"].items():
        np.testing.assert_allclose(plain["history"][name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("workers", [cluster_environments], indirect=True)
def test_an_outer_step_of_rate_one_without_momentum_is_averaging(workers):
    """For rounds of three steps, and where the epoch ends one early."""
    options = {"optimizer": "adam", "batch_norm": True}
    averaged = trained(workers, meeting="every_3", **options)
    stepped = trained(workers, meeting="plain_outer_3", **options)
    for ours, theirs in zip(stepped["weights"], averaged["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    apart = trained(workers, meeting="diloco", **options)["weights"]
    assert np.max(np.abs(np.subtract(apart[0], averaged["weights"][0]))) > 1e-3


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_rounds_of_one_worker_change_nothing(alone, optimizer):
    """It is plain Keras that it trains like, and synchronous training to the bit."""
    model = build(optimizer, batch_norm=True)
    x, y = data()
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False)
    (synchronous,) = alone.ask({"meeting": "none", "optimizer": optimizer, "batch_norm": True})
    for ours, theirs in zip(synchronous["weights"], model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for meeting in ("every_3", "plain_outer_3", "diloco"):
        (result,) = alone.ask({"meeting": meeting, "optimizer": optimizer, "batch_norm": True})
        assert result["weights"] == synchronous["weights"], meeting


def test_epochs_end_with_what_all_workers_saw(workers):
    history = trained(workers, meeting="every_3", optimizer="adam", batch_norm=True)["history"]
    assert 0 < history["loss"][1] < history["loss"][0]
    assert history["val_loss"] == pytest.approx(history["val_loss"])


@OVER_HOROVOD_IF_LONG
def test_a_training_goes_on_in_the_middle_of_a_round(workers, tmp_path):
    """The sixth batch is the second of a round: workers have weights and moments of their own."""
    for meeting in ("every_3", "diloco"):
        whole = trained(workers, meeting=meeting, optimizer="adam", batch_norm=True)
        folder = str(tmp_path / meeting)
        again = trained(workers, meeting=meeting, optimizer="adam", batch_norm=True, folder=folder)
        assert again["weights"] == whole["weights"]


def test_rounds_of_h_steps_send_the_bytes_of_one_step_in_h(workers):
    """An epoch has four steps, and metrics that are summed at its end: equal bytes for all rounds.

    Without rounds the loss is summed in every step, too.
    """
    num_rounds = {"plain_outer": 4, "every_2": 2, "every_3": 2, "every_4": 1}
    sent = {m: trained(workers, meeting=m, epochs=1)["bytes"] for m in ("none", *num_rounds)}
    if not sent["none"]:
        pytest.skip("Horovod does not say what it sends")
    weights = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    one = sent["every_2"] - sent["every_4"]
    assert weights < one <= weights + 8 + 2 * GREETING_BYTES  # rows trained on, two dtypes
    at_end = sent["every_4"] - one
    for meeting, rounds in num_rounds.items():
        assert sent[meeting] == at_end + rounds * one, meeting
    assert one <= (sent["none"] - at_end) / 4


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: LocalSGD(0), "at least 1.*Received: 0"),
        (lambda: LocalSGD(True), "Received: True"),
        (lambda: DiLoCo(2.5), "every: expected int"),
        (lambda: DiLoCo(2, keras.optimizers.Adam()), "outer: expected SGD"),
        (lambda: DiLoCo(2, keras.optimizers.SGD(clipnorm=1.0)), "Received also: clipnorm"),
        (
            lambda: DiLoCo(
                2, keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5))
            ),
            "a schedule of the learning rate",
        ),
        (
            DiLoCo(2, keras.optimizers.Adam).tensorflow_may_start,
            "must be a keras.optimizers.SGD",
        ),
        (lambda: as_meeting("local"), "`compression` takes None"),
    ],
)
def test_what_is_no_round_is_told_so(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


def test_what_workers_meet_by():
    assert as_meeting(None) is None
    assert as_meeting(LocalSGD(1)) is None
    assert isinstance(as_meeting("power_sgd"), PowerSGD)
    assert repr(as_meeting(LocalSGD(8))) == "LocalSGD(every=8)"
    assert repr(DiLoCo(4)) == "DiLoCo(every=4, outer=SGD(0.7, momentum=0.9, nesterov=True))"
