"""PipelineStrategy: models in models, whose layers are divided as if they stood alone."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.conformance.cases.nested import Blocks, Gan, Trainer, Vae, deep_trainer, mlp, tower
from tests.helpers import (
    Training,
    assert_same_training,
    numbered,
    tiny_compile_options,
    tiny_data,
    train,
)
from tfparallel import PipelineStrategy
from tfparallel.pipeline.parts import Member, find_parts

pytestmark = pytest.mark.turns

CPUS = [f"CPU:{i}" for i in range(4)]


def mlp_and_head():
    x = keras.Input((6,))
    y = x
    for units in (5, 7, 4):
        y = layers.Dense(units, "tanh", name=f"d{units}")(y)
    return keras.Model(x, layers.Dense(3, name="head")(y))


def functional_in_functional():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, name="head")(tower(6, name="base")(x)))


def sequential_in_functional():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, name="head")(mlp(5, 7, 4, name="base")(x)))


def subclassed_in_functional():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, name="head")(Blocks(name="base")(x)))


def subclassed_in_sequential():
    return keras.Sequential([keras.Input((6,)), Blocks(name="base"), layers.Dense(3)])


def functional_in_trainer():
    return Trainer(functional_in_functional())


def subclassed_in_trainer():
    return Trainer(subclassed_in_functional())


def called_on_its_own_result():
    x = keras.Input((6,))
    shared = mlp(5, 6, name="shared")
    return keras.Model(x, layers.Dense(3, name="head")(shared(shared(x) + x)))


def siamese():
    """Both sides see the same layers, without waiting for each other."""
    x = keras.Input((6,))
    shared = tower(3, name="tower")
    left, right = shared(x[:, :3]), shared(x[:, 3:])
    return keras.Model(x, layers.Dense(3, name="head")(layers.Concatenate()([left, right])))


class Siamese(keras.Model):
    def __init__(self):
        super().__init__()
        self.tower, self.head = tower(3, name="tower"), layers.Dense(3)

    def call(self, x):
        left, right = self.tower(x[:, :3]), self.tower(x[:, 3:])
        return self.head(keras.ops.concatenate([left, right], axis=-1))


class TwoTowers(keras.Model):
    def __init__(self):
        super().__init__()
        self.query, self.item = mlp(5, 4, features=3, name="query"), Blocks(name="item")
        self.head = layers.Dense(3)

    def call(self, x):
        return self.head(keras.ops.concatenate([self.query(x[:, :3]), self.item(x)], axis=-1))


def dicts_and_masks():
    """A nested model of dictionaries; a mask that comes out of one and goes into another."""
    tokens = keras.Input((6,))
    ids = keras.ops.cast(keras.ops.floor(keras.ops.abs(tokens) * 3), "int32")
    inner = keras.Input((None,), dtype="int32")
    embedded = layers.Embedding(20, 4, mask_zero=True)(inner)
    embedder = keras.Model(inner, embedded, name="embedder")
    sequence = keras.Input((None, 4), name="sequence")
    extra = keras.Input((6,), name="extra")
    read = {"read": layers.LSTM(4)(sequence), "extra": layers.Dense(4)(extra)}
    reader = keras.Model({"sequence": sequence, "extra": extra}, read, name="reader")
    result = reader({"sequence": embedder(ids), "extra": tokens})
    return keras.Model(tokens, layers.Dense(3)(result["read"] + result["extra"]))


def wrappers():
    """Layers that hold models are one part."""
    x = keras.Input((6,))
    steps = layers.Reshape((3, 2))(x)
    distributed = layers.TimeDistributed(mlp(4, features=2, name="step"))(steps)
    both = layers.Bidirectional(layers.LSTM(3))(distributed)
    return keras.Model(x, layers.Dense(3)(both))


def long(parameter, **options):
    return pytest.param(parameter, marks=pytest.mark.long, **options)


MODELS = [
    functional_in_trainer,
    siamese,
    long(dicts_and_masks),
    long(functional_in_functional),
    long(sequential_in_functional),
    long(subclassed_in_functional),
    long(subclassed_in_sequential),
    long(subclassed_in_trainer),
    long(deep_trainer),  # a conformance case
    long(called_on_its_own_result),
    long(Siamese),
    long(TwoTowers),
    long(wrappers),
]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_nested_models_train_as_on_one_device(build):
    strategy = PipelineStrategy(CPUS[:3], 3)
    candidate = train(strategy, build)
    assert_same_training(train(None, build), candidate)
    assert set(strategy.stages(candidate.model).stage_of) == {0, 1, 2}


@pytest.mark.parametrize(
    "options",
    [
        long({"schedule": "gpipe", "rematerialize": "full"}),
        long({"schedule": "interleaved_1f1b", "offload": True}),
        {"schedule": "zero_bubble", "rematerialize": {"model/side", "*/block_[01]"}},
    ],
    ids=["gpipe", "interleaved", "zero_bubble"],
)
def test_nested_models_of_which_less_is_kept(options):
    strategy = PipelineStrategy(CPUS[:2], 3, **options)
    assert_same_training(train(None, deep_trainer), train(strategy, deep_trainer))


@pytest.mark.parametrize("build", [Vae, long(Gan)])
def test_trainers_without_a_call(build):
    def trained(strategy):
        data = tf.data.Dataset.from_tensor_slices(tiny_data(26)[0]).batch(13)
        training = train(strategy, build, compile_options=dict, data=None, x=data)
        return Training(training.model, training.history, numbered("", _slots(training.model)))

    strategy = PipelineStrategy(CPUS[:3], 3)
    reference, candidate = trained(None).results(), trained(strategy)
    stages = strategy.stages(candidate.model)
    assert set(stages.stage_of) == {0, 1, 2}
    # Keras builds a compiled optimizer that a model does not use under a strategy only.
    own = {name: value for name, value in candidate.results().items() if name in reference}
    assert_same_training(reference, own)


def _slots(model):
    optimizers = [getattr(model, name, None) for name in ("d_optimizer", "g_optimizer")]
    return [v.numpy() for each in optimizers if each is not None for v in each.variables]


def stage_of(strategy, model) -> dict[str, int]:
    stages = strategy.stages(model)
    return {part.name: stage for part, stage in zip(stages.parts, stages.stage_of)}


def built(strategy, build):
    with strategy.scope():
        return build()


def nested_twice():
    """Called on its own result; another one around both."""
    x = keras.Input((6,))
    block = mlp(6, name="block")
    body = keras.Model(x, block(block(x)), name="body")
    return Trainer(keras.Model(x, layers.Dense(3, name="head")(body(x)), name="model"))


def test_layers_of_nested_models_are_parts_with_paths():
    expected = {
        functional_in_functional: [
            "base/first",
            "base/second",
            "base/add",
            "base/third",
            "head",
        ],
        functional_in_trainer: [
            "functional/base/first",
            "functional/base/second",
            "functional/base/add",
            "functional/base/third",
            "functional/head",
        ],
        subclassed_in_functional: ["base/block_0", "base/block_1", "base/block_2", "head"],
        nested_twice: ["model/body/block/d6", "model/body/block/d6", "model/head"],
        Siamese: ["tower/first", "tower/second", "tower/add", "tower/third", "dense"],
        siamese: [
            "get_item_1",
            "get_item",
            "tower/first",
            "tower/second",
            "tower/add",
            "tower/third",
            "concatenate",
            "head",
        ],
        wrappers: ["reshape", "time_distributed", "bidirectional", "dense"],
    }
    for build, names in expected.items():
        keras.backend.clear_session()  # numbers of names
        strategy = PipelineStrategy(CPUS[:2], 2, partition=[["*"], ["nothing"]])
        model = built(strategy, build)
        assert [part.name for part in find_parts(model)] == names, build.__name__


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ([["base"], ["head"]], [0, 0, 0, 0, 1]),
        ([["b*"], ["h*"]], [0, 0, 0, 0, 1]),
        ([["base/first"], ["base/[!f]*", "head"]], [0, 1, 1, 1, 1]),
        ([["*/first", "*/second"], ["base/add*", "base/third", "*head"]], [0, 0, 1, 1, 1]),
        ([["base/first", "base/third"], ["*/second", "*/add*", "head"]], [0, 1, 1, 1, 1]),
    ],
)
def test_patterns_of_paths(partition, expected):
    strategy = PipelineStrategy(CPUS[:2], 2, partition=partition)
    stages = strategy.stages(built(strategy, functional_in_functional))
    assert list(stages.stage_of) == expected


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([["base/first"], ["head"]], "Every layer must match .* 'base/second', 'base/add"),
        ([["first", "base"], ["head"]], "pattern must match .* 'first' .* are 'base/first'"),
        (
            [["base"], ["base/third", "head"]],
            r"one stage only. Received: 'base/third' \(stages 0, 1",
        ),
    ],
)
def test_patterns_that_do_not_fit_name_paths(partition, message):
    strategy = PipelineStrategy(CPUS[:2], 2, partition=partition)
    with pytest.raises(ValueError, match=message):
        strategy.stages(built(strategy, functional_in_functional))


def test_parts_follow_what_they_take_out_of_nested_models():
    """`late` has two outputs, of stages 1 and 2; `early` takes one of them."""

    def build():
        x = keras.Input((6,))
        first = layers.Dense(4, name="first")(x)
        late = keras.Model(x, [first, layers.Dense(4, name="second")(first)], name="late")
        of_first, of_second = late(layers.Dense(6, name="input")(x))
        y = keras.Input((4,))
        early = keras.Model(y, layers.Dense(4, name="only")(y), name="early")
        joined = layers.Concatenate(name="join")([early(of_first), of_second])
        return keras.Model(x, layers.Dense(3, name="head")(joined))

    partition = [["input", "early"], ["late/first", "join"], ["late/second", "head"]]
    strategy = PipelineStrategy(CPUS[:3], 2, partition=partition)
    candidate = train(strategy, build)
    assert stage_of(strategy, candidate.model) == {
        "input": 0,
        "late/first": 1,
        "late/second": 2,
        "early/only": 1,  # the pattern says 0
        "join": 2,  # the pattern says 1
        "head": 2,
    }
    assert_same_training(train(None, build), candidate)


@pytest.mark.parametrize(("is_masked", "of_own"), [(False, 0), (True, 1)])
def test_a_part_of_a_nested_model_follows_those_inputs_that_it_takes(is_masked, of_own):
    """Beside masks, which the inputs are is not looked at: it follows all of them."""

    def build():
        x = keras.Input((6,))
        first = layers.Dense(4, name="first")(x)
        second = layers.Dense(4, name="second")(first)
        inputs = keras.Input((4,)), keras.Input((4,))
        joined = layers.Add(name="add")([layers.Dense(4, name="own")(inputs[0]), inputs[1]])
        masks = [keras.ops.any(first > 0, -1), None] if is_masked else None
        y = keras.Model(inputs, joined, name="pair")([first, second], mask=masks)
        return keras.Model(x, layers.Dense(3, name="head")(y))

    partition = [["first", "gr*", "any*", "pair/own"], ["second", "pair/add", "head"]]
    partition[0] = [each for each in partition[0] if is_masked or "*" not in each]
    strategy = PipelineStrategy(CPUS[:2], 2, partition=partition)
    assert stage_of(strategy, built(strategy, build))["pair/own"] == of_own


def test_calls_of_a_graph_are_told_apart_and_others_are_not():
    assert Member(operation=None).within((1,)) == (1,)
    assert Member(operation=None, call=2).within((1,)) == (1, 2)


def test_nested_models_constructed_for_a_stage():
    """Layers go where they were constructed, or else where the model around them was."""
    keras.backend.clear_session()  # numbers of names
    strategy = PipelineStrategy(CPUS[:3], 2)

    def build(stage):
        x = inputs = keras.Input((6,))
        with stage(0):
            base = tower(6, name="base")
        with stage(1):
            first = layers.Dense(6, name="first")
        second = keras.Sequential([keras.Input((4,)), first], name="second")
        with stage(2):
            third = Blocks(name="third")  # its layers too
            x = third(second(base(inputs)))
            return keras.Model(inputs, layers.Dense(3, name="head")(x))

    candidate = train(strategy, lambda: build(strategy.stage))
    assert stage_of(strategy, candidate.model) == {
        "base/first": 0,
        "base/second": 0,
        "base/add": 0,
        "base/third": 0,
        "second/first": 1,
        "third/block_0": 2,
        "third/block_1": 2,
        "third/block_2": 2,
        "head": 2,
    }
    assert_same_training(train(None, lambda: build(lambda _: contextlib.nullcontext())), candidate)


def test_variables_of_nested_models_live_with_their_layers():
    patterns = [["base/block_0"], ["base/block_[12]", "head"]]
    strategy = PipelineStrategy(CPUS[:2], 2, partition=patterns)
    model = train(strategy, subclassed_in_functional).model
    stages = stage_of(strategy, model)
    for weight in model.weights:
        layer = next((name for name in stages if name in weight.path), "base/block_0")
        (copy,) = weight.value.values
        assert copy.device.endswith(f"CPU:{stages[layer]}"), weight.path
    first, second = strategy.summary(model).stages
    assert first.layers == ("base/block_0",) and first.num_parameters == 7 * 6 + 1  # and `scale`
    assert second.num_parameters == 2 * 7 * 6 + 7 * 3


def test_stages_of_a_nested_model_are_called_once_for_each_microbatch():
    """What stands together runs together, though models are around some of it."""

    def calls(build, partition):
        strategy = PipelineStrategy(CPUS[:2], 2, partition=partition)
        with strategy.scope():
            model = build()
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            x, y = (tf.constant(array) for array in tiny_data(8))
            model._symbolic_build(data_batch=(x, y, None))
            step = tf.function(lambda data: strategy.run(model.test_step, args=(data,)))
            operations = step.get_concrete_function((x, y)).graph.get_operations()
        remote = [op for op in operations if op.type == "RemoteCall" and op.outputs]
        return [sum(op.device.endswith(f"CPU:{i}") for op in remote) // 2 for i in (0, 1)]

    flat, nested = [["d5"], ["d7", "d4", "head"]], [["base/d5"], ["base/d[74]", "head"]]
    of_flat = calls(mlp_and_head, flat)
    assert calls(sequential_in_functional, nested) == [of_flat[0], of_flat[1] + 1]
    assert calls(sequential_in_functional, [["base"], ["head"]]) == of_flat


def test_siamese_sides_share_their_parts():
    """Both calls go through the stages: none is moved behind the other."""
    partition = [["get_item*", "tower/first"], ["tower/[!f]*", "concatenate*", "head"]]
    strategy = PipelineStrategy(CPUS[:2], 2, partition=partition)
    candidate = train(strategy, siamese)
    assert stage_of(strategy, candidate.model)["tower/second"] == 1
    assert_same_training(train(None, siamese), candidate)


def test_saved_files_are_those_of_plain_keras(tmp_path):
    strategy = PipelineStrategy(CPUS[:3], 3)
    with strategy.scope():
        candidate = deep_trainer()
        candidate.compile("sgd", **tiny_compile_options())
    x, y = tiny_data(7)
    candidate.train_on_batch(x, y)
    candidate.save(tmp_path / "model.keras")
    candidate.save_weights(tmp_path / "model.weights.h5")
    expected = candidate.predict(x, verbose=0)
    loaded = keras.saving.load_model(tmp_path / "model.keras")  # outside of the strategy
    plain = deep_trainer()
    plain.build((None, 6))
    plain.load_weights(tmp_path / "model.weights.h5")
    for model in (loaded, plain):
        np.testing.assert_allclose(model(x), expected, atol=1e-6)
    assert [w.name for w in plain.weights] == [w.name for w in candidate.weights]


class Fragile(layers.Layer):
    is_cracked = False

    def call(self, x):
        if self.is_cracked:
            raise LookupError("the layer is cracked")
        return x


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes come with Python 3.11")
def test_an_error_names_the_path_of_the_layer():
    fragile = Fragile(name="fragile")
    strategy = PipelineStrategy(CPUS[:2], 2, partition=[["base/d5"], ["base/fragile", "head"]])
    with strategy.scope():
        x = keras.Input((6,))
        inner = [keras.Input((6,)), layers.Dense(5, name="d5"), fragile]
        base = keras.Sequential(inner, name="base")
        model = keras.Model(x, layers.Dense(3, name="head")(base(x)))
        model.compile("sgd", **tiny_compile_options())
    model.train_on_batch(*tiny_data(4))
    fragile.is_cracked = True
    with pytest.raises(LookupError) as error:
        model.train_on_batch(*tiny_data(6))  # traced anew
    assert error.value.__notes__ == ["In layer 'base/fragile' on stage 1 of the pipeline."]
