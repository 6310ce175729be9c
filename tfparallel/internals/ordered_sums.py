"""Sums of floats in the order of their terms, and so in the same bits in each step and each run.

`tf.add_n` begins with the first term whose memory nobody else needs any more, and that depends on
which operation happens to be done: of three terms or more the sum has other bits then. Additions
one by one have one order, if TensorFlow's optimiser does not make an `AddN` of them again
(`AddOpsRewrite` in arithmetic_optimizer.cc; it leaves alone what it has marked as its own).
"""

from collections.abc import Sequence

import tensorflow as tf

# Marks operations for TensorFlow's optimiser.
from tensorflow.core.framework import attr_value_pb2

from tfparallel.internals import record

_DONE = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def sum_in_order(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of dense `terms` of one shape and dtype, on the current device."""
    if len(terms) < 3:  # where the order makes no difference
        return tf.add_n(list(terms))
    terms = [tf.convert_to_tensor(term) for term in terms]
    with record.stop_recording():
        total = terms[0]
        for term in terms[1:]:
            total = tf.raw_ops.AddV2(x=total, y=term, name="sum_in_order")
            if tf.is_symbolic_tensor(total):
                total.op._set_attr(_DONE, attr_value_pb2.AttrValue(b=True))
    # As of one sum: that of each addition would look for broadcasts where a size is not known.
    record.record_operation("AddN", [total], terms, lambda gradient: [gradient] * len(terms))
    return total
