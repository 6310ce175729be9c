"""What is kept between two passes comes back as it was; numbers of the host stay there."""

import tensorflow as tf

from tests.gpu.audit import audit
from tfparallel.segments.stash import Stash

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:1"


def count(x):
    """How often something was halved, its shape, a number below 0, and integers of a GPU."""
    turns, halves = tf.while_loop(
        lambda _, y: tf.reduce_sum(y) > 1.0, lambda i, y: (i + 1, y / 2.0), [tf.constant(0), x]
    )
    with tf.device(DEVICE):
        return [turns - 9, tf.shape(x), tf.argmax(x, 1, tf.int32), halves]


def kept_and_used(x):
    with tf.device(DEVICE):
        tensors = count(x)
        stash = Stash(tensors)
        number, shape, largest, halves = stash.unpack(stash.pack(tensors))
        largest = tf.cast(largest, tf.int64)
        return tf.fill([number + 9, *tf.unstack(shape)], 1.0), largest, halves, number, shape


def test_what_is_kept_comes_back():
    x = tf.constant([[1.0, 5.0, 2.0], [7.0, 3.0, 4.0]])
    concrete = tf.function(kept_and_used, autograph=False).get_concrete_function(
        tf.TensorSpec([None, 3])
    )
    _, largest, halves, number, shape = concrete(x)
    for own, expected in zip([number, shape, largest, halves], count(x), strict=True):
        tf.debugging.assert_equal(own, tf.cast(expected, own.dtype))


def test_the_host_is_sent_no_numbers_that_it_had():
    concrete = tf.function(kept_and_used, autograph=False).get_concrete_function(
        tf.TensorSpec([None, 3])
    )
    sent = audit(concrete.graph).copies["to_host"]
    assert not [edge for edge in sent if edge.startswith("OptionalGetValue")], sent


def test_images_come_from_an_operation_each():
    """oneDNN would take two results of one operation for the same (a U-Net's bias was wrong)."""
    tensors = [tf.ones([2, 4, 4, 1]), tf.ones([2, 4, 4, 3]), tf.ones([2, 3]), tf.ones([5])]

    def there_and_back():
        stash = Stash(tensors)
        return stash.unpack(stash.pack(tensors))

    graph = tf.function(there_and_back, autograph=False).get_concrete_function().graph
    reads = [op for op in graph.get_operations() if op.type == "OptionalGetValue"]
    images = [x for op in reads for x in op.outputs if x.shape.rank == 4]
    assert len(reads) == 1 and len(images) == 2
    assert {op.type for x in images for op in x.consumers()} == {"EnsureShape"}


def test_no_optional_holds_so_many_that_what_reads_them_takes_long_to_trace():
    """TensorFlow gives each reader of an optional the types of all that is in it."""

    def there_and_back(x):
        tensors = [x + float(i) for i in range(100)]
        stash = Stash(tensors)
        packed = stash.pack(tensors)
        assert [each.dtype for each in packed] == stash.packed_types
        return tf.stack(stash.unpack(packed))

    concrete = tf.function(there_and_back, autograph=False).get_concrete_function(tf.TensorSpec([]))
    reads = [op for op in concrete.graph.get_operations() if op.type == "OptionalGetValue"]
    assert max(len(op.outputs) for op in reads) < 50
    assert concrete(tf.constant(1.0)).numpy().tolist() == list(range(1, 101))
