"""What meshes are built for: a GPT, a U-Net with long skips, an Inception block."""

import keras
import numpy as np
from keras import layers


def gpt():
    tokens = keras.Input((6,), dtype="int32")
    positions = keras.ops.arange(6)[None] + 0 * tokens
    x = layers.Embedding(11, 8, name="embedding")(tokens)
    x = layers.Add()([x, layers.Embedding(6, 8, name="positions")(positions)])
    for i in range(2):
        y = layers.LayerNormalization(name=f"norm_{i}a")(x)
        attention = layers.MultiHeadAttention(2, 4, use_bias=False, name=f"attention_{i}")
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"norm_{i}b")(x)
        y = layers.Dense(16, "gelu", name=f"dense_{2 * i}")(y)
        x = layers.Add()([x, layers.Dense(8, name=f"dense_{2 * i + 1}")(y)])
    return keras.Model(tokens, layers.Dense(11, name="scores")(layers.LayerNormalization()(x)))


def text(rows):
    tokens = np.random.default_rng(0).integers(0, 11, (rows, 7))
    return tokens[:, :-1], tokens[:, 1:]


def unet():
    """The first layers' output is needed by the last stage."""

    def convolved(x, filters, name):
        return layers.Conv2D(filters, 3, padding="same", activation="tanh", name=name)(x)

    x = keras.Input((8, 8, 2))
    first = convolved(x, 4, "conv2d_0")
    second = convolved(layers.MaxPooling2D()(first), 6, "conv2d_1")
    lowest = convolved(layers.MaxPooling2D()(second), 8, "conv2d_2")
    up = layers.Concatenate()([layers.UpSampling2D()(lowest), second])
    up = convolved(up, 6, "conv2d_3")
    up = layers.Concatenate()([layers.UpSampling2D()(up), first])
    return keras.Model(x, layers.Conv2D(3, 1, name="conv2d_4")(convolved(up, 4, "conv2d_5")))


def images(rows):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 8, 8, 2)).astype("float32"), random.integers(
        0, 3, (rows, 8, 8)
    )


def inception():
    """Branches of one, two and two layers."""

    def convolved(x, size, name):
        return layers.Conv2D(4, size, padding="same", activation="tanh", name=name)(x)

    x = keras.Input((6, 6, 2))
    stem = convolved(x, 3, "stem")
    wide = convolved(convolved(stem, 1, "wide_1"), 3, "wide_2")
    wider = convolved(convolved(stem, 1, "wider_1"), 5, "wider_2")
    joined = layers.Concatenate(name="joined")([convolved(stem, 1, "narrow"), wide, wider])
    pooled = layers.GlobalAveragePooling2D(name="pooled")(joined)
    return keras.Model(x, layers.Dense(3, name="scores")(pooled))


def small_images(rows):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 6, 6, 2)).astype("float32"), random.integers(0, 3, rows)


MODELS = {
    "gpt": {"build": gpt, "data": text},
    "unet": {"build": unet, "data": images},
    "inception": {"build": inception, "data": small_images},
}
