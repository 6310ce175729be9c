"""What a strategy may take into its own hands: each place is asked once, and is enough."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.helpers import assert_same_training, momentum_sgd, train
from tfparallel.strategies.mirrored import MirroredLocalExtended


def strategy_of(extended_class, devices):
    strategy = tfparallel.MirroredStrategy(devices)
    strategy.extended.__class__ = extended_class
    return strategy


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_step_is_entered_whatever_the_number_of_replicas(num_devices):
    entered = []

    class Extended(MirroredLocalExtended):
        def _step_of(self, model):
            entered.append(model)
            return super()._step_of(model)

    strategy = strategy_of(Extended, [f"CPU:{i}" for i in range(num_devices)])
    training = train(strategy)
    assert set(map(id, entered)) == {id(training.model)}
    assert_same_training(train(None), training)
    entered.clear()
    training.model.predict(np.ones((4, 6), "float32"), verbose=0)
    assert entered


def test_weighing_and_reducing_are_one_overridable_place():
    """Gradients that a strategy has reduced itself reach the optimizer untouched."""

    class Extended(MirroredLocalExtended):
        def _weigh_and_reduce(self, gradients):
            return [tf.ones_like(gradient) for gradient in gradients]

    strategy = strategy_of(Extended, ["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    before = model.get_weights()
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_allclose(new, old - 1, rtol=1e-6)


def test_a_strategy_can_hook_more_of_an_optimizer():
    seen = []

    class Extended(MirroredLocalExtended):
        def _optimizer_hooks(self, optimizer):
            def clip(original, gradients):
                seen.append(optimizer)
                return original(gradients)

            return {"_clip_gradients": clip}

    training = train(strategy_of(Extended, ["CPU:0", "CPU:1"]), optimizer=momentum_sgd)
    assert set(map(id, seen)) == {id(training.model.optimizer)}
    assert "_clip_gradients" not in vars(momentum_sgd())


def test_a_copy_may_start_with_a_part_of_the_agreed_value():
    class Extended(MirroredLocalExtended):
        def _initial_value(self, variable_class, i, device, copies, kwargs):
            whole = self._agreed_initial_value(0, device, copies, kwargs)
            return tf.convert_to_tensor(whole() if callable(whole) else whole)[i::2]

    strategy = strategy_of(Extended, ["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0, 3.0, 4.0])
    parts = [part.numpy().tolist() for part in variable.values]
    assert parts == [[1.0, 3.0], [2.0, 4.0]]


def test_a_scalar_of_each_replica_is_reduced_along_rows_too():
    """As users of losses by row do, where a replica has one number."""
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    rank = tf.distribute.get_replica_context
    numbers = strategy.run(lambda: tf.cast(rank().replica_id_in_sync_group, tf.float32))
    for axis in (0, None):
        assert strategy.reduce("SUM", numbers, axis=axis) == 3.0
        assert strategy.reduce("MEAN", numbers, axis=axis) == 1.0
    rows = strategy.run(lambda: tf.range(tf.cast(rank().replica_id_in_sync_group, tf.float32) + 1))
    assert strategy.reduce("SUM", {"rows": rows}, axis=0) == {"rows": 0.0 + 1.0 + 3.0}
    assert strategy.reduce("MEAN", rows, axis=0) == 4.0 / 6


def test_strategies_of_different_classes_have_keys_of_their_own():
    """TensorFlow refused a collective of a mesh whose number another strategy's had had."""
    classes = (
        tfparallel.MultiWorkerMirroredStrategy,
        tfparallel.ShardedStrategy,
        tfparallel.HybridStrategy,
        tfparallel.TensorParallelStrategy,
        tfparallel.PipelineStrategy,
        tfparallel.ParameterServerStrategy,
    )
    keys = [object.__new__(each)._collective_key_base for each in classes for _ in range(3)]
    assert len({key // 1_000 for key in keys}) == len(keys)
