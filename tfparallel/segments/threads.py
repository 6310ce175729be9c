"""Whether the operations of a process compute in one thread each."""

import os

import tensorflow as tf


def has_one_thread() -> bool:
    """Whether TensorFlow has one thread for the insides of an operation.

    As `tf.config.threading` says, else `TF_NUM_INTRAOP_THREADS`, where TensorFlow looks too.
    """
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return str(threads or os.environ.get("TF_NUM_INTRAOP_THREADS")) == "1"
