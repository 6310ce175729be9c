"""Stages with several devices train as with one, and take microbatches in turn."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import (
    assert_same_training,
    momentum_sgd,
    steps_outside_of_run,
    tiny_compile_options,
    tiny_data,
    train,
)
from tfparallel import PipelineStrategy

pytestmark = pytest.mark.turns

SLOW_MIDDLE = ["CPU:0", ["CPU:1", "CPU:2"], "CPU:3"]


def four_layers():
    x = keras.Input((6,))
    y = layers.Dense(8, "tanh", name="a")(x)
    y = layers.Add(name="add")([y, layers.Dense(8, "tanh", name="b")(y)])
    y = layers.Dense(8, "tanh", name="c")(y)
    return keras.Model(x, layers.Dense(3, name="d")(y))


PARTITION = [["a"], ["b", "add", "c"], ["d"]]


def adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5, gradient_accumulation_steps=2)


def shared_shapes():
    """A weight of the first stage, used on all."""
    shared = layers.Dense(6, "tanh", name="shared")
    x = keras.Input((6,))
    y = layers.Dense(6, "tanh", name="b")(shared(x))
    return keras.Model(x, layers.Dense(3, name="d")(layers.Add(name="add")([shared(y), y])))


@pytest.mark.parametrize(
    ("devices", "num_microbatches", "options"),
    [
        (SLOW_MIDDLE, 4, {"partition": PARTITION}),
        pytest.param(SLOW_MIDDLE, 6, {"schedule": "zero_bubble"}, marks=pytest.mark.long),
        pytest.param(SLOW_MIDDLE, 4, {"schedule": "gpipe"}, marks=pytest.mark.long),
        pytest.param(SLOW_MIDDLE, 4, {"rematerialize": "full"}, marks=pytest.mark.long),
        pytest.param([["CPU:0", "CPU:1", "CPU:2"], "CPU:3"], 6, {}, marks=pytest.mark.long),
        pytest.param([["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]], 4, {}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param((26, 13), id="uneven"),
        pytest.param((7, 3), id="few", marks=pytest.mark.long),
    ],
)
def test_it_trains_as_one_device_does(devices, num_microbatches, options, rows):
    training = {"build": four_layers, "optimizer": adam, "rows": rows[0], "batch_size": rows[1]}
    strategy = PipelineStrategy(devices, num_microbatches, **options)
    assert_same_training(train(None, **training), train(strategy, **training))


@pytest.mark.long
def test_a_shared_layer_is_updated_once():
    reference, candidate = (
        train(strategy, shared_shapes)
        for strategy in (None, PipelineStrategy([["CPU:0", "CPU:1"], "CPU:2"], 4))
    )
    assert_same_training(reference, candidate)


def devices_of_copies(variable):
    return [int(copy.device[-1]) for copy in variable.value.values]


def test_each_device_has_one_copy_of_its_stage_and_slots_exist_once():
    strategy = PipelineStrategy(SLOW_MIDDLE, 4, partition=PARTITION)
    model = train(strategy, four_layers).model
    first, middle, last = (model.get_layer(name).kernel for name in "abd")
    slot = next(v for v in model.optimizer.variables if "b_kernel_momentum" in v.path)
    assert devices_of_copies(middle) == [1, 2]
    for variable, device in ((first, 0), (last, 3), (slot, 1)):
        assert devices_of_copies(variable) == [device] * 2
        assert len({id(copy) for copy in variable.value.values}) == 1
    assert "CPU:1, CPU:2" in str(strategy.summary(model))
    assert "num_microbatches=4" in repr(strategy)
    assert strategy.num_replicas_in_sync == 1


def test_so_they_do_where_all_stages_have_as_many_devices():
    """They were pipelines beside one another, with slots each, and two replicas to the user."""
    strategy = PipelineStrategy([["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]], 4)
    model = train(strategy, four_layers).model
    slot = next(v for v in model.optimizer.variables if "d_kernel_momentum" in v.path)
    assert devices_of_copies(model.get_layer("d").kernel) == [2, 3]
    assert devices_of_copies(slot) == [2, 2]
    assert "num_microbatches=4" in repr(strategy)
    assert strategy.num_replicas_in_sync == 1


@pytest.mark.long
def test_what_is_added_from_outside_is_added_once():
    strategy = PipelineStrategy(SLOW_MIDDLE, 4, partition=PARTITION)
    model = train(strategy, four_layers).model
    for weight in model.trainable_weights:
        before = weight.numpy()
        weight.assign_add(np.ones_like(before))
        np.testing.assert_allclose(weight.numpy(), before + 1)
        for copy in weight.value.values:
            np.testing.assert_allclose(copy.numpy(), before + 1)


def test_a_step_outside_of_run_updates_slots_once():
    """They exist once, and each device of a stage has a copy of its weights."""
    strategy = PipelineStrategy(SLOW_MIDDLE, 4, partition=PARTITION)
    reference, candidate = (
        steps_outside_of_run(train(each, four_layers), each) for each in (None, strategy)
    )
    assert_same_training(reference, candidate)


def test_a_layer_of_two_models_moves_to_a_stage_of_more_devices():
    weights = []
    for strategy in (tf.distribute.get_strategy(), PipelineStrategy(SLOW_MIDDLE, 4)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            x, shared = keras.Input((6,)), layers.Dense(6, "tanh")
            on_first = keras.Model(x, layers.Dense(3)(layers.Dense(8)(shared(x))))
            on_second = keras.Model(x, layers.Dense(3)(shared(layers.Dense(6)(x))))
            for model in (on_first, on_second):
                model.compile(momentum_sgd(), **tiny_compile_options())
        for model in (on_first, on_second, on_first):
            model.fit(*tiny_data(12), batch_size=12, shuffle=False, verbose=0)
        weights.append([*on_first.get_weights(), *on_second.get_weights()])
    assert devices_of_copies(shared.kernel) == [1, 2]
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.long
def test_batch_norm_is_that_of_a_pipeline_with_one_device_for_each_stage():
    def build():
        x = keras.Input((6,))
        y = layers.BatchNormalization(name="norm")(layers.Dense(8, use_bias=False, name="a")(x))
        y = layers.Dense(8, "tanh", name="b")(y)
        return keras.Model(x, layers.Dense(3, name="d")(y))

    partition = [["a"], ["norm", "b"], ["d"]]
    reference, candidate = (
        train(PipelineStrategy(devices, 4, partition=partition, batch_norm="deferred"), build)
        for devices in (["CPU:0", "CPU:1", "CPU:3"], SLOW_MIDDLE)
    )
    assert_same_training(reference, candidate)


@pytest.mark.long
def test_a_backup_of_it_is_whole(tmp_path):
    trained = train(PipelineStrategy(SLOW_MIDDLE, 4, partition=PARTITION), four_layers).model
    trained.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x, _ = tiny_data(5)
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), trained.predict(x, verbose=0), atol=1e-6
    )


def test_balanced_takes_the_devices_of_a_stage_into_account():
    from tfparallel.pipeline.plans.partition import balanced_cuts

    assert balanced_cuts([1, 1, 1, 1], 2) == [range(2), range(2, 4)]
    assert balanced_cuts([1, 1, 1, 1], 2, num_devices=[1, 3]) == [range(1), range(1, 4)]


@pytest.mark.parametrize(
    ("devices", "num_microbatches", "message"),
    [
        (SLOW_MIDDLE, 3, "num_microbatches=3. What would fit: 2, 4"),
        (["CPU:0", []], 4, "Every stage must have a device"),
        (["CPU:0", ["CPU:0", "CPU:1"]], 4, "the same device"),
    ],
)
def test_what_cannot_be_is_refused(devices, num_microbatches, message):
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(devices, num_microbatches)
