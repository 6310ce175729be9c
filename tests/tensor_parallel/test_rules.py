"""Each layer's rule computes the output and the gradients that the layer does on one device."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.tensor_parallel.layouts import layout_map

pytestmark = pytest.mark.turns

COLUMN, ROW = (None, "model"), ("model", None)


def _images(*shape):
    return np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")


def _tokens():
    return np.random.default_rng(0).integers(-2, 9, (3, 5))


def _dense(**options):
    return lambda: [layers.Dense(5, name="one", bias_initializer="normal", **options)]


def _conv(layer, filters=5, **options):
    return lambda: [layer(filters, 3, name="one", bias_initializer="normal", **options)]


def _einsum(equation, shape, **options):
    return lambda: [
        layers.EinsumDense(equation, shape, name="one", bias_initializer="normal", **options)
    ]


def _embedding():
    return [layers.Embedding(9, 5, name="one")]


def _channels(*between):
    return lambda: [
        layers.Conv2D(5, 3, name="one", padding="same"),
        *(make() for make in between),
        layers.Dense(3, name="two"),
    ]


def _normalized(make, **options):
    """Between a column and a row; its weights are no longer what they begin as."""
    inits = {"gamma_initializer": "normal", "beta_initializer": "normal"}
    if make is layers.RMSNormalization:
        inits = {}
    return lambda: [
        layers.Dense(6, "tanh", name="one"),
        make(name="norm", **inits, **options),
        layers.Dense(3, name="two"),
    ]


PAIR = {"one/kernel": COLUMN, "one/bias": ("model",), "two/kernel": ROW}
FILTERS, CHANNELS = (None, None, None, "model"), (None, None, "model", None)
CASES = {
    "dense by columns": (_dense(activation="gelu"), (7,), {"one/kernel": COLUMN}),
    "dense by columns with its bias": (
        _dense(activation="tanh"),
        (4, 7),
        {"one/kernel": COLUMN, "one/bias": ("model",)},
    ),
    "dense by columns, softmax": (_dense(activation="softmax"), (7,), {"one/kernel": COLUMN}),
    "dense by rows": (_dense(activation="relu"), (7,), {"one/kernel": ROW}),
    "dense by rows with its bias": (_dense(), (7,), {"one/kernel": ROW, "one/bias": ("model",)}),
    "dense without bias": (_dense(use_bias=False), (7,), {"one/kernel": COLUMN}),
    "einsum, a letter of the output": (
        _einsum("abc,cde->abde", (None, 3, 4), bias_axes="de"),
        (6, 7),
        {"one/kernel": (None, "model", None), "one/bias": ("model", None)},
    ),
    "einsum, a bias that is the same for all": (
        _einsum("abc,cde->abde", (None, 3, 4), bias_axes="e"),
        (6, 7),
        {"one/kernel": (None, "model", None)},
    ),
    "einsum, a letter that is summed": (
        _einsum("abcd,cde->abe", (None, 4), bias_axes="e"),
        (6, 3, 7),
        {"one/kernel": ("model", None, None)},
    ),
    "einsum, a letter of both": (
        _einsum("abc,bcd->abd", (7, 3), bias_axes="d"),
        (7, 4),
        {"one/kernel": ("model", None, None)},
    ),
    "einsum with an ellipsis": (
        _einsum("...x,xy->...y", (4,), bias_axes="y"),
        (2, 6, 7),
        {"one/kernel": COLUMN},
    ),
    "einsum with an ellipsis, summed": (
        _einsum("...x,xy->...y", (4,)),
        (2, 6, 7),
        {"one/kernel": ROW},
    ),
    "embedding by rows": (_embedding, _tokens, {"one/embeddings": ROW}),
    "embedding by columns": (_embedding, _tokens, {"one/embeddings": COLUMN}),
    "conv1d by filters": (_conv(layers.Conv1D), (9, 3), {"one/kernel": FILTERS[1:]}),
    "conv1d, causal, dilated, by channels": (
        _conv(layers.Conv1D, padding="causal", dilation_rate=2),
        (9, 3),
        {"one/kernel": CHANNELS[1:]},
    ),
    "conv2d by filters": (
        _conv(layers.Conv2D, strides=2, padding="same", activation="relu"),
        (8, 9, 3),
        {"one/kernel": FILTERS},
    ),
    "conv2d by channels": (_conv(layers.Conv2D), (8, 9, 3), {"one/kernel": CHANNELS}),
    "conv2d over a window": (
        _conv(layers.Conv2D),
        (8, 9, 3),
        {"one/kernel": ("model", None, None, None)},
    ),
    "conv3d by filters": (_conv(layers.Conv3D), (5, 5, 5, 3), {"one/kernel": (None, *FILTERS)}),
    "grouped conv2d": (_conv(layers.Conv2D, 6, groups=3), (8, 9, 3), {"one/kernel": FILTERS}),
    "column, activation, row": (
        lambda: [
            layers.Dense(6, name="one"),
            layers.Activation("silu"),
            layers.LeakyReLU(),
            layers.Dense(3, name="two"),
        ],
        (7,),
        {"one/kernel": COLUMN, "two/kernel": ROW},
    ),
    "filters, pooling, rows": (
        _channels(layers.ReLU, layers.MaxPooling2D, layers.GlobalAveragePooling2D),
        (8, 8, 3),
        {"one/kernel": FILTERS, "two/kernel": ROW},
    ),
    "filters, then a layer that needs the whole": (
        _channels(lambda: layers.GroupNormalization(1), layers.Flatten),
        (4, 4, 3),
        {"one/kernel": FILTERS, "two/kernel": ROW},
    ),
    "layer norm in a pair": (
        _normalized(layers.LayerNormalization),
        (4, 7),
        {**PAIR, "norm/(gamma|beta)": ("model",)},
    ),
    "layer norm in a pair, its weights whole": (
        _normalized(layers.LayerNormalization, center=False),
        (7,),
        PAIR,
    ),
    "layer norm of a dim that is whole": (
        _normalized(layers.LayerNormalization, axis=1),
        (4, 7),
        PAIR,
    ),
    "layer norm of several dims": (
        _normalized(layers.LayerNormalization, axis=[1, 2]),
        (4, 7),
        PAIR,
    ),
    "rms norm in a pair": (
        _normalized(layers.RMSNormalization),
        (4, 7),
        {**PAIR, "norm/scale": ("model",)},
    ),
    "rms norm of what each device has": (
        lambda: [
            layers.EinsumDense("abc,cde->abde", (None, 3, 4), name="one"),
            layers.RMSNormalization(name="norm"),
        ],
        (4, 7),
        {"one/kernel": (None, "model", None)},
    ),
    "batch norm in a pair": (
        _normalized(layers.BatchNormalization),
        (4, 7),
        {**PAIR, "norm/(gamma|beta)": ("model",)},
    ),
    "batch norm in a pair, synchronised": (
        _normalized(layers.BatchNormalization, synchronized=True, scale=False),
        (7,),
        PAIR,
    ),
    "batch norm with renorm": (_normalized(layers.BatchNormalization, renorm=True), (7,), PAIR),
    "transposed convolution by filters": (
        _conv(layers.Conv2DTranspose, strides=2, padding="same", activation="relu"),
        (4, 5, 3),
        {"one/kernel": CHANNELS, "one/bias": ("model",)},
    ),
    "transposed convolution by channels": (
        _conv(layers.Conv1DTranspose, strides=2, output_padding=1),
        (5, 3),
        {"one/kernel": FILTERS[1:]},
    ),
    "depthwise convolution in a pair": (
        lambda: [
            layers.Conv2D(5, 1, name="one"),
            layers.DepthwiseConv2D(3, padding="same", bias_initializer="normal", name="depth"),
            layers.Dense(3, name="two"),
        ],
        (6, 5, 3),
        {"one/kernel": FILTERS, "depth/kernel": CHANNELS, "depth/bias": ("model",)}
        | {"two/kernel": ROW},
    ),
    "depthwise convolution of two filters": (
        lambda: [layers.DepthwiseConv1D(3, depth_multiplier=2, name="one")],
        (6, 3),
        {"one/kernel": CHANNELS[1:]},
    ),
    "depthwise convolution, a dim that cannot be cut": (
        lambda: [layers.DepthwiseConv2D(3, depth_multiplier=2, name="one")],
        (6, 5, 3),
        {"one/kernel": FILTERS},
    ),
    "separable convolution by filters": (
        _conv(layers.SeparableConv2D, strides=2, activation="relu"),
        (8, 9, 3),
        {"one/pointwise_kernel": FILTERS},
    ),
    "separable convolution by channels": (
        _conv(layers.SeparableConv1D, depth_multiplier=2),
        (9, 3),
        {"one/(pointwise|depthwise)_kernel": CHANNELS[1:]},
    ),
    "an unknown layer, with a loop": (
        lambda: [layers.ConvLSTM1D(4, 2, name="one")],
        (5, 6, 3),
        {"one/.*kernel": (None, None, "model")},
    ),
}


def _outcome(make, data, strategy, policy="float32"):
    """Output and gradients, of weights and of the input, computed in a graph."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    x = tf.constant(data() if callable(data) else _images(*data))
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(make())
        model(x)

    @tf.function
    def step(x):
        def replica(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x, training=True)
                loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32)))
            sources = [v.value for v in model.trainable_variables]
            gradients = tape.gradient(loss, [*sources, *([x] if x.dtype.is_floating else [])])
            return y, [tf.convert_to_tensor(g) for g in gradients]

        return strategy.run(replica, (x,)) if strategy else replica(x)

    try:
        y, gradients = step(x)
    finally:
        keras.config.set_dtype_policy("float32")
    return [y.numpy(), *(g.numpy() for g in gradients)]


