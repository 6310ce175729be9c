"""PowerSGD against NumPy, and against what its paper says of it."""

import numpy as np
import pytest
import tensorflow as tf

from tests.communication.compression.ranks import Gradients, Meeting
from tfparallel.communication.compression.orthogonal import orthonormal_rows
from tfparallel.communication.compression.power_sgd import matrix_shape
from tfparallel.compression import GradientCompression, PowerSGD

SHAPES = [(40, 30), (24, 30), (40, 18), (30,)]
RANK, STEPS = 3, 6


def reference(gradients: Gradients, num_ranks: int, queries: list[np.ndarray]) -> list:
    """The sums of every step, in float64, with QR and columns as in the paper."""
    queries = [query.astype("float64").T for query in queries]
    residuals = [[0.0] * len(queries) for _ in range(num_ranks)]
    steps = []
    for step in range(STEPS):
        sums = []
        for i, q in enumerate(queries):
            m = [
                np.asarray(gradients.of(rank, step)[i], "float64") + residuals[rank][i]
                for rank in range(num_ranks)
            ]
            p, _ = np.linalg.qr(sum(each @ q for each in m))
            q_of = [each.T @ p for each in m]
            queries[i] = sum(q_of)
            sums.append(p @ queries[i].T)
            for rank in range(num_ranks):
                residuals[rank][i] = m[rank] - p @ q_of[rank].T
        steps.append(sums)
    return steps


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_equals_numpy(num_ranks):
    gradients = Gradients(SHAPES, num_ranks)

    def train(transport):
        compression = GradientCompression(PowerSGD(RANK), gradients.variables)
        queries = [state["q"].numpy() for state in compression._states[:3]]
        step = tf.function(lambda g: compression.reduce(g, transport))
        return queries, [step(gradients.of(transport.rank, i)) for i in range(STEPS)]

    queries, received = Meeting(num_ranks).run(train)[0]
    expected = reference(gradients, num_ranks, queries)
    for step in range(STEPS):
        for i in range(3):
            np.testing.assert_allclose(received[step][i], expected[step][i], atol=2e-4, rtol=0)
        np.testing.assert_allclose(received[step][3], gradients.total(3, [step]), atol=1e-5)


def test_finds_a_matrix_of_its_rank():
    """With a warm start, a gradient of rank r becomes exact in one step."""
    rng = np.random.default_rng(0)
    matrix = tf.constant(rng.normal(size=(50, 3)) @ rng.normal(size=(3, 40)), tf.float32)
    gradients = Gradients([(50, 40)], 1)

    def train(transport):
        compression = GradientCompression(PowerSGD(3), gradients.variables)
        return compression.reduce([matrix], transport)[0]

    np.testing.assert_allclose(Meeting(1).run(train)[0], matrix, atol=1e-4)


def test_a_warm_start_approaches_the_best_approximation():
    rng = np.random.default_rng(0)
    u, s, v = np.linalg.svd(rng.normal(size=(40, 30)))
    s = 0.8 ** np.arange(30)
    matrix = (u[:, :30] * s) @ v
    best = np.sqrt(np.sum(s[3:] ** 2) / np.sum(s**2))
    gradients = Gradients([(40, 30)], 1)

    def train(transport):
        compression = GradientCompression(PowerSGD(3), gradients.variables)
        errors = []
        for _ in range(15):
            compression._states[0]["residual"].assign(tf.zeros([40, 30]))
            sent = compression.reduce([tf.constant(matrix, tf.float32)], transport)[0]
            errors.append(np.linalg.norm(sent - matrix) / np.linalg.norm(matrix))
        return errors

    errors = Meeting(1).run(train)[0]
    assert errors[0] > 1.1 * best
    assert errors[-1] < 1.001 * best


def test_only_matrices_that_become_smaller_are_compressed():
    compressor = PowerSGD(4)
    assert compressor.applies_to((9, 8)) is ((9 + 8) * 4 < 9 * 8)
    assert compressor.applies_to((10, 8)) is ((10 + 8) * 4 < 10 * 8)
    assert not compressor.applies_to((8, 8))
    assert not compressor.applies_to((100,))
    assert not compressor.applies_to(())
    assert not compressor.applies_to((0, 100))


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((3, 3, 64, 128), (576, 128)),  # a convolution: by filter
        ((256, 8, 32), (256, 256)),  # attention: into heads
        ((8, 32, 256), (256, 256)),  # attention: out of heads
    ],
)
def test_tensors_are_cut_where_the_factors_are_smallest(shape, matrix):
    assert matrix_shape(shape) == matrix


def test_matrices_of_several_buckets_share_collectives():
    """Two rounds each, but one turn more than buckets: P of one goes with Q of the one before."""
    gradients, meeting = Gradients([(40, 30)] * 4 + [(30,)], 2), Meeting(2)

    def reduce(transport):
        compression = GradientCompression(PowerSGD(2), gradients.variables, bucket_bytes=4 * 1200)
        return compression.reduce(gradients.of(transport.rank, 0), transport)

    meeting.run(reduce)
    p, q, vector = 4 * 2 * 40, 4 * 2 * 30, 4 * 30
    assert [size for _, size in meeting.sent] == [p, p + q, p + q, p + q + vector, q]


def test_rows_become_orthonormal():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 4, 100)) * 10.0 ** rng.uniform(-18, 15, size=(5, 1, 1))
    basis = orthonormal_rows(tf.constant(rows, tf.float32)).numpy()
    for b, r in zip(basis, rows, strict=True):
        np.testing.assert_allclose(b @ b.T, np.eye(4), atol=1e-5)
        np.testing.assert_allclose(r @ b.T @ b, r, rtol=1e-3, atol=1e-5 * np.abs(r).max())


def test_dependent_rows_never_stretch():
    """A gradient whose rank is lower than PowerSGD's, or zero."""
    rng = np.random.default_rng(0)
    row = rng.normal(size=(1, 100))
    noise = 1e-7 * rng.normal(size=(3, 100))
    for rows in [np.zeros((3, 100)), np.repeat(row, 3, 0), np.repeat(row, 3, 0) + noise]:
        basis = orthonormal_rows(tf.constant(rows, tf.float32)).numpy()
        assert np.linalg.norm(basis, 2) < 1 + 1e-5
        np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-4)


def test_rows_that_are_not_finite_give_nan():
    rows = np.ones((2, 3, 10), "float32")
    rows[1, 2, 3] = np.inf
    basis = orthonormal_rows(tf.constant(rows)).numpy()
    assert np.all(np.isfinite(basis[0])) and np.all(np.isnan(basis[1]))


def test_factors_of_one_tensor_stand_for_it():
    """For a parameter server: what one worker sends by itself."""
    rng = np.random.default_rng(0)
    tensor = tf.constant(rng.normal(size=(3, 4, 2)) @ rng.normal(size=(2, 20)), tf.float32)
    compressor = PowerSGD(2)
    state = compressor.initial_state(tensor.shape, seed=1)
    payload, context = compressor.compress(tensor, state, None)
    assert sum(4 * part.shape.num_elements() for part in payload) == compressor.payload_bytes(
        tensor.shape
    )
    np.testing.assert_allclose(compressor.decompress(payload, context), tensor, atol=1e-4)
