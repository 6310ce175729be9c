"""How the rows of a batch are split."""

import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.replicas.batch import (
    Batch,
    InPlace,
    OnHost,
    OnHosts,
    _hide_num_rows,
    concat_rows,
    split_rows,
)


@pytest.mark.parametrize(
    ("num_rows", "num_replicas", "bounds"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (7, 2, [(0, 4), (4, 7)]),
        (5, 3, [(0, 2), (2, 4), (4, 5)]),
        (1, 3, [(0, 1), (1, 1), (1, 1)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_rows_are_split_in_order_and_as_even_as_possible(num_rows, num_replicas, bounds):
    assert split_rows(num_rows, num_replicas, range(num_replicas)) == bounds
    symbolic = split_rows(tf.constant(num_rows), num_replicas, range(num_replicas))
    assert [(int(start), int(end)) for start, end in symbolic] == bounds


def test_a_worker_gets_the_bounds_of_its_replicas_only():
    assert split_rows(10, 4, range(2, 4)) == [(6, 8), (8, 10)]


@pytest.fixture(scope="module")
def extended():
    return tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).extended


def test_every_row_of_every_kind_of_tensor_goes_to_one_replica(extended):
    rows = np.arange(15, dtype="float32").reshape(5, 3)
    data = {
        "dense": rows,
        "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5, 6, 7]]),
        "sparse": tf.sparse.from_dense(rows),
        "scalar": tf.constant(3.0),
        "absent": None,
    }
    batch = Batch(extended, data)
    assert batch.rows == [3, 2]
    np.testing.assert_allclose(batch.weights, [0.6, 0.4])
    np.testing.assert_array_equal(concat_rows([p["dense"] for p in batch.parts]), rows)
    ragged = concat_rows([p["ragged"] for p in batch.parts])
    assert ragged.to_list() == data["ragged"].to_list()
    sparse = concat_rows([p["sparse"] for p in batch.parts])
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), rows)
    assert [p["scalar"].numpy() for p in batch.parts] == [3.0, 3.0]
    assert [p["absent"] for p in batch.parts] == [None, None]


@pytest.mark.parametrize("num_rows", [5, 2, 1])
@pytest.mark.parametrize("total_is_known", [True, False])
def test_hosts_cut_the_rows_of_their_replicas(extended, num_rows, total_is_known):
    """Each from the whole batch, or from its own rows alone; here inside a function."""
    rows = np.arange(3 * num_rows, dtype="float32").reshape(num_rows, 3)
    bounds = split_rows(num_rows, 2, range(2))

    @tf.function
    def cut(total):
        total = num_rows if total_is_known else total
        whole = [OnHost(f"CPU:{i}", range(i, i + 1), tf.constant(rows)) for i in range(2)]
        own = [
            OnHost(f"CPU:{i}", range(i, i + 1), tf.range(start, end), total, tf.identity)
            for i, (start, end) in enumerate(bounds)
        ]
        batches = [Batch(extended, OnHosts(hosts)) for hosts in (whole, own)]
        return [(batch.parts, batch.rows, batch.weights) for batch in batches]

    (whole, *of_whole), (own, *of_own) = cut(tf.constant(num_rows))
    expected = Batch(extended, rows)
    for parts, numbers, expected_part in zip(whole, own, expected.parts, strict=True):
        np.testing.assert_array_equal(parts, expected_part)
        np.testing.assert_array_equal(rows[numbers], expected_part)
    for numbers, weights in (of_whole, of_own):
        np.testing.assert_array_equal(numbers, expected.rows)
        np.testing.assert_allclose(weights, expected.weights)


def test_a_batch_without_rows_is_refused(extended):
    with pytest.raises(ValueError, match="at least one tensor with rows"):
        Batch(extended, {"x": tf.constant(1.0)})


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_parts_of_every_kind_are_put_together_in_order(num_parts):
    """Of one replica as they are; scalars, which a predict step may give, stacked."""
    numbers = [float(i) for i in range(num_parts)]
    rows = [[[number, number + 0.5]] for number in numbers]
    dense = concat_rows([tf.constant(each) for each in rows])
    np.testing.assert_array_equal(dense, np.concatenate(rows))
    vectors = concat_rows([tf.constant([number]) for number in numbers])
    np.testing.assert_array_equal(vectors, numbers)
    sparse = concat_rows([tf.sparse.from_dense(each) for each in rows])
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), np.concatenate(rows))
    ragged = concat_rows([tf.ragged.constant([[number] * 2, []]) for number in numbers])
    assert ragged.to_list() == [row for number in numbers for row in ([number] * 2, [])]
    scalars = concat_rows([tf.constant(number) for number in numbers])
    np.testing.assert_array_equal(scalars, numbers if num_parts > 1 else numbers[0])


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("columns", [4, 1])
def test_sparse_rows_are_cut_whatever_begins_where(columns, num_replicas):
    """Of a cut in the middle, with all columns; [rows, a, b] as well."""
    extended = tfparallel.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)]).extended
    rows = np.arange(1.0, 1 + 5 * columns * 2).reshape(5, columns, 2)
    parts = Batch(extended, tf.sparse.from_dense(rows)).parts
    expected = Batch(extended, rows).parts
    for part, own in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(tf.sparse.to_dense(part), own)
        assert part.shape[1:] == own.shape[1:]


def test_rows_are_hidden_of_dense_tensors_in_graphs_and_of_nothing_else():
    dense, number = tf.zeros([2, 3]), tf.constant(1.0)
    sparse = tf.sparse.from_dense(dense)
    assert _hide_num_rows(dense) is dense

    @tf.function(autograph=False)
    def hidden():
        own, same = _hide_num_rows(tf.identity(dense)), tf.identity(number)
        assert own.shape.as_list() == [None, 3]
        assert _hide_num_rows(same) is same
        assert _hide_num_rows(sparse) is sparse
        return own

    np.testing.assert_array_equal(hidden(), dense)


def test_parts_that_are_in_place_have_the_bounds_of_this_process(extended):
    batch = InPlace()
    batch.parts, batch.total = [{"x": tf.zeros([3, 1])}, {"x": tf.zeros([2, 1])}], 5
    own = Batch(extended, batch)
    assert own.rows == [3, 2] and own.first_rows == [0, 3]
    np.testing.assert_allclose(own.weights, [0.6, 0.4])
