"""Functions that a notebook has workers call."""

import pytest

import tfparallel
from tests.helpers import train
from tfparallel.launch import notebook

pytestmark = [pytest.mark.timeout(240), pytest.mark.turns]


def test_workers_train_as_one_device_and_results_come_back_by_rank(capsys):
    def trained(factor):
        import keras

        import tfparallel
        from tests.helpers import momentum_sgd, train

        def optimizer():
            optimizer = momentum_sgd()
            optimizer.learning_rate = 0.1 * factor
            return optimizer

        strategy = tfparallel.MultiWorkerMirroredStrategy()
        print("rank", strategy.rank, keras.backend.backend())
        return strategy.rank, train(strategy, optimizer=optimizer).model.get_weights()

    (first, weights), (second, others) = tfparallel.launch.notebook(trained, 1.0, workers=2)
    assert (first, second) == (0, 1)
    for expected, one, other in zip(train(None).model.get_weights(), weights, others, strict=True):
        assert abs(expected - one).max() < 1e-6
        assert (one == other).all()
    assert "[worker 1] rank 1 tensorflow" in capsys.readouterr().out


def test_a_worker_that_fails_is_named_and_its_traceback_printed(capsys):
    def fail():
        raise ZeroDivisionError("of mine")

    with pytest.raises(RuntimeError, match="Received: worker [01] failed .exit status 1"):
        notebook(fail)
    assert "ZeroDivisionError: of mine" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least 1. Received: 0"):
        notebook(fail, workers=0)
