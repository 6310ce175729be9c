"""Variables in parts: the plan of the parts, and trainings that do not notice them."""

import pytest
import tensorflow as tf

from tfparallel.parameter_server.cut import cut_rows, num_parts, rows_of_parts

pytestmark = pytest.mark.turns


@pytest.mark.parametrize(
    ("num_rows", "count", "expected"),
    [
        (10, 3, [(0, 3), (3, 6), (6, 10)]),
        (4, 1, [(0, 4)]),
        (2, 5, [(0, 1), (1, 2)]),  # never an empty part
    ],
)
def test_rows_are_shared_evenly(num_rows, count, expected):
    assert rows_of_parts(num_rows, count) == expected


def test_scalars_and_small_variables_stay_whole():
    partitioners = tf.distribute.experimental.partitioners
    fixed = partitioners.FixedShardsPartitioner(4)
    assert num_parts(fixed, tf.TensorShape([]), tf.float32) == 1
    assert num_parts(None, tf.TensorShape([100, 3]), tf.float32) == 1
    assert num_parts(fixed, tf.TensorShape([100, 3]), tf.float32) == 4
    min_size = partitioners.MinSizePartitioner(1000, max_shards=8)
    assert num_parts(min_size, tf.TensorShape([80, 3]), tf.float32) == 1
    assert num_parts(min_size, tf.TensorShape([1000, 3]), tf.float32) == 8


def test_rejects_a_partitioner_of_another_dim():
    with pytest.raises(ValueError, match=r"first dim.*\[1, 2\].*shape \(6, 4\)"):
        num_parts(lambda shape, dtype: [1, 2], tf.TensorShape([6, 4]), tf.float32)


def test_gradients_are_cut_like_the_variable():
    parts = rows_of_parts(5, 2)
    dense = tf.reshape(tf.range(10.0), [5, 2])
    assert [part.shape[0] for part in cut_rows(dense, parts)] == [2, 3]
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([4, 0, 2]), (5, 1))
    first, second = cut_rows(slices, parts)
    assert first.indices.numpy().tolist() == [0] and first.values.numpy().tolist() == [[2.0]]
    assert second.indices.numpy().tolist() == [2, 0]
    assert second.dense_shape.numpy().tolist() == [3, 1]


def test_partitioned_training_equals_one_device_and_is_saved_whole(run_case):
    result = run_case("partitioned")
    parts = {tuple(r["run"]): r["parts"] for r in result["results"]}
    assert parts["sync", "fixed", "adam"] == [[16, 4], [17, 4], [17, 4]]
    assert len(parts["async", "min_size", "sgd"]) == 3
    assert len(parts["async", "max_size", "adafactor"]) == 4  # 800 bytes in parts of 256
    for each in result["results"]:
        assert each["servers"] == 3, each
        assert each["parts_elsewhere"] == 2
        assert max(each["differences"]) < 1e-5, each
        assert max(each["slots"]) < 1e-5, each
        assert each["predictions"] < 1e-5
    exported = [(each["parts"], *each["exported"]) for each in result["results"][:2]]
    for parts_of_table, off, shapes in exported:  # SavedModels, of both modes
        assert off < 1e-5
        assert [50, 4] in shapes and not [part for part in parts_of_table if part in shapes]
    assert result["checkpoint"] == [4, 2, 0.0]
    assert result["mixed_bfloat16"] < 0.02  # an ulp of bfloat16 at 1 is 0.008


def test_gradients_of_what_loops_read_are_those_of_one_device(run_case):
    """An LSTM's kernel was off by 5.4e-2, without an error."""
    result = run_case("partitioned_in_loops")
    assert max(result["differences"]) < 1e-5
    assert "a read in a tf.function within the step" in result["refused"]
