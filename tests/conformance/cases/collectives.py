"""TensorFlow's collectives: one group has one kind of device, or it fails at its second use."""

import collections

import tensorflow as tf

from tests.conformance.case import Run, claim
from tests.conformance.cases.on_batch import _model
from tests.helpers import tiny_data


@claim()
def a_group_is_on_one_kind_of_device(run: Run):
    """`predict` gathers where `fit` has summed. Other strategies do not reduce between hosts so."""
    if not isinstance(run.strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    model = _model(run)
    x, y = tiny_data(12)
    model.train_on_batch(x, y)

    @tf.function(autograph=False)
    def train(*data):
        return run.strategy.run(model.train_step, args=(data,))

    @tf.function(autograph=False)
    def predict(data):
        return run.strategy.run(model.predict_step, args=(data,))

    with run.scope():
        graphs = [train.get_concrete_function(x, y).graph, predict.get_concrete_function(x).graph]
    kinds = collections.defaultdict(set)
    for graph in graphs:
        for operation in graph.get_operations():
            if operation.type.startswith("Collective") and "Group" not in operation.type:
                key = tf.get_static_value(operation.inputs[2])
                kinds[int(key)].add(tf.DeviceSpec.from_string(operation.device).device_type)
    assert all(len(each) == 1 and None not in each for each in kinds.values()), dict(kinds)
