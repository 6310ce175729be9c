"""`num_stages`: layers and devices of the stages are chosen together, when layers are measured."""

import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import assert_same_training, cpu_mesh_of, tiny_data, train
from tfparallel import HybridStrategy, PipelineOptions, PipelineStrategy
from tfparallel.pipeline import stages as stages_module
from tfparallel.pipeline.profile import Cost

FOUR = [f"CPU:{i}" for i in range(4)]


@pytest.fixture
def measured(monkeypatch):
    """Has layers cost what the test says, instead of what they take on this machine."""

    def give(costs):
        monkeypatch.setattr(stages_module, "profile_parts", lambda *_: list(costs))

    return give


def times(*seconds):
    return [Cost(float(each)) for each in seconds]


def five_layers():
    x = keras.Input((6,))
    y = layers.Dense(8, "tanh", name="a")(x)
    y = layers.Add(name="add")([y, layers.Dense(8, "tanh", name="b")(y)])
    y = layers.Dense(8, "tanh", name="c")(y)
    return keras.Model(x, layers.Dense(3, name="d")(y))


SLOW_MIDDLE = times(1, 2, 0, 0, 1)


def adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.5, gradient_accumulation_steps=2)


def devices_of(strategy, model):
    summary = strategy.summary(model)
    rows = getattr(summary, "tables", [summary])[0].stages
    return [[int(name[-1]) for name in row.device.split(", ")] for row in rows]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"schedule": "zero_bubble", "num_microbatches": 6}, marks=pytest.mark.long),
        pytest.param({"schedule": "gpipe"}, marks=pytest.mark.long),
        pytest.param({"rematerialize": "full"}, marks=pytest.mark.long),
        pytest.param({"num_microbatches": None}, marks=pytest.mark.long),
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
def test_the_slow_stage_gets_two_devices_and_all_train_as_one_device(measured, options, rows):
    measured(SLOW_MIDDLE)
    training = {"build": five_layers, "optimizer": adam, "rows": rows[0], "batch_size": rows[1]}
    strategy = PipelineStrategy(FOUR, num_stages=3, **{"num_microbatches": 4, **options})
    assert "4 devices" in repr(strategy)
    trained = train(strategy, **training)
    assert devices_of(strategy, trained.model) == [[0], [1, 2], [3]]
    assert "CPU:1+CPU:2" in repr(strategy)
    assert_same_training(train(None, **training), trained)


@pytest.mark.turns
def test_pipelines_that_are_chosen_with_no_device_in_common_count_steps_once(measured):
    """Optimizers are made before, when all have the same devices."""
    measured(times(1, 1, 0, 1, 1))
    strategy = PipelineStrategy(FOUR, 4, num_stages=2)
    trained = train(strategy, five_layers, optimizer=adam)
    assert devices_of(strategy, trained.model) == [[0, 1], [2, 3]]
    assert_same_training(train(None, five_layers, optimizer=adam), trained)


def test_each_device_has_one_copy_of_its_stage(measured):
    measured(SLOW_MIDDLE)
    model = train(PipelineStrategy(FOUR, 4, num_stages=3), five_layers).model
    slot = next(v for v in model.optimizer.variables if "b_kernel_momentum" in v.path)
    kernels = [model.get_layer(name).kernel for name in "abd"]
    for variable, devices in zip([*kernels, slot], [[0], [1, 2], [3], [1]], strict=True):
        copies = {id(copy): copy for copy in variable.value.values}.values()
        assert [tf.DeviceSpec.from_string(x.device).device_index for x in copies] == devices


def every_choice(num_parts, num_devices, num_stages, allowed):
    for cuts in itertools.combinations(range(1, num_parts), num_stages - 1):
        bounds = [0, *cuts, num_parts]
        for counts in itertools.product(allowed, repeat=num_stages):
            if sum(counts) <= num_devices:
                yield list(itertools.pairwise(bounds)), counts


@pytest.mark.parametrize("seed", range(4))
def test_of_all_choices_it_takes_one_that_is_fastest(measured, seed):
    """Of all cuts, and of all numbers of devices that divide the four microbatches."""
    draw = random.Random(seed)
    num_stages = draw.choice([2, 3])
    costs = [
        Cost(draw.choice([1.0, 2.0, 5.0]), 1, draw.choice([0.0, 0.5]), draw.choice([0.0, 4.0]))
        for _ in range(5)
    ]
    allowed = [1, 2]  # of at most 3 that a stage can have, what divides 4

    def slowest(runs, counts):
        return max(
            (sum(c.time for c in costs[i:j]) + (costs[j - 1].sending_time if j < 5 else 0)) / k
            + (k - 1) * sum(c.copying_time for c in costs[i:j]) / 4
            for (i, j), k in zip(runs, counts, strict=True)
        )

    measured(costs)
    strategy = PipelineStrategy(FOUR, 4, num_stages=num_stages)
    with strategy.scope():
        model = five_layers()
    chosen = strategy.stages(model)
    starts = [chosen.stage_of.index(stage) for stage in range(num_stages)]
    counts = [len(devices) for devices in devices_of(strategy, model)]
    runs = list(itertools.pairwise([*starts, 5]))
    best = min(slowest(*each) for each in every_choice(5, 4, num_stages, allowed))
    assert slowest(runs, counts) == pytest.approx(best, rel=1e-12)


