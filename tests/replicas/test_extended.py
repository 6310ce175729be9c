"""What every strategy of replicas decides alike, asked one by one."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.helpers import train
from tfparallel.internals import CollectiveAllReduce
from tfparallel.internals.keras_layers import behind
from tfparallel.replicas.local import LocalExtended
from tfparallel.replicas.variables import CentralVariable, ReplicatedVariable, is_statistics

CPUS = ["CPU:0", "CPU:1"]


def test_a_worker_says_which_one_it_is():
    extended = tfparallel.MirroredStrategy(CPUS).extended
    assert extended._description() == "num_replicas=2, devices=['CPU:0', 'CPU:1']"
    extended._num_workers, extended._id_in_cluster = 2, 1
    assert extended._description().startswith("num_replicas=4, worker=1 of 2, devices=")


def test_copies_are_named_by_their_replica_and_the_first_as_on_one_device():
    with tfparallel.MirroredStrategy(CPUS).scope():
        variable = tf.Variable(1.0, name="v")
    assert [copy.name for copy in variable.values] == ["v:0", "v/replica_1:0"]


def test_statistics_have_a_copy_for_each_replica_where_weights_have_one():
    with tfparallel.CentralStorageStrategy(CPUS).scope():
        layer = layers.BatchNormalization()
        layer.build((None, 3))
    is_central = {v.name: isinstance(behind(v), CentralVariable) for v in layer.variables}
    assert is_central == {
        "gamma": True,
        "beta": True,
        "moving_mean": False,
        "moving_variance": False,
    }
    assert all(isinstance(behind(v), ReplicatedVariable) for v in layer.variables)


@pytest.mark.parametrize(
    ("owner", "kwargs", "expected"),
    [
        (layers.Dense(2), {"trainable": False}, True),
        (layers.Dense(2), {"trainable": True}, False),
        (layers.Dense(2), {"trainable": False, "dtype": "int32"}, False),
        (layers.BatchNormalization(synchronized=False), {"trainable": False}, True),
        (layers.BatchNormalization(synchronized=True), {"trainable": False}, False),
        (keras.optimizers.SGD(), {"trainable": False}, False),
        (None, {"trainable": False}, False),
    ],
)
def test_numbers_that_a_layer_does_not_train_are_statistics(owner, kwargs, expected):
    assert is_statistics(owner, kwargs) is expected


def test_only_copies_are_a_tensor_for_who_differentiates():
    with tfparallel.CentralStorageStrategy(CPUS).scope():
        variable = tf.Variable(2.0)
        with tf.GradientTape() as tape:
            y = 3.0 * variable
    assert variable.handle.dtype == tf.resource
    assert tape.gradient(y, variable) == 3.0


def test_states_of_rows_are_kept_by_one_replica_and_refused_by_two():
    def build():
        inputs = keras.Input((4, 3), batch_size=6)
        return keras.Model(inputs, layers.Dense(1)(layers.LSTM(2, stateful=True)(inputs)))

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = build()
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(12, 4, 3)).astype("float32")
        model.fit(x, x[:, 0, :1], batch_size=6, verbose=0, shuffle=False)
        return model.get_weights()

    plain = trained(tf.distribute.get_strategy())
    for own, expected in zip(trained(tfparallel.MirroredStrategy(CPUS[:1])), plain, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-6)
    with pytest.raises(ValueError, match="stateful=True keeps a state for each row"):
        trained(tfparallel.MirroredStrategy(CPUS))


def test_a_keras_step_sees_one_replica():
    """What divides by it, as scripts for `tf.distribute` do, divides by 1."""
    seen = []
    strategy = tfparallel.MirroredStrategy(CPUS)

    class Model(keras.Sequential):
        def train_step(self, data):
            seen.append(tf.distribute.get_strategy().num_replicas_in_sync)
            return super().train_step(data)

    training = train(strategy, lambda: Model([keras.Input((6,)), layers.Dense(3)]))
    assert set(seen) == {1} and strategy.num_replicas_in_sync == 2
    assert training.model.optimizer.iterations > 0


def test_a_number_that_is_of_no_replica_is_no_sum():
    """As under stock: who sums it would count it once or as often as there are replicas."""
    strategy = tfparallel.MirroredStrategy(CPUS)
    with pytest.raises(ValueError, match="non-DistributedValues value 3.0 cannot be reduced"):
        strategy.reduce("SUM", 3.0, axis=None)
    assert strategy.reduce("MEAN", 3.0, axis=None) == 3.0


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_what_replicas_count_is_read_by_its_aggregation(aggregation):
    strategy = tfparallel.MirroredStrategy(CPUS)
    with strategy.scope():
        count = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=getattr(tf.VariableAggregation, aggregation),
        )

    def of_replica():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return count.assign_add(tf.cast(number, tf.float32) + 1)

    strategy.run(of_replica)
    assert count.numpy() == {"SUM": 3.0, "MEAN": 1.5, "ONLY_FIRST_REPLICA": 1.0}[aggregation]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tfparallel.MirroredStrategy(CPUS),
        lambda: tfparallel.CentralStorageStrategy(CPUS),
        lambda: tfparallel.HybridStrategy({"data": 2, "pipeline": 2}),
    ],
)
def test_a_traced_sum_of_copies_is_not_saved(make, tmp_path):
    # A SavedModel has one variable for all copies: the function gave twice the sum when loaded.
    strategy = make()
    module = tf.Module()
    with strategy.scope():
        module.count = tf.Variable(
            1.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    module.count.assign(2.0)
    for function in (module.count.read_value, lambda: module.count.assign(tf.identity(2.0))):
        traced = tf.function(function).get_concrete_function()
        with pytest.raises(ValueError, match="f_with_input_signature"):
            tf.saved_model.save(module, tmp_path, signatures=traced)
    read = tf.function(module.count.read_value, input_signature=())
    tf.saved_model.save(module, tmp_path, signatures=read)
    assert tf.saved_model.load(tmp_path).signatures["serving_default"]()["output_0"] == 2.0


def test_what_a_metric_is_assigned_outside_of_replicas_is_its_sum():
    with tfparallel.MirroredStrategy(CPUS).scope():
        metric = keras.metrics.Sum()
    metric.total.assign(3.0)
    assert float(metric.result()) == 3.0
    assert sorted(float(copy) for copy in metric.total.value.values) == [0.0] * (len(CPUS) - 1) + [
        3
    ]


def test_a_replica_of_one_row_counts_in_the_statistics():
    with tfparallel.MirroredStrategy(CPUS).scope():
        model = keras.Sequential([keras.Input((2,)), layers.BatchNormalization(momentum=0.0)])
        model.compile("sgd", "mse")
    x = np.array([[1.0, 2.0], [3.0, 5.0], [8.0, 9.0]], "float32")
    model.train_on_batch(x, x)
    np.testing.assert_allclose(model.layers[0].moving_mean, x.mean(0), rtol=1e-5)


@pytest.mark.parametrize("reduce_op", ["SUM", "MEAN"])
def test_sparse_gradients_meet_by_copies_where_collectives_add_up_the_rest(reduce_op):
    """As with NCCL, whose gather would have the host wait for numbers of rows of all GPUs."""
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    extended, ring = strategy.extended, tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    keys = extended._collective_keys  # other groups of this process have theirs
    extended._user_cross_device_ops = CollectiveAllReduce(extended._devices, 2, options, keys)
    ragged = tf.constant([[0, 0], [1, 3]], tf.int64)  # of the table's rows, those of each replica

    @tf.function
    def reduced():
        def replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            rows = ragged[number, : number + 1]
            values = tf.ones([number + 1, 2]) * tf.cast(number + 1, tf.float32)
            slices = tf.IndexedSlices(values, rows, tf.constant([5, 2], tf.int64))
            context = tf.distribute.get_replica_context()
            both = context.all_reduce(reduce_op, [slices, tf.ones([3])])
            return [tf.convert_to_tensor(each) for each in both]

        return strategy.run(replica)

    expected = np.zeros([5, 2])
    expected[0], expected[1], expected[3] = 1, 2, 2
    scale = 2 if reduce_op == "MEAN" else 1
    sparse, dense = map(strategy.experimental_local_results, reduced())
    for on_replica in sparse:
        np.testing.assert_array_equal(on_replica, expected / scale)
    np.testing.assert_array_equal(dense, np.full([2, 3], 2 / scale))
    kinds = {op.type for op in reduced.get_concrete_function().graph.get_operations()}
    assert "CollectiveReduceV2" in kinds and "CollectiveGatherV2" not in kinds


@pytest.mark.parametrize(("reduce_op", "expected"), [("SUM", 8.0), ("MEAN", 4.0)])
def test_a_worker_of_one_replica_reduces_what_that_has(reduce_op, expected):
    workers = SimpleNamespace(
        _workers=True,
        _num_workers=2,
        _local_results=lambda value: (value,),
        _sum_gradients_across_workers=lambda own, source: [2 * each for each in own],
        _like=lambda total, each: total,
    )
    reduce_op = getattr(tf.distribute.ReduceOp, reduce_op)
    (total,) = LocalExtended._reduce_over_workers(workers, reduce_op, [tf.constant(4.0)])
    assert float(total) == expected
