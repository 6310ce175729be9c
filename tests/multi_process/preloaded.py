"""What a process of a pool has imported when it is forked; TensorFlow has not been started."""

import gc

import keras  # noqa: F401
import tensorflow as tf  # noqa: F401

from tests.conformance.cases.coexistence import remember_originals

remember_originals()

import tfparallel  # noqa: E402

for _name in tfparallel.__all__:
    getattr(tfparallel, _name)
gc.collect()
gc.freeze()  # what is here is never garbage, and stays shared by all forks
