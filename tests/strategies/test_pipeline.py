"""PipelineStrategy: where layers and variables live, and what it refuses."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.conformance.models import MODELS
from tests.helpers import assert_same_training, tiny_data, train
from tfparallel import MemoryPolicy, PipelineStrategy
from tfparallel.pipeline.plans.schedule import Schedule

pytestmark = pytest.mark.turns

CPUS = [f"CPU:{i}" for i in range(4)]


def deep_model():
    """Eight layers, with connections that skip some of them."""
    x = inputs = keras.Input((6,))
    skipped = []
    for i in range(3):
        x = layers.Dense(7, activation="tanh", name=f"down_{i}")(x)
        skipped.append(x)
    for i in range(3):
        x = layers.Add(name=f"add{i}")([x, skipped.pop()])
        x = layers.Dense(7, activation="tanh", name=f"up_{i}")(x)
    return keras.Model(inputs, layers.Dense(3, name="scores")(x))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("num_microbatches", [5])
def test_a_deep_model_trains_as_on_one_device(schedule, num_microbatches):
    strategy = PipelineStrategy(CPUS[:3], num_microbatches, schedule)
    assert_same_training(train(None, deep_model), train(strategy, deep_model))


@pytest.mark.parametrize("name", ["attention", "shared_layers", "subclassed", "added_loss", "lstm"])
def test_models_train_as_on_one_device_under_gpipe(name):
    case = MODELS[name]
    options = {"build": case.build, "compile_options": case.compile_options, "data": case.data}
    strategy = PipelineStrategy(CPUS[:2], 4, "gpipe")
    assert_same_training(train(None, **options), train(strategy, **options))


def test_a_loss_of_more_than_the_outputs_is_that_of_each_microbatch():
    """Losses are traced once for all microbatches: not one that takes what a layer has left."""
    left = {}

    @keras.saving.register_keras_serializable(package="tests")
    class Leaves(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.scores = layers.Dense(5), layers.Dense(3)

        def call(self, x):
            left["hidden"] = self.hidden(x)
            return self.scores(left["hidden"])

    def loss(y_true, y_pred):
        y_true = keras.ops.one_hot(keras.ops.reshape(y_true, (-1,)), 3)
        own = keras.ops.mean((y_true - y_pred) ** 2, axis=-1)
        return own + keras.ops.mean(left["hidden"] ** 2, axis=-1)

    options = {"build": Leaves, "compile_options": lambda: {"loss": loss}}
    strategy = PipelineStrategy(CPUS[:2], 3)
    assert_same_training(train(None, **options), train(strategy, **options))


def test_a_microbatch_adds_few_operations_to_the_step():
    """Its calls, which are traced once, and slices of the batch: not its losses and metrics."""

    def num_operations(num_microbatches):
        strategy = PipelineStrategy(CPUS[:2], num_microbatches, partition=[["down*"], ["[!d]*"]])
        with strategy.scope():
            model = deep_model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"])
            x, y = (tf.constant(array) for array in tiny_data(16))
            model._symbolic_build(data_batch=(x, y, None))
            step = tf.function(lambda data: strategy.run(model.train_step, args=(data,)))
            return len(step.get_concrete_function((x, y)).graph.get_operations())

    few, many = num_operations(2), num_operations(4)
    assert (many - few) / 2 <= 45


def test_variables_and_slots_live_once_on_the_device_of_their_stage():
    strategy = PipelineStrategy(CPUS, 4, partition=[["*_0"], ["*_1"], ["*_2", "add*"], ["scores"]])
    training = train(strategy, deep_model, optimizer=lambda: keras.optimizers.Adam(0.01))
    stages = strategy.stages(training.model)
    stage_of = {part.name: stage for part, stage in zip(stages.parts, stages.stage_of)}
    assert stage_of["down_0"] == 0 and stage_of["down_1"] == 1 and stage_of["scores"] == 3
    assert stage_of["up_0"] == 2  # its pattern says 0, but what it needs is made on 2
    for layer in training.model.layers:
        for weight in layer.weights:
            (copy,) = weight.value.values
            assert copy.device.endswith(f"CPU:{stage_of[layer.name]}"), weight.path
    for slot in training.model.optimizer.variables:
        (copy,) = slot.value.values
        leader = [w for w in training.model.weights if w.path.replace("/", "_") in slot.path]
        if leader:
            assert copy.device == leader[0].value.values[0].device, slot.path


def _masked():
    x = keras.Input((5,), dtype="int32")
    y = layers.Embedding(20, 4, mask_zero=True)(x)
    return keras.Model(x, layers.Dense(3)(y))


def _masked_data(rows):
    tokens, _ = MODELS["masking"].data(rows)
    return tokens, np.arange(rows * 5).reshape(rows, 5) % 3


def _warnings(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_masked_loss_needs_all_microbatches_forward_first(caplog):
    """It divides by the number of unmasked positions of the batch."""
    options = {"build": _masked, "data": _masked_data}
    reference = train(None, **options)
    assert_same_training(reference, train(PipelineStrategy(CPUS[:2], 3, "gpipe"), **options))
    assert not _warnings(caplog)
    strategy = PipelineStrategy(CPUS[:2], 3, "1f1b")
    assert_same_training(reference, train(strategy, **options))
    train(strategy, **options)
    (message,) = _warnings(caplog)
    assert (
        "not by schedule '1f1b': stages keep activations of (3, 3) microbatches at once" in message
    )
    assert "instead of (2, 1)" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": ["CPU:0", "CPU:9"]}, "CPU:9"),
        ({"devices": ["CPU:0", "CPU:0"]}, "once"),
        ({"devices": CPUS[:2], "num_microbatches": 0}, "num_microbatches"),
        ({"devices": CPUS[:2], "schedule": "1f2b"}, "1f1b"),
        ({"devices": CPUS[:2], "batch_norm": "later"}, "'deferred'. Received: batch_norm='later'"),
        ({"devices": CPUS[:2], "rematerialize": "some"}, "Received: rematerialize='some'"),
        ({"devices": CPUS[:2], "rematerialize": []}, r"patterns .* Received: rematerialize=\[\]"),
        (
            {"devices": CPUS[:2], "rematerialize": "full", "memory": MemoryPolicy()},
            "is said once. Received: .* rematerialize='full' and offload=False. Leave `memory` out",
        ),
        ({"devices": CPUS[:2], "memory": MemoryPolicy(offload={"a"})}, "host as a whole"),
        ({"devices": CPUS[:3], "schedule": "one stage"}, "1 devices, 3 devices"),
        ({"devices": CPUS[:1], "schedule": "one stage", "num_microbatches": 2}, "1 microbatches"),
    ],
    ids=[
        "missing",
        "twice",
        "none",
        "name",
        "batch_norm",
        "word",
        "patterns",
        "memory twice",
        "memory of a layer",
        "devices",
        "microbatches",
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    if arguments.get("schedule") == "one stage":
        orders = [[(0, 0, "forward"), (0, 0, "backward")]]
        arguments = {**arguments, "schedule": Schedule("mine", orders)}
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(**arguments)
