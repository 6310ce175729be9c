"""Programs as keras.io writes them, tiny: padding that masks leave out, two outputs or optimizers.

In float64, where nothing is left of rounding.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance.case import Run, case
from tests.conformance.cases.keras_io import batches, fit, normal, update
from tests.helpers import ODD_BATCH, ODD_ROWS, in_float64

WORDS, LENGTH, SIZE = 13, 6, 4
ATOL = 1e-9


def sentences(rows: int = ODD_ROWS, seed: int = 0) -> np.ndarray:
    """Words from 1, then padding of 0: of one to all words."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, (rows, 1))
    return np.where(np.arange(LENGTH) < lengths, rng.integers(1, WORDS, (rows, LENGTH)), 0)


def scores() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Embedded(layers.Layer):
    """Words and their positions; its mask is that of the words."""

    def __init__(self, **options):
        super().__init__(**options)
        self.words = layers.Embedding(WORDS, SIZE, mask_zero=True)
        self.positions = layers.Embedding(LENGTH, SIZE)
        self.supports_masking = True

    def call(self, x):
        return self.words(x) + self.positions(ops.arange(ops.shape(x)[-1]))

    def compute_mask(self, inputs, mask=None):
        return self.words.compute_mask(inputs)


class Encoder(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(2, SIZE)
        self.feed_forward = keras.Sequential([layers.Dense(5, "relu"), layers.Dense(SIZE)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.supports_masking = True

    def call(self, x, mask=None):
        padding = None if mask is None else ops.cast(mask[:, None, :], "int32")
        x = self.norms[0](x + self.attention(x, x, attention_mask=padding))
        return self.norms[1](x + self.feed_forward(x))


class Decoder(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.own, self.of_source = (layers.MultiHeadAttention(2, SIZE) for _ in range(2))
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.supports_masking = True

    def call(self, inputs, mask=None):
        target, source = inputs
        target_mask, source_mask = (None, None) if mask is None else mask
        target = self.norms[0](
            target + self.own(target, target, use_causal_mask=True, query_mask=target_mask)
        )
        attended = self.of_source(target, source, query_mask=target_mask, key_mask=source_mask)
        return self.norms[1](target + attended)


class MaskedLanguageModel(keras.Model):
    """Sample weights say which words are to be found: BERT's loss is over those."""

    def train_step(self, data):
        tokens, words, weights = data
        with tf.GradientTape() as tape:
            found = self(tokens, training=True)
            loss = self.compute_loss(y=words, y_pred=found, sample_weight=weights)
        update(self.optimizer, tape, loss, self.trainable_variables)
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result()}


@case(long=True, atol=ATOL)
def masked_language_model(run: Run):
    """With token types, and words hidden where the padding is not."""

    def build():
        words, types = (keras.Input((LENGTH,), dtype="int32", name=x) for x in ("words", "types"))
        of_types = layers.Embedding(2, SIZE)(types)
        x = layers.LayerNormalization()(layers.Add()([Embedded()(words), of_types]))
        x = layers.Dense(WORDS)(Encoder()(Encoder()(x)))
        model = MaskedLanguageModel({"words": words, "types": types}, x)
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss=scores())
        return model

    words = sentences()
    is_hidden = np.random.default_rng(1).random(words.shape) < 0.4
    hidden = np.where(is_hidden & (words > 0), 1, words)
    tokens = {"words": hidden, "types": (np.arange(LENGTH) > 2) * np.ones_like(words)}
    weights = np.maximum(is_hidden & (words > 0), 0.125)  # no row without any
    with in_float64():
        return fit(run, build, batches((tokens, words, weights)))


@case(long=True, atol=ATOL)
def translation(run: Run):
    """An encoder, and a decoder that is given what comes before each word; padding is masked."""

    def build():
        source, target = (keras.Input((LENGTH,), dtype="int32", name=x) for x in ("from", "to"))
        encoded = Encoder()(Embedded()(source))
        decoded = Decoder()([Embedded()(target), encoded])
        found = layers.Dense(WORDS)(layers.Dropout(0.0)(decoded))
        model = keras.Model({"from": source, "to": target}, found)
        model.compile("rmsprop", scores(), weighted_metrics=["accuracy"])
        return model

    source, target = sentences(), sentences(seed=1)
    data = {"from": source, "to": target}, np.roll(target, -1, axis=1)
    with in_float64():
        return fit(run, build, batches(data), validation_data=batches(data).take(1))


@case(long=True, atol=ATOL)
def miniature_gpt(run: Run):
    """Two outputs, of which one has no loss; a causal mask beside that of the padding."""

    class Block(Encoder):
        def call(self, x):
            x = self.norms[0](x + self.attention(x, x, use_causal_mask=True))
            return self.norms[1](x + self.feed_forward(x))

    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = Block(name="block")(Embedded(name="embedded")(inputs))
        model = keras.Model(inputs, [layers.Dense(WORDS, name="words")(x), x])
        model.compile(keras.optimizers.Adam(0.01), loss=[scores(), None])
        return model

    words = sentences()
    data = tf.data.Dataset.from_tensor_slices(words).batch(ODD_BATCH)
    with in_float64():
        return fit(run, build, data.map(lambda x: (x, tf.roll(x, -1, axis=1))))


@case(long=True, atol=ATOL)
def padded_series(run: Run):
    """Steps without a value are masked: two recurrent layers, and a mean of the others."""

    def build():
        inputs = keras.Input((LENGTH, 3))
        x = layers.Masking(-1.0)(inputs)
        x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
        x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
        model = keras.Model(inputs, layers.Dense(1)(layers.Dense(5, "tanh")(x)))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "huber", metrics=["mae"])
        return model

    series = np.where(sentences()[..., None] > 0, normal(ODD_ROWS, LENGTH, 3), -1.0)
    with in_float64():
        return fit(run, build, batches((series, normal(ODD_ROWS, 1, seed=4))))


class WideAndDeep(keras.Model):
    """Crossed categories beside a network, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.wide, self.pool = layers.Dense(1), layers.GlobalAveragePooling1D()
        self.embedding = layers.Embedding(WORDS, SIZE)
        self.deep = keras.Sequential([layers.Dense(5, "relu"), layers.Dense(1)])

    def compile(self, wide_optimizer, deep_optimizer, **options):
        super().compile(**options)
        self.wide_optimizer, self.deep_optimizer = wide_optimizer, deep_optimizer

    def call(self, inputs):
        pooled = self.pool(self.embedding(inputs["words"]))
        return self.wide(inputs["crossed"]) + self.deep(pooled)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        deep = [*self.embedding.trainable_weights, *self.deep.trainable_weights]
        update(self.wide_optimizer, tape, loss, self.wide.trainable_weights)
        update(self.deep_optimizer, tape, loss, deep)
        self.metrics[0].update_state(loss)
        return {"loss": self.metrics[0].result()}


@case(long=True, atol=ATOL)
def wide_and_deep(run: Run):
    def build():
        model = WideAndDeep()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Ftrl(0.1), keras.optimizers.Adagrad(0.1), loss=loss)
        return model

    words = sentences()
    crossed = np.eye(7)[(words[:, 0] * 5 + words[:, 1]) % 7]
    data = {"words": words, "crossed": crossed}, (words.sum(axis=1, keepdims=True) % 2)
    with in_float64():
        return fit(run, build, batches(data))
