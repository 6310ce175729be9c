"""PipelineStrategy: which layers are on which stage, and how that is told."""

import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from rich.console import Console

from tests.helpers import assert_same_training, tiny_data, tiny_model, train
from tests.strategies.test_pipeline import deep_model
from tfparallel import PipelineStrategy

pytestmark = pytest.mark.turns

CPUS = [f"CPU:{i}" for i in range(4)]


def built(strategy, build):
    with strategy.scope():
        return build()


def stage_of(strategy, model) -> dict[str, int]:
    stages = strategy.stages(model)
    return {part.name: stage for part, stage in zip(stages.parts, stages.stage_of)}


def test_stages_are_balanced_by_measured_time():
    def lopsided():
        x = keras.Input((6,))
        y = layers.Dense(2000, name="wide")(layers.Dense(2000, name="first")(x))
        y = layers.Dense(2000, name="wider")(y)
        return keras.Model(x, layers.Dense(3, name="last")(y))

    strategy = PipelineStrategy(CPUS[:2], 2)
    stages = strategy.stages(built(strategy, lopsided))
    assert stages.stage_of[0] == 0 and stages.stage_of[-1] == 1
    assert sorted(stages.stage_of) == list(stages.stage_of)
    assert sum(stages.time_shares) == pytest.approx(1)
    assert stages.activation_bytes == [8 * 2000 * 4] * 3 + [8 * 3 * 4]  # of 8 rows


class Noting(layers.Layer):
    """Notes what it is called with outside of functions: when it is measured."""

    def __init__(self, seen: list, **kwargs):
        super().__init__(**kwargs)
        self.note = seen.append  # of the list itself: Keras would copy it

    def call(self, x):
        if tf.executing_eagerly() and isinstance(x, tf.Tensor):
            self.note(x.numpy())
        return x


class Subclassed(keras.Model):
    """A model whose layers see its inputs only when it is called."""

    def __init__(self, seen: list):
        super().__init__()
        self.noting, self.scores = Noting(seen), layers.Dense(3)

    def call(self, x):
        return self.scores(self.noting(x * 1.0))


@pytest.mark.parametrize("is_subclassed", [False, True])
def test_layers_are_measured_on_the_first_microbatch(is_subclassed):
    seen: list = []

    def build():
        if is_subclassed:
            return Subclassed(seen)
        return keras.Sequential([keras.Input((6,)), Noting(seen), layers.Dense(3)])

    x, y = tiny_data(12)
    strategy = PipelineStrategy(CPUS[:2], 2)
    training = train(strategy, build, rows=12, batch_size=8, epochs=1)
    assert seen and all(np.array_equal(each, x[:4]) for each in seen)
    assert all(size > 0 for size in strategy.stages(training.model).activation_bytes)
    count = len(seen)
    training.model.fit(x, y, batch_size=8, verbose=0)
    assert len(seen) == count  # measured once


def test_datasets_are_measured_by_their_shapes():
    """Who takes a batch from a generator takes it from the training: zeros must do."""
    seen: list = []
    x, y = tiny_data(12)

    def rows():
        for start in (0, 4, 8):
            yield x[start : start + 4], y[start : start + 4]

    def build():
        return keras.Sequential([keras.Input((6,)), Noting(seen), layers.Dense(3)])

    signature = (tf.TensorSpec([4, 6], tf.float32), tf.TensorSpec([4], tf.int64))
    data = tf.data.Dataset.from_generator(rows, output_signature=signature)
    strategy = PipelineStrategy(CPUS[:2], 2)
    train(strategy, build, data=None, x=data, epochs=1, steps_per_epoch=3)
    assert seen and all(np.array_equal(each, np.zeros([2, 6])) for each in seen)


def test_a_memory_limit_moves_layers():
    def build():
        x = keras.Input((6,))
        y = layers.Dense(400, name="a")(x)
        for name in "bcd":
            y = layers.Dense(400, name=name)(y)
        return keras.Model(x, y)

    def parameters(limit):
        strategy = PipelineStrategy(CPUS[:2], 2, memory_limit_bytes=limit)
        summary = strategy.summary(built(strategy, build))
        for stage in summary.stages:
            assert limit is None or stage.parameter_bytes + stage.activation_bytes <= limit
        return [stage.num_parameters for stage in summary.stages]

    dense = 400 * 400 + 400
    assert sum(parameters(None)) == 3 * dense + 7 * 400
    # Three numbers for each parameter (two gradients); 8 rows and two live microbatches at most.
    assert parameters(12 * 2 * dense + 10**5) in ([7 * 400 + dense, 2 * dense],)
    with pytest.raises(ValueError, match="memory_limit=1000 for 2 stages, too large alone: a"):
        parameters(1000)


def placed(strategy):
    """`x + y` is no layer, and follows what it takes."""

    def build():
        x = inputs = keras.Input((6,))
        with strategy.stage(0):
            x = skipped = layers.Dense(6, name="first")(x)
        with strategy.stage(1):
            x = layers.Dense(6, "tanh", name="second")(x)
        return keras.Model(inputs, layers_of_last(strategy, x + skipped))

    return build


