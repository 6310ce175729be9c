"""Chunks change nothing but what is in memory at once."""

import numpy as np
import pytest
import tensorflow as tf

import tfparallel

ROWS, ALL = 7, 9


def losses(rows, others):
    """A cross entropy for each row, over all others."""
    (own, labels), every = rows, others["every"]
    logits = others["scale"] * tf.matmul(own, every, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def _inputs():
    rng = np.random.default_rng(0)
    own, every = tf.constant(rng.normal(size=(ROWS, 3))), tf.constant(rng.normal(size=(ALL, 3)))
    return own, tf.range(ROWS), every, tf.constant(2.0, tf.float64)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 100])
def test_values_and_gradients_are_those_of_all_at_once(chunk_rows, in_graph):
    own, labels, every, scale = _inputs()
    weights = tf.range(1.0, ROWS + 1, dtype=tf.float64)

    def step(compute):
        with tf.GradientTape() as tape:
            tape.watch([own, every, scale])
            values = compute((own, labels), {"every": every, "scale": scale})
            loss = tf.reduce_sum(values * weights)
        return values, tape.gradient(loss, [own, every, scale])

    def compute(rows, others):
        return tfparallel.in_chunks(losses, rows, others, chunk_rows)

    expected = step(losses)
    received = (tf.function(step) if in_graph else step)(compute)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), received, expected
    )


def test_scores_of_all_rows_never_stand_in_memory():
    """Of 8192 rows they are 268 MB; here they are those of 64 rows at a time."""

    def gradient(own, compute):
        with tf.GradientTape() as tape:
            tape.watch(own)
            rows, others = (own, tf.range(tf.shape(own)[0])), {"every": own, "scale": 1.0}
            loss = tf.reduce_mean(compute(rows, others))
        return tape.gradient(loss, own)

    def in_chunks(rows, others):
        return tfparallel.in_chunks(losses, rows, others, 64)

    own = tf.random.normal([8192, 8])
    # Some may lie in memory that the process has kept from before.
    assert _peak_bytes(lambda: tf.function(gradient)(own, losses)) > 150e6
    assert _peak_bytes(lambda: tf.function(gradient)(own, in_chunks)) < 60e6


def _peak_bytes(function) -> int:
    """The most memory that this process has while it calls `function`, beyond what it had."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is now what it has
    before = _status_bytes("VmRSS")
    function()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024


def test_rejects_no_rows_a_chunk():
    with pytest.raises(ValueError, match="Received: 0"):
        tfparallel.in_chunks(losses, tf.zeros([2, 1]), tf.zeros([2, 1]), 0)
