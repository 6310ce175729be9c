"""`layout="auto"`: what is found is Megatron's, is computed as it says, and trains exactly."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel import test_graph, test_training
from tests.tensor_parallel.layouts import cpu_mesh, layout_map

pytestmark = pytest.mark.turns


def _auto(replicas=1, parts=2):
    return tfparallel.TensorParallelStrategy("auto", device_mesh=cpu_mesh(replicas, parts))


def _parts(model):
    """The dim that is in parts of each weight, by the end of its path."""
    dims = {}
    for weight in model.trainable_weights:
        rows = getattr(weight.value, "rows", None)
        dims["/".join(weight.path.split("/")[-2:])] = None if rows is None else rows.dim
    return dims


def _assert_same(strategy, **options):
    candidate = helpers.train(strategy, **options)
    helpers.assert_same_training(helpers.train(None, **options), candidate, atol=5e-6)
    return candidate.model


@pytest.mark.parametrize(
    "replicas, parts",
    [
        (2, 2),
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(1, 3, marks=pytest.mark.long),
    ],
)
def test_a_transformer_is_cut_as_megatron_cuts_it(replicas, parts):
    def build():
        model = test_training._transformer()
        for layer in model.layers:
            if isinstance(layer, layers.Dropout) and replicas > 1:
                layer.rate = 0.0  # whose masks differ by replica
        return model

    model = _assert_same(
        _auto(replicas, parts),
        build=build,
        data=test_training._tokens,
        optimizer=test_training._adamw if replicas == 1 else helpers.momentum_sgd,
    )
    dims = _parts(model)
    assert [dims[f"up{i}/{w}"] for i in (0, 1) for w in ("kernel", "bias")] == [1, 0, 1, 0]
    assert [dims[f"down{i}/{w}"] for i in (0, 1) for w in ("kernel", "bias")] == [0, None] * 2
    assert dims["tokens/embeddings"] == 0
    assert dims["query/kernel"] == dims["value/kernel"] == 1
    assert dims["attention_output/kernel"] == 0


def _images(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 8, 8, 3)).astype("float32"), rng.integers(0, 3, rows)


def test_filters_then_channels_of_convolutions_with_pooling_in_between():
    def build():
        return keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(7, 3, activation="relu", name="one"),
                layers.MaxPooling2D(),
                layers.Conv2D(5, 3, name="two"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(3, name="scores"),
            ]
        )

    model = _assert_same(_auto(), build=build, data=_images)
    dims = _parts(model)
    assert (dims["one/kernel"], dims["two/kernel"]) == (3, 2)
    assert dims["scores/kernel"] is None


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.long), 2])
def test_what_is_between_filters_and_channels_stays_in_parts(replicas):
    """As in MobileNet; over replicas the norms are synchronised."""

    def norm(name):
        return layers.BatchNormalization(name=name, synchronized=replicas > 1)

    def build():
        return keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(7, 1, name="expand", use_bias=False),
                norm("norm1"),
                layers.ReLU(),
                layers.DepthwiseConv2D(3, name="depth"),
                norm("norm2"),
                layers.Conv2D(5, 1, name="project"),
                layers.GlobalAveragePooling2D(),
                layers.LayerNormalization(name="last"),
                layers.Dense(3, name="scores"),
            ]
        )

    strategy = _auto(replicas)
    model = _assert_same(strategy, build=build, data=_images)
    dims = _parts(model)
    assert (dims["expand/kernel"], dims["depth/kernel"], dims["project/kernel"]) == (3, 2, 2)
    assert dims["norm1/gamma"] == dims["norm2/beta"] == dims["depth/bias"] == 0
    assert dims["last/gamma"] is None
    assert "A step sends 1 sums and 0 gathers" in str(strategy.summary(model))


def test_a_layer_norm_in_a_pair_sends_its_moments():
    def build():
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(9, "tanh", name="up"),
                layers.LayerNormalization(name="norm"),
                layers.Dense(3, name="down"),
            ]
        )

    strategy = _auto()
    model = _assert_same(strategy, build=build)
    assert _parts(model)["norm/gamma"] == 0
    line = next(x for x in str(strategy.summary(model)).splitlines() if " sum 8" in x)
    assert line.split("/")[1].split() == ["norm", "aligned", "0.0%", "sum", "8", "sum", "8"]


class Gated(keras.Model):
    """A subclassed model, which has no graph before it is called."""

    def __init__(self):
        super().__init__()
        self.gate = layers.Dense(9, "sigmoid", name="gate")
        self.up = layers.Dense(9, name="up")
        self.times = layers.Multiply()
        self.down = layers.Dense(3, name="down")

    def call(self, x):
        return self.down(self.times([self.gate(x), self.up(x)]))


def test_a_subclassed_model_is_cut_by_its_first_batch():
    dims = _parts(_assert_same(_auto(), build=Gated, optimizer=lambda: keras.optimizers.Adam(0.01)))
    assert dims == {
        "gate/kernel": 1,
        "gate/bias": 0,
        "up/kernel": 1,
        "up/bias": 0,
        "down/kernel": 0,
        "down/bias": None,
    }


def _seeded(build):
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@pytest.mark.parametrize(
    "first",
    [
        "predict",
        "summary",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("train_on_batch", "evaluate")),
    ],
)
def test_whatever_a_model_is_used_for_first(first):
    x = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
    y = x[:, :3]
    plain = _seeded(Gated)
    strategy = _auto()
    with strategy.scope():
        model = _seeded(Gated)
        if first == "summary":
            model(x)
    for each in (model, plain):
        if first == "predict":
            each.predict(x, verbose=0)
        elif first == "summary":
            each(x)
        else:
            getattr(each, first)(x, y)
    if first == "summary":
        assert "gated" in str(strategy.summary(model, x)).lower()
    assert _parts(model)["down/kernel"] == 0
    for each in (model, plain):
        each.fit(x, y, verbose=0, shuffle=False)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-6)


class Adversarial(keras.Model):
    """Two models with a step of their own; the outer one has no `call`."""

    def __init__(self):
        super().__init__()
        self.one = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(6)])
        self.two = keras.Sequential([keras.Input((6,)), layers.Dense(9, "relu"), layers.Dense(1)])

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.two(self.one(data)) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def test_models_within_a_model_without_a_call():
    def data(rows):
        return np.random.default_rng(0).normal(size=(rows, 6)).astype("float32"), None

    model = _assert_same(_auto(), build=Adversarial, data=data, compile_options=dict)
    assert [d for d in _parts(model).values() if d is not None] == [1, 0, 0] * 2


def test_saves_and_loads_wholes(tmp_path):
    strategy = _auto()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(3)])
    x = np.ones((2, 6), "float32")
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(plain.predict(x, verbose=0), expected, atol=1e-6)
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, atol=1e-6)


def _pair():
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(16, name="first"),
            layers.Dense(32, "tanh", name="up"),
            layers.Dropout(0.1, seed=1),
            layers.Dense(16, name="down"),
        ]
    )


def test_a_step_sends_what_the_table_says():
    """Its sums and gathers are those that devices run, counted there."""
    layouts = test_graph.MEGATRON
    strategy = tfparallel.TensorParallelStrategy(layout_map(1, 2, layouts))
    with strategy.scope():
        model = _pair()
    table = str(strategy.summary(model)).splitlines()
    assert "A step sends 2 sums and 0 gathers: 128 bytes for each row" in table[-1]
    assert table[-3].split("/")[1].split() == ["up", "column", "40.0%", "-", "sum", "64"]
    assert table[-2].split("/")[1].split() == ["down", "row", "40.0%", "sum", "64", "-"]
    counts = test_graph._operations_that_run(layouts, _pair, (12, 16))
    assert sum(counts[i]["AddN"] for i in (0, 1)) == 2
    assert sum(counts[i]["ConcatV2"] for i in (0, 1)) == 0


def test_a_custom_step_before_the_model_was_seen_says_what_to_do(caplog):
    strategy = _auto()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(3)])
    strategy.run(model, (np.ones((2, 6), "float32"),))
    assert "Call strategy.summary(model, batch) before" in caplog.text


def test_a_model_of_unknown_inputs_is_refused_by_name():
    strategy = _auto()
    with strategy.scope():
        model = Gated()
        model(np.ones((2, 6)))
    with pytest.raises(ValueError, match=r"inputs are known.*'gated.* Give a batch"):
        strategy.summary(model)


def test_a_mesh_beside_a_layout_map_is_refused():
    with pytest.raises(ValueError, match="device_mesh is for 'auto'"):
        tfparallel.TensorParallelStrategy(layout_map(1, 2, {}), device_mesh=cpu_mesh(1, 2))


def test_without_a_mesh_all_devices_are_one_group():
    assert tfparallel.TensorParallelStrategy("auto").extended.layouts.groups.parts == 4
