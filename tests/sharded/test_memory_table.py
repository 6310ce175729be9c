"""What a step takes of each device, against sums by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.internals.keras_layers import behind

WIDTH, LAYERS, ROWS = 32, 4, 16
KERNEL, BIAS = 4 * WIDTH * WIDTH, 4 * WIDTH
ALL = LAYERS * (KERNEL + BIAS)


def chain(activation="tanh", devices: int = 2, **options):
    options = {"min_size": 64, **options}  # biases stay whole
    strategy = tfparallel.ShardedStrategy([f"CPU:{i}" for i in range(devices)], **options)
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(keras.optimizers.Adam(), "mse")
    return strategy, model


def rows_of(strategy, model, inputs=None):
    return strategy.summary(model, inputs).devices


@pytest.mark.parametrize("devices", [2, 4])
def test_weights_and_slots_are_those_that_a_device_stores(devices):
    table = rows_of(*chain(devices=devices))
    assert [row.device for row in table] == [f"CPU:{i}" for i in range(devices)]
    own = LAYERS * (KERNEL // devices + BIAS)
    for row in table:
        assert row.parameters == own
        assert row.slots == 2 * own + 8 + 4  # the step's number, the learning rate
        assert row.gradients == own + KERNEL
        assert row.gathered == 2 * KERNEL
        assert row.activations is None
        assert row.total == sum(row[1:5])


@pytest.mark.parametrize(
    ("options", "gradients", "gathered"),
    [
        ({"shard": "optimizer"}, ALL, 0),
        ({"shard": "gradients"}, ALL - LAYERS * KERNEL // 2 + KERNEL, 0),
        ({"prefetch": 2}, None, 3 * KERNEL),
        ({"reshard_after_forward": False}, None, LAYERS * KERNEL),
        ({"units": ()}, ALL - LAYERS * KERNEL // 2, LAYERS * KERNEL),
    ],
)
def test_each_stage_keeps_other_things_whole(options, gradients, gathered):
    for row in rows_of(*chain(**options)):
        assert row.gathered == gathered
        assert gradients is None or row.gradients == gradients


def test_activations_are_what_the_backward_pass_takes():
    """Of tanh its result, which is the next layer's input, too; of relu as well."""
    inputs = np.zeros((2 * ROWS, WIDTH), "float32")
    for activation in ("tanh", "relu"):
        for row in rows_of(*chain(activation), inputs):
            assert row.activations == LAYERS * 4 * ROWS * WIDTH


def test_activations_count_where_every_weight_is_in_parts():
    inputs = np.zeros((2 * ROWS, WIDTH), "float32")
    for row in rows_of(*chain("tanh", min_size=1), inputs):
        assert row.activations == LAYERS * 4 * ROWS * WIDTH


def test_what_is_computed_again_is_not_kept():
    inputs = np.zeros((2 * ROWS, WIDTH), "float32")
    (kept, _), (again, _) = (
        rows_of(*chain("gelu", memory=tfparallel.MemoryPolicy(each)), inputs)
        for each in ("none", "full")
    )
    assert kept.activations >= 2 * LAYERS * 4 * ROWS * WIDTH
    assert again.activations == (LAYERS - 1) * 4 * ROWS * WIDTH  # what layers were given


def test_nothing_is_read_or_changed():
    strategy, model = chain()
    before = [weight.copy() for weight in model.get_weights()]
    strategy.summary(model, np.zeros((4, WIDTH), "float32"))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.optimizer.iterations == 0
    assert not any(tf.is_tensor(loss) for layer in model.layers for loss in layer.losses)


def test_it_is_printed_as_a_table():
    strategy, model = chain()
    text = str(strategy.summary(model))
    assert "parameters" in text and "activations" in text
    assert f"{LAYERS * (KERNEL // 2 + BIAS):,}" in text


def test_a_model_without_weights_is_refused():
    strategy = tfparallel.ShardedStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"Expected a model that is built.*sequential"):
        strategy.summary(model)


def test_the_stored_bytes_are_those_of_the_tensors_on_the_device():
    strategy, model = chain()
    (row, _) = rows_of(strategy, model)
    tensors = [behind(v).values[0].read_value() for v in model.trainable_variables]
    assert {tensor.device.rpartition("device:")[2] for tensor in tensors} == {"CPU:0"}
    assert row.parameters == sum(tensor.numpy().nbytes for tensor in tensors)
