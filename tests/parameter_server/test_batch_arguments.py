"""What steps are called with, of a batch that the chief has read."""

import numpy as np
import tensorflow as tf

from tfparallel.parameter_server.batch_arguments import BatchArguments, Hosts, ReadByChief

ONE = Hosts.of_one(1, "CPU:0")
BATCH = (np.ones((5, 3), "float32"), None, np.arange(5))


def test_the_batch_comes_out_as_it_went_in():
    for arguments in (ReadByChief(BATCH), ReadByChief.of_any_rows(BATCH)):
        assert isinstance(arguments, BatchArguments)
        x, nothing, y = arguments.recipe(arguments.tensors(ONE))
        np.testing.assert_array_equal(x, BATCH[0])
        np.testing.assert_array_equal(y, BATCH[2])
        assert nothing is None


def test_rows_are_known_unless_any_number_of_them_is_to_fit():
    x, nothing, y = ReadByChief(BATCH).specs
    assert (x.shape, nothing, y.shape) == ([5, 3], None, [5])
    x, nothing, y = ReadByChief.of_any_rows(BATCH).specs
    assert (x.shape.as_list(), nothing, y.shape.as_list()) == ([None, 3], None, [None])


def test_what_a_dataset_knows_of_its_batches_counts():
    specs = (tf.TensorSpec([None, 3]), None, tf.TensorSpec([None], tf.int64))
    assert ReadByChief(BATCH, specs).specs == specs


def test_a_batch_of_the_user_is_none_of_them():
    assert not isinstance(BATCH, BatchArguments)
