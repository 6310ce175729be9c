"""One image on several devices: rows with halos give what one device gives, to the borders."""

import keras
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from keras import layers

import tfparallel
from tests import helpers
from tests.tensor_parallel import test_graph, test_rules
from tests.tensor_parallel.layouts import layout_map
from tfparallel.tensor_parallel.rules import spatial
from tfparallel.tensor_parallel.windows import Window, spans

pytestmark = pytest.mark.turns

ROWS = (None, "model", None, None)


@given(
    count=st.integers(1, 40),
    size=st.integers(1, 9),
    stride=st.integers(1, 5),
    padding=st.sampled_from(["valid", "same", "causal"]),
    parts=st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
def test_spans_together_are_what_tensorflow_slides_over(count, size, stride, padding, parts):
    window = Window(size, stride, padding)
    outputs = window.outputs(count)
    if outputs < parts:
        with pytest.raises(ValueError):
            spans(window, count, parts)
        return
    padded = np.arange(1, count + 1)
    before = window.before(count)
    padded = np.concatenate([np.zeros(before, int), padded, np.zeros(size + stride, int)])
    expected = [list(padded[o * stride : o * stride + size]) for o in range(outputs)]
    received = []
    for span in spans(window, count, parts):
        own = np.concatenate(
            [
                np.zeros(span.before, int),
                np.arange(span.start, span.end) + 1,
                np.zeros(span.after, int),
            ]
        )
        assert (len(own) - size) % stride == 0
        received += [list(own[i : i + size]) for i in range(0, len(own) - size + 1, stride)]
    assert received == expected


def _strategy(parts, dim, rank, pattern=".*one/output"):
    axes = tuple("model" if i == dim else None for i in range(rank))
    return tfparallel.TensorParallelStrategy(layout_map(1, parts, {pattern: axes}))


def _assert_same(make, data, strategy):
    expected = test_rules._outcome(make, data, None)
    received = test_rules._outcome(make, data, strategy)
    assert len(expected) == len(received)
    for one_device, parts in zip(expected, received, strict=True):
        np.testing.assert_allclose(parts, one_device, rtol=2e-5, atol=2e-5)


@given(
    height=st.integers(3, 17),
    width=st.integers(3, 9),
    size=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    padding=st.sampled_from(["valid", "same"]),
    parts=st.sampled_from([2, 3]),
    dim=st.sampled_from([1, 2]),
)
@example(8, 5, 3, 1, 1, "same", 2, 1)
@example(17, 4, 5, 1, 3, "same", 3, 1)
@example(9, 9, 2, 4, 1, "valid", 2, 2)
@settings(max_examples=5, deadline=None)
def test_a_convolution_of_any_window(height, width, size, stride, dilation, padding, parts, dim):
    dilation = 1 if stride > 1 else dilation
    if padding == "valid" and (size - 1) * dilation + 1 > min(height, width):
        padding = "same"
    options = {"strides": stride, "dilation_rate": dilation, "padding": padding}

    def make():
        return [layers.Conv2D(4, size, activation="relu", name="one", **options)]

    _assert_same(make, (height, width, 3), _strategy(parts, dim, 4))


IMAGES = {
    "conv1d, causal": (lambda: [layers.Conv1D(4, 3, padding="causal", name="one")], (9, 3), 1),
    "conv3d, its last dim": (
        lambda: [layers.Conv3D(3, 2, padding="same", name="one")],
        (4, 3, 5, 2),
        3,
    ),
    "depthwise": (
        lambda: [layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same", name="one")],
        (7, 5, 3),
        1,
    ),
    "separable": (lambda: [layers.SeparableConv2D(4, 3, strides=2, name="one")], (9, 8, 3), 1),
    "pooling": (
        lambda: [
            layers.Conv2D(4, 3, padding="same", name="one"),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.AveragePooling2D(3, 2, padding="same"),
        ],
        (13, 8, 3),
        1,
    ),
    "softmax of channels": (
        lambda: [layers.Conv2D(4, 3, activation="softmax", name="one")],
        (7, 6, 3),
        1,
    ),
    "too few rows for the devices": (lambda: [layers.Conv2D(4, 6, name="one")], (6, 7, 3), 1),
}


@pytest.fixture
def exchanges(monkeypatch):
    """How often devices got halos."""
    calls: list = []
    regions = spatial.regions
    monkeypatch.setattr(spatial, "regions", lambda *args: calls.append(args) or regions(*args))
    return calls


@pytest.mark.parametrize("name", IMAGES)
def test_what_else_has_windows(name, exchanges):
    make, shape, dim = IMAGES[name]
    _assert_same(make, shape, _strategy(2, dim, len(shape) + 1))
    assert bool(exchanges) == (name != "too few rows for the devices")


def _residual_network():
    """Convolutions with strides, BatchNorm, Dropout, a residual and pooling, all in rows."""
    image = keras.Input((13, 9, 3))
    x = layers.Conv2D(5, 3, padding="same", use_bias=False, name="conv1")(image)
    x = layers.Activation("relu")(layers.BatchNormalization(name="norm")(x))
    y = layers.Conv2D(5, 3, padding="same", name="conv2")(x)
    x = layers.Dropout(0.2, seed=2)(layers.Add()([x, y]))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    x = layers.SeparableConv2D(6, 3, strides=2, padding="same", name="conv3")(x)
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def _images(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 13, 9, 3)).astype("float32"), rng.integers(0, 3, rows)


@pytest.mark.parametrize("parts", [2, pytest.param(3, marks=pytest.mark.long)])
def test_trains_as_one_device(parts, exchanges):
    strategy = _strategy(parts, 1, 4, ".*conv./output")
    candidate = helpers.train(strategy, build=_residual_network, data=_images)
    one_device = helpers.train(None, build=_residual_network, data=_images)
    helpers.assert_same_training(one_device, candidate, atol=5e-6)
    assert exchanges


@pytest.mark.long
def test_two_replicas_of_two_devices():
    def build():
        model = _residual_network()
        model.get_layer("norm").synchronized = True
        model.layers[[type(x).__name__ for x in model.layers].index("Dropout")].rate = 0.0
        return model

    layout = layout_map(2, 2, {".*conv./output": ("batch", "model", None, None)})
    candidate = helpers.train(tfparallel.TensorParallelStrategy(layout), build=build, data=_images)
    helpers.assert_same_training(
        helpers.train(None, build=build, data=_images), candidate, atol=5e-6
    )


def test_each_device_convolves_its_rows_forward_and_backward():
    def make():
        image = keras.Input((12, 8, 4))
        x = layers.Conv2D(4, 3, padding="same", name="conv1")(image)
        x = layers.Conv2D(4, 3, padding="same", activation="relu", name="conv2")(x)
        return keras.Model(image, layers.Conv2D(4, 3, padding="same", name="conv3")(x))

    layouts = {".*/output": ROWS}
    counts = test_graph._operations_that_run(layouts, make, (2, 12, 8, 4))
    of_filters, of_inputs = (
        [sum(n for name, n in counts[i].items() if name.startswith(kind)) for i in (0, 1)]
        for kind in ("Conv2DBackpropFilter", "Conv2DBackpropInput")
    )
    assert test_graph._on_each(counts, "Conv2D") == [3, 3]
    assert of_filters == [3, 3]
    assert of_inputs == [2, 2]


def test_refuses_a_layout_of_another_rank():
    layout = layout_map(1, 2, {".*one/output": (None, "model")})
    strategy = tfparallel.TensorParallelStrategy(layout)
    with pytest.raises(ValueError, match=r"one/output' must name an axis, or None, for each of 4"):
        test_rules._outcome(lambda: [layers.Conv2D(3, 3, name="one")], (6, 6, 3), strategy)