def test_a_limit_of_memory_is_kept_by_each_device(measured):
    """The slow layer's outputs fit on a device only if two share its microbatches."""
    costs = [Cost(1.0, 10), Cost(1.0, 4000), Cost(0.0, 10), Cost(0.0, 10), Cost(3.0, 10)]
    measured(costs)
    free = PipelineStrategy(FOUR, 4, num_stages=3)
    limited = PipelineStrategy(FOUR, 4, num_stages=3, memory_limit_bytes=12_000)
    for strategy, expected in ((free, [1, 1, 2]), (limited, [1, 2, 1])):
        with strategy.scope():
            model = five_layers()
        assert [len(each) for each in devices_of(strategy, model)] == expected
        row = strategy.summary(model).stages[1]
        fits = row.parameter_bytes + row.activation_bytes <= 12_000
        assert fits == (strategy is limited)
    nothing = PipelineStrategy(FOUR, 4, num_stages=3, memory_limit_bytes=5_000)
    with nothing.scope():
        model = five_layers()
    for _ in range(2):  # and again: nothing was decided by what failed
        with pytest.raises(ValueError, match="a limit of 5000 bytes"):
            nothing.stages(model)


@pytest.mark.long
def test_what_was_made_before_it_was_chosen_goes_where_its_stage_is(measured):
    """The optimizer is built and the model predicts and is loaded before anything trains."""
    measured(SLOW_MIDDLE)
    x, y = tiny_data(12)
    strategy, weights = PipelineStrategy(FOUR, 4, num_stages=3), []
    for scope in (strategy.scope, tf.distribute.get_strategy().scope):
        keras.utils.set_random_seed(0)
        with scope():
            model = five_layers()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(adam(), loss)
            model.optimizer.build(model.trainable_variables)
        before = model.predict(x, verbose=0)
        model.set_weights([w + 0.5 for w in model.get_weights()])
        model.fit(x, y, batch_size=12, epochs=4, verbose=0, shuffle=False)
        weights.append([before, *model.get_weights()])
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.long
def test_a_second_model_is_divided_for_the_devices_that_the_first_one_got(measured):
    measured(SLOW_MIDDLE)
    strategy = PipelineStrategy(FOUR, 4, num_stages=3)
    first = train(strategy, five_layers)
    measured(times(1, 1, 1, 1, 8))
    second = train(strategy, five_layers)
    assert devices_of(strategy, second.model) == [[0], [1, 2], [3]]
    reference = train(None, five_layers)
    assert_same_training(reference, first)
    assert_same_training(reference, second)


@pytest.mark.long
def test_a_mesh_of_one_pipeline_takes_it_as_well(measured):
    measured(SLOW_MIDDLE)
    options = PipelineOptions(4, num_stages=3)
    strategy = HybridStrategy(cpu_mesh_of(pipeline=4), pipeline=options)
    trained = train(strategy, five_layers)
    assert devices_of(strategy, trained.model) == [[0], [1, 2], [3]]
    assert_same_training(train(None, five_layers), trained)


@pytest.mark.long
def test_layers_that_are_measured_get_devices_as_well():
    """Nothing is given here: a layer of 1 MFLOP a row beside ones of some hundred."""

    def build():
        x = keras.Input((16,))
        y = layers.Dense(1024, "tanh", name="a")(x)
        y = layers.Dense(1024, "tanh", name="b")(y)
        return keras.Model(x, layers.Dense(3, name="c")(y))

    strategy = PipelineStrategy(FOUR, 4, num_stages=3)
    with strategy.scope():
        model = build()
        model.compile("sgd", "mse")
    x = np.ones((256, 16), "float32")
    model.fit(x, x[:, :3], batch_size=256, verbose=0)
    assert [len(each) for each in devices_of(strategy, model)] == [1, 2, 1]


@pytest.mark.turns
def test_the_swimlane_has_a_lane_for_each_device(measured):
    measured(SLOW_MIDDLE)
    strategy = PipelineStrategy(FOUR, 4, num_stages=3)
    with strategy.scope():
        model = five_layers()
        model.compile("sgd", "mse")
    x, _ = tiny_data(12)
    measured_step = strategy.profile(model, (x, x[:, :3]))
    assert measured_step.devices == tuple(FOUR)
    passes = {}
    for event in measured_step.timeline.events:
        passes.setdefault((event.action.stage, event.device), set()).add(event.action.microbatch)
    assert passes == {
        (0, 0): {0, 1, 2, 3},
        (1, 1): {0, 1},  # the devices of a stage take the microbatches of their pipelines
        (1, 2): {2, 3},
        (2, 3): {0, 1, 2, 3},
    }
    assert all(0 <= share <= 1 for share in measured_step.timeline.utilisation)
    assert 0 <= measured_step.ideal.bubble_fraction < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 5}, "Use at most 4 stages"),
        ({"num_stages": 2, "num_microbatches": 7}, "from 2 to 3 divides"),
        ({"num_stages": 3, "schedule": "interleaved_1f1b"}, "several stages on each device"),
        ({"num_stages": 3, "partition": [["a"], ["b"], ["c"]]}, "chosen together"),
        ({"num_stages": 0}, "num_stages must be a whole number"),
        ({"num_stages": 3, "devices": ["CPU:0", ["CPU:1", "CPU:2"]]}, "Either the devices"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(**{"devices": FOUR, **options})


def test_beside_another_axis_it_is_refused():
    with pytest.raises(ValueError, match="take {'pipeline': 4}"):
        HybridStrategy(cpu_mesh_of(data=2, pipeline=2), pipeline=PipelineOptions(4, num_stages=2))


def test_layers_that_the_user_places_are_refused():
    strategy = PipelineStrategy(FOUR, 4, num_stages=2)
    with strategy.scope():
        x = keras.Input((6,))
        with strategy.stage(0):
            y = layers.Dense(8)(x)
        with strategy.stage(1):
            model = keras.Model(x, layers.Dense(3)(y))
    with pytest.raises(ValueError, match="num_stages=2 beside layers that are placed"):
        strategy.stages(model)
