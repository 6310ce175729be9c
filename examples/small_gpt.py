"""What the examples of a GPT share: the model, and the source of Python's standard library as text.

The model is a decoder of characters (Radford et al. 2018, "Improving language understanding by
generative pre-training").
"""

import sysconfig
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 300, "Batches to train on.")
flags.DEFINE_integer("batch_size", 32, "Rows of a batch.")
flags.DEFINE_bool("quick", False, "A smaller model, and 20 steps.")

CHARACTERS = 128  # ASCII
CONTEXT = 64  # characters that the model sees


def compiled_gpt() -> keras.Model:
    """The model that is trained, of the size that `--quick` says; called in a strategy's scope."""
    model = build_gpt(*((32, 2) if FLAGS.quick else (96, 4)))
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def training_data() -> tuple[np.ndarray, np.ndarray]:
    """As many batches as `--steps` says: pieces of text, and the same one character further."""
    steps = 20 if FLAGS.quick else FLAGS.steps
    return windows(standard_library(), steps * FLAGS.batch_size)


def open_cpus(count: int) -> str:
    """Opens so many logical CPUs where there is no GPU; "GPU", or "CPU"."""
    if tf.config.list_physical_devices("GPU"):
        return "GPU"
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(cpu, logical)
    return "CPU"


class Embed(layers.Layer):
    """Characters and their positions as vectors."""

    def __init__(self, width: int, **kwargs: object):
        super().__init__(**kwargs)
        self.characters = layers.Embedding(CHARACTERS, width)
        self.positions = layers.Embedding(CONTEXT, width)

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        """`[rows, CONTEXT]` ints to `[rows, CONTEXT, width]`."""
        return self.characters(tokens) + self.positions(keras.ops.arange(CONTEXT))


class Block(layers.Layer):
    """Attention to what came before, then a perceptron, each beside a skip connection."""

    def __init__(self, width: int, **kwargs: object):
        super().__init__(**kwargs)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(4, width // 4, name="attention")
        self.widen = layers.Dense(4 * width, activation="gelu", name="widen")
        self.narrow = layers.Dense(width, name="narrow")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """`[rows, CONTEXT, width]` to the same."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        return x + self.narrow(self.widen(self.norms[1](x)))


def build_gpt(width: int, num_blocks: int) -> keras.Model:
    """A decoder: `[rows, CONTEXT]` characters to scores `[rows, CONTEXT, CHARACTERS]`."""
    tokens = keras.Input((CONTEXT,), dtype="int32")
    x = Embed(width, name="embed")(tokens)
    for i in range(num_blocks):
        x = Block(width, name=f"block_{i}")(x)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(CHARACTERS, name="scores")(x), name="gpt")


def standard_library() -> np.ndarray:
    """The ASCII characters of the standard library's modules, as one array of ints."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    characters = np.frombuffer(text, np.uint8)
    return characters[characters < CHARACTERS]


def windows(text: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` random pieces of CONTEXT characters, and the same one character further."""
    starts = np.random.default_rng(0).integers(0, len(text) - CONTEXT - 1, count)
    pieces = text[starts[:, None] + np.arange(CONTEXT + 1)].astype("int32")
    return pieces[:, :-1], pieces[:, 1:]
