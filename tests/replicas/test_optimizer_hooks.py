"""Where optimizers may be applied: replicas meet there."""

import keras
import pytest

import tfparallel
from tests.conformance.cases.custom_training import StopsAfterThreeSteps
from tests.helpers import assert_same_training, tiny_data, train
from tfparallel.replicas.optimizer_hooks import GradientSource, build_optimizer


def trained(strategy):
    def build():
        return StopsAfterThreeSteps([keras.Input((6,)), keras.layers.Dense(3)])

    def data(rows):
        x, _ = tiny_data(rows)
        return x, x[:, :3]

    return train(strategy, build, lambda: {"loss": "mse"}, data)


@pytest.mark.parametrize("kind", ["MirroredStrategy", "ShardedStrategy"])
def test_an_optimizer_in_a_branch_is_refused_and_told_of_accumulation(kind):
    strategy = getattr(tfparallel, kind)(["CPU:0", "CPU:1"])
    with pytest.raises(RuntimeError, match=r"tf\.cond.*gradient_accumulation_steps=k"):
        trained(strategy)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tfparallel.OneDeviceStrategy("CPU:1"),
        lambda: tfparallel.MirroredStrategy(["CPU:0"]),
        lambda: tfparallel.ShardedStrategy(["CPU:0"]),
    ],
)
def test_on_one_device_an_optimizer_may_be_in_a_branch(make):
    assert_same_training(trained(None), trained(make()))


def test_what_an_optimizer_trains_is_more_than_what_has_gradients():
    first, second = keras.Variable(1.0), keras.Variable(2.0)
    optimizer = keras.optimizers.SGD()
    assert GradientSource(optimizer, [second]).all_variables() == [second]
    optimizer.build([first, second])
    assert GradientSource(optimizer, [second]).all_variables() == [first, second]


def test_slots_are_made_once_the_weights_are_known():
    optimizer = keras.optimizers.Adam()
    build_optimizer(optimizer, None)
    assert not optimizer.built
    build_optimizer(optimizer, [keras.Variable(1.0)])
    assert optimizer.built


def test_only_a_loss_scale_optimizer_has_a_loss_scale():
    assert GradientSource(keras.optimizers.SGD(), []).loss_scale() is None
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    assert GradientSource(scaled, []).loss_scale() == 8.0
    scaled.build([])
    assert GradientSource(scaled, []).loss_scale() == 8.0


@pytest.mark.parametrize(
    ("optimizer", "counts"),
    [
        (keras.optimizers.SGD(0.1, momentum=0.9), True),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), True),
        (keras.optimizers.Adam(), False),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion()), False),
    ],
)
def test_only_to_sgd_a_late_gradient_is_worth_as_much(optimizer, counts):
    assert GradientSource(optimizer, []).late_counts() == counts