def _strategy(layouts, parts=2):
    return tfparallel.TensorParallelStrategy(
        layout_map(1, parts, {".*" + path: axes for path, axes in layouts.items()})
    )


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_one_device(name):
    make, data, layouts = CASES[name]
    strategy = _strategy(layouts, parts=3 if "einsum" in name else 2)
    expected, received = _outcome(make, data, None), _outcome(make, data, strategy)
    assert any(p.rows for p in strategy.extended.layouts.placements.values())
    assert len(expected) == len(received)
    for one_device, parts in zip(expected, received, strict=True):
        np.testing.assert_allclose(parts, one_device, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "name", ["column, activation, row", "layer norm in a pair", "rms norm in a pair"]
)
def test_in_mixed_precision_parts_are_multiplied_in_float16(name):
    make, data, layouts = CASES[name]
    received = _outcome(make, data, _strategy(layouts), "mixed_float16")
    expected = _outcome(make, data, None, "mixed_float16")
    assert received[0].dtype == "float16"
    for one_device, parts in zip(expected, received, strict=True):
        np.testing.assert_allclose(parts, one_device, rtol=2e-2, atol=2e-2)


def _doubling(group, layer, original, inputs):
    del original
    rows = group.rows(layer.scale)
    if rows is None:
        return NotImplemented
    parts = group.parts(inputs, tfparallel.tensor_parallel.Rows(1, rows.sizes))
    _doubling.calls += 1
    return group.joined(group.compute(lambda x, s: x * s, parts, group.read(layer.scale)), 1)


