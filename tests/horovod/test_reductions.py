"""Real `horovodrun --mpi`: what a Horovod that is built with MPI adds."""

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")

from tests.helpers import tiny_data
from tests.horovod.launching import horovodrun
from tests.horovod.reductions import BATCH, LEARNING_RATE, ROWS, compiled_model, fit

NUM_RANKS = 4


@pytest.fixture(scope="module")
def under_mpi(tmp_path_factory):
    """What four ranks have said, and a function of their weights by reduction."""
    import horovod.tensorflow as hvd

    if not hvd.mpi_built():
        pytest.skip(
            "this Horovod is built without MPI: HOROVOD_WITH_MPI=1 python -m "
            "tfparallel.build_horovod"
        )
    folder = tmp_path_factory.mktemp("mpi")
    status, output = horovodrun("reductions", folder, num_ranks=NUM_RANKS, options=["--mpi"])
    assert status == 0, output

    def weights(reduction):
        files = [folder / f"{reduction}-{rank}.npz" for rank in range(NUM_RANKS)]
        return [list(np.load(file).values()) for file in files]

    return output, weights


def assert_all_have(weights, expected):
    for of_rank in weights:
        for received, right in zip(of_rank, expected, strict=True):
            np.testing.assert_allclose(received, right, atol=1e-6)


@pytest.mark.timeout(300)
def test_the_ring_of_mpi_trains_as_one_device_does(under_mpi):
    keras.backend.clear_session()
    assert_all_have(under_mpi[1]("ring"), fit(compiled_model()))


@pytest.mark.timeout(300)
def test_adasum_combines_the_gradients_of_ranks_as_in_the_paper(under_mpi):
    keras.backend.clear_session()
    model = compiled_model()
    x, y = tiny_data(ROWS)
    for start in range(0, ROWS, BATCH):
        of_ranks = []
        for rows in np.split(np.arange(start, start + BATCH), NUM_RANKS):
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x[rows], y[rows], model(x[rows]))
            of_ranks.append(tape.gradient(loss, [v.value for v in model.trainable_variables]))
        for variable, *gradients in zip(model.trainable_variables, *of_ranks, strict=True):
            while len(gradients) > 1:  # neighbours meet, then their neighbours
                gradients = [
                    adasum(gradients[i].numpy(), gradients[i + 1].numpy())
                    for i in range(0, len(gradients), 2)
                ]
            variable.assign_sub(LEARNING_RATE * gradients[0])
    assert_all_have(under_mpi[1]("adasum"), model.get_weights())


def adasum(a, b):
    """Maleki et al. 2020, https://arxiv.org/abs/2006.02924, section 3: what both agree on, once."""
    dot = float(np.vdot(a, b))
    return tf.constant((1 - dot / (2 * np.vdot(a, a))) * a + (1 - dot / (2 * np.vdot(b, b))) * b)


@pytest.mark.timeout(300)
def test_hierarchical_is_refused_where_horovod_would_ignore_it(under_mpi):
    assert under_mpi[0].count('reduction="hierarchical" needs a Horovod built with NCCL') == 4
