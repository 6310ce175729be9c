"""Replicas of a process add up in the bits of TensorFlow's reduction, in fewer operations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.internals import ReduceOp, ReductionToOneDevice

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


def _strategy(name):
    if name == "mirrored":
        return tfparallel.MirroredStrategy(DEVICES)
    return tfparallel.CentralStorageStrategy(DEVICES)


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_sums_are_those_of_tensorflow_in_every_bit(name, in_graph):
    strategy, numbers = _strategy(name), np.random.default_rng(1)
    parts = numbers.normal(size=(5, 3, 70)) * 10.0 ** numbers.integers(-6, 6, (5, 3, 70))

    def sums_by(batch_reduce):
        def reduced(parts):
            distributed = strategy.experimental_distribute_values_from_function
            values = [
                distributed(
                    lambda context, of=of: tf.identity(of[context.replica_id_in_sync_group])
                )
                for of in parts
            ]
            totals = batch_reduce(ReduceOp.SUM, [(value, value) for value in values])
            return [strategy.experimental_local_results(total) for total in totals]

        run = tf.function(reduced) if in_graph else reduced
        return run([tf.constant(part) for part in parts])

    ours = sums_by(strategy.extended.batch_reduce_to)
    stock = sums_by(ReductionToOneDevice().batch_reduce)

    np.testing.assert_array_equal(np.shape(ours), (5, 3, 70))
    np.testing.assert_array_equal(ours, stock)


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_a_sum_of_gradients_is_not_copied_to_the_device_that_has_it(name):
    strategy = _strategy(name)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((6, 4), "float32"), np.ones((6, 3), "float32")
    graphs = []
    apply = model.optimizer.apply

    def noting(*args, **kwargs):
        graphs.append(tf.compat.v1.get_default_graph())
        return apply(*args, **kwargs)

    model.optimizer.apply = noting
    model.fit(x, y, batch_size=6, verbose=0)

    added = {op for op in graphs[0].get_operations() if "sum_in_order" in op.name}
    sums = [op for op in added if added.isdisjoint(op.outputs[0].consumers())]
    assert len(sums) >= 2, "No sums of the replicas' gradients were found."
    takers = [(total, op) for total in sums for op in total.outputs[0].consumers()]
    copies = [op.name for total, op in takers if (op.type, op.device) == ("Identity", total.device)]
    assert not copies