_doubling.calls = 0


class Scale(keras.layers.Layer):
    """A user's layer: a factor for each feature."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="normal", name="scale")

    def call(self, inputs):
        return inputs * self.scale


class ScaleOfAnotherKind(Scale):
    """Overrides what the rule stands for."""

    def call(self, inputs):
        return inputs + self.scale


def test_a_rule_of_a_user_computes_a_layer_of_a_user():
    tfparallel.tensor_parallel.layer_rule(Scale)(_doubling)

    def make():
        return [Scale(name="one")]

    expected = _outcome(make, (7,), None)
    received = _outcome(make, (7,), _strategy({"one/scale": ("model",)}))
    assert _doubling.calls > 0
    for one_device, parts in zip(expected, received, strict=True):
        np.testing.assert_allclose(parts, one_device, rtol=1e-6)


def test_a_rule_is_not_used_for_a_subclass_that_computes_something_else():
    tfparallel.tensor_parallel.layer_rule(Scale)(_doubling)

    def make():
        return [ScaleOfAnotherKind(name="one")]

    expected = _outcome(make, (7,), None)
    received = _outcome(make, (7,), _strategy({"one/scale": ("model",)}))
    np.testing.assert_allclose(received[0], expected[0], rtol=1e-6)


class StandardizedConv(layers.Conv2D):
    """Overrides what the `call` that a rule stands for asks for."""

    def convolution_op(self, inputs, kernel):
        mean, variance = keras.ops.moments(kernel, axes=[0, 1, 2, 3], keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / keras.ops.sqrt(variance + 1e-6))


class StandardizedConv1D(layers.Conv1D):
    convolution_op = StandardizedConv.convolution_op  # for which its `call` does not ask


class NormalizedDense(layers.Dense):
    @property
    def kernel(self):
        kernel = super().kernel
        return kernel / keras.ops.norm(kernel)


class NormOfOwnMoments(layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return keras.ops.mean(mean) + 0 * mean, variance


class OwnAttentionMask(layers.MultiHeadAttention):
    def _compute_attention_mask(self, query, *args, **kwargs):
        distance = keras.ops.arange(5)[:, None] - keras.ops.arange(5)
        return keras.ops.abs(distance)[None] < 2


def _self_attention(shape=(5, 6)):
    inputs = keras.Input(shape)
    attention = OwnAttentionMask(2, 3, name="one")
    return [keras.Model(inputs, attention(inputs, inputs))]


@pytest.mark.parametrize(
    ("make", "shape", "layouts"),
    [
        (lambda: [StandardizedConv(5, 3, name="one")], (8, 8, 3), {"one/kernel": FILTERS}),
        (lambda: [StandardizedConv(5, 3, name="one")], (8, 8, 3), {"one/kernel": CHANNELS}),
        (lambda: [StandardizedConv1D(5, 3, name="one")], (8, 3), {"one/kernel": FILTERS[1:]}),
        (lambda: [NormalizedDense(5, name="one")], (7,), {"one/kernel": COLUMN}),
        (
            lambda: [layers.Dense(6, name="one"), NormOfOwnMoments(name="norm")],
            (7,),
            {"one/kernel": COLUMN, "norm/gamma": ("model",)},
        ),
        (
            _self_attention,
            (5, 6),
            {
                "one/(query|key|value)/kernel": (None, "model", None),
                "one/attention_output/kernel": ("model", None, None),
            },
        ),
    ],
)
def test_a_rule_is_not_used_where_a_subclass_overrides_what_it_calls(make, shape, layouts):
    expected = _outcome(make, shape, None)
    received = _outcome(make, shape, _strategy(layouts))
    for one_device, parts in zip(expected, received, strict=True):
        np.testing.assert_allclose(parts, one_device, rtol=1e-4, atol=1e-5)


def _with_watched_output(strategy):
    """The gradient for an output in parts, which another layer takes as parts (Grad-CAM)."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        one, two = layers.Dense(6, name="one"), layers.Dense(3, name="two")
        model = keras.Sequential([keras.Input((7,)), one, two])
    x = tf.constant(_images(7))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = one(x)
            loss = tf.reduce_sum(tf.sin(two(hidden))) + tf.reduce_sum(hidden**2)
        return tape.gradient(loss, hidden)

    assert model.built
    return step(x).numpy()


def test_a_tape_sees_an_output_in_parts_as_any_other():
    strategy = _strategy({"one/kernel": COLUMN, "two/kernel": ROW})
    np.testing.assert_allclose(
        _with_watched_output(strategy), _with_watched_output(None), rtol=1e-5, atol=1e-5
    )


def _gradient_penalty(strategy):
    """Gradients of the norm of a gradient, as of a WGAN-GP's critic."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [keras.Input((7,)), layers.Dense(6, "tanh", name="one"), layers.Dense(1, name="two")]
        )

    @tf.function
    def step(x):
        def replica(x):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = model(x)
                penalty = tf.reduce_sum(inner.gradient(y, x) ** 2)
            return outer.gradient(penalty, [v.value for v in model.trainable_variables[:1]])

        return strategy.run(replica, (x,)) if strategy else replica(x)

    return [g.numpy() for g in step(tf.constant(_images(7)))]


def test_gradients_of_gradients_are_those_of_one_device():
    strategy = _strategy({"one/kernel": COLUMN, "two/kernel": ROW})
    received, expected = _gradient_penalty(strategy), _gradient_penalty(None)
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
