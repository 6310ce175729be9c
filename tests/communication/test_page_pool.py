"""Pages come back when nobody holds an array of them, and only so many are kept."""

import numpy as np
import tensorflow as tf

from tfparallel.communication.page_pool import PagePool

MIB = 1 << 20


def test_what_was_let_go_is_used_again():
    pool = PagePool()
    first = pool.empty(MIB)
    address = first.ctypes.data
    view = first[64:].view(np.float32)
    del first
    assert pool.free_bytes == 0  # the view is of these pages
    assert pool.empty(MIB).ctypes.data != address
    del view
    assert address in {pool.empty(MIB).ctypes.data for _ in range(3)}


def test_two_arrays_never_share_a_page():
    pool = PagePool()
    held = [pool.empty(MIB) for _ in range(4)]
    for number, array in enumerate(held):
        array[:] = number
    assert [set(array.tolist()) for array in held] == [{0}, {1}, {2}, {3}]


def test_another_size_is_other_pages():
    pool = PagePool()
    del (first := [pool.empty(MIB)])[:]
    assert not first and pool.free_bytes == MIB
    assert pool.empty(2 * MIB).size == 2 * MIB
    assert pool.free_bytes == 3 * MIB


def test_no_more_is_kept_than_two_of_the_largest():
    pool = PagePool()
    arrays = [pool.empty(40 * MIB) for _ in range(5)]
    assert pool.free_bytes == 0
    arrays.clear()
    assert pool.free_bytes == 80 * MIB


def test_a_tensor_holds_the_pages_that_it_was_made_of():
    pool = PagePool()

    def ones():
        array = pool.empty(MIB)
        array[:] = 1
        return array

    @tf.function
    def tensor():
        return tf.numpy_function(ones, [], tf.uint8)

    kept = tensor()
    for _ in range(3):  # let go of by TensorFlow with the next call
        pool.empty(MIB)[:] = 2
        tensor()
    assert tf.reduce_all(kept == 1)
    assert pool.free_bytes >= MIB