def layers_of_last(strategy, x):
    with strategy.stage(2):
        return layers.Dense(3, name="third")(x)


def test_layers_are_on_the_stage_they_are_constructed_in():
    strategy = PipelineStrategy(CPUS[:3], 2)
    construct = keras.Operation.__init__
    training = train(strategy, placed(strategy))
    assert keras.Operation.__init__ is construct
    stages = stage_of(strategy, training.model)
    assert [stages[name] for name in ("first", "second", "third")] == [0, 1, 2]
    assert stages[next(name for name in stages if name.startswith("add"))] == 1

    def plain():
        x = keras.Input((6,))
        first = layers.Dense(6)(x)
        second = layers.Dense(6, "tanh")(first)
        return keras.Model(x, layers.Dense(3)(second + first))

    assert_same_training(train(None, plain), training)


def test_layers_outside_of_all_stages_are_refused():
    strategy = PipelineStrategy(CPUS[:2], 2)

    def build():
        with strategy.stage(0):
            first = layers.Dense(5)
        with strategy.stage(1):
            second = layers.Dense(5)
        return keras.Sequential([keras.Input((6,)), first, second, layers.Dense(3, name="lost")])

    with pytest.raises(ValueError, match="all must be. Received: 'lost' outside"):
        strategy.stages(built(strategy, build))


@pytest.mark.parametrize("index", [3, -1, "first"])
def test_a_stage_that_does_not_exist_is_refused(index):
    with (
        pytest.raises(ValueError, match="from 0 to 2. Received: stage"),
        PipelineStrategy(CPUS[:3], 2).stage(index),
    ):
        pass


def test_patterns_and_placement_exclude_each_other():
    strategy = PipelineStrategy(CPUS[:3], 2, partition=[["first"], ["second"], ["third"]])
    with pytest.raises(ValueError, match="Received: both, partition="):
        strategy.stages(built(strategy, placed(strategy)))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="4 stages for model .* of 2 layers"):
        strategy = PipelineStrategy(CPUS, 4)
        strategy.stages(built(strategy, tiny_model))


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([["down*"], ["up*", "add*"]], "Every layer must match .* 'scores', which match none"),
        ([["down*", "up*", "add*"], ["scores", "sideways"]], "pattern must match .* 'sideways'"),
        ([["down*", "up*", "add*", "scores"], []], "list of patterns, and so a layer.*stage 1"),
        ([["scores"], ["down*", "up*", "add*"]], "none for stage 0 .*order in which the layers"),
        ([["*"]], "'balanced' or .* 2 stages"),
        ("balance", "'balanced' or .* 2 stages"),
        ([["down*"], ["up*"], ["*"]], "'balanced' or .* 2 stages"),
    ],
    ids=["unmatched", "idle", "empty", "emptied", "one list", "name", "three lists"],
)
def test_patterns_that_do_not_fit_are_refused(partition, message):
    strategy = PipelineStrategy(CPUS[:2], 2, partition=partition)
    with pytest.raises(ValueError, match=message):
        strategy.stages(built(strategy, deep_model))


def test_a_summary_tells_what_is_on_each_stage():
    patterns = [["*_0"], ["*_[12]", "add*", "scores"]]
    strategy = PipelineStrategy(CPUS[:2], 4, partition=patterns)
    training = train(strategy, deep_model, optimizer=lambda: keras.optimizers.Adam(0.01))
    summary = strategy.summary(training.model)
    first, second = summary.stages
    assert (first.device, first.layers, first.num_parameters) == ("CPU:0", ("down_0",), 7 * 7)
    assert second.num_parameters == 5 * (7 * 7 + 7) + 7 * 3 + 3
    for stage in summary.stages:  # the value, two gradients, Adam's two slots
        assert stage.parameter_bytes == 5 * 4 * stage.num_parameters
        assert stage.time_share is None and stage.activation_bytes is None  # not measured
    text = str(summary)
    assert "CPU:1" in text and "down_0" in text and f"{second.num_parameters:,}" in text


def test_a_summary_of_measured_stages_adds_up():
    strategy = PipelineStrategy(CPUS[:2], 4)
    summary = strategy.summary(built(strategy, deep_model))
    first, second = summary.stages
    assert first.time_share + second.time_share == pytest.approx(1)
    assert first.num_parameters + second.num_parameters == 7 * 7 + 5 * 56 + 24
    of_one = 8 * 7 * 4  # bytes of the outputs of a layer, of 8 rows
    assert first.activation_bytes == 2 * of_one * len(first.layers)  # 1F1B: two are alive
    assert second.activation_bytes == of_one * (len(second.layers) - 1) + 8 * 3 * 4
    console = Console(file=io.StringIO(), width=100)
    console.print(summary)
    assert "activation bytes" in console.file.getvalue()
