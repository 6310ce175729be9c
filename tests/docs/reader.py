"""What the reader of a page has: a model under a strategy, data, and the usual imports."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfparallel
from tests.docs.snippets import ROOT, Snippet

UNTOUCHED = "a process in which TensorFlow has not started"

X = np.random.default_rng(0).normal(size=(128, 32)).astype("float32")
Y = np.random.default_rng(1).integers(0, 10, 128)


def build_model() -> keras.Model:
    """Four layers, so that a pipeline of four stages has one each."""
    hidden = [keras.layers.Dense(10, activation="tanh") for _ in range(3)]
    last = keras.layers.Dense(10, activation="softmax")
    return keras.Sequential([keras.Input((32,)), *hidden, last])


def make_model() -> keras.Model:
    """The same, compiled."""
    model = build_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


class Scale(keras.layers.Layer):
    """A layer of the reader's own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], name="scale")

    def call(self, x):
        return x * self.scale


class MyLoss(keras.losses.Loss):
    """A loss of the reader's own."""

    def call(self, y_true, y_pred):
        return keras.ops.sum(keras.ops.square(y_true - y_pred))


def my_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A row of `files`."""
    row = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), (33,))
    return row[1:], tf.cast(row[0], tf.int64)


def write_files(folder: Path) -> list[str]:
    """The data, in two TFRecord files."""
    paths = [str(folder / f"{part}.tfrecord") for part in range(2)]
    for part, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for x, y in zip(X[part::2], Y[part::2], strict=True):
                row = np.concatenate([[y], x]).astype("float32")
                writer.write(tf.io.serialize_tensor(row).numpy())
    return paths


def names_of_pages() -> dict[str, Any]:
    """What pages take for granted, without starting TensorFlow."""
    return {
        "MyLoss": MyLoss,
        "Scale": Scale,
        "build_model": build_model,
        "images": X[:32],
        "json": json,
        "keras": keras,
        "labels": Y[:32],
        "layers": keras.layers,
        "load_all_data": lambda: (X, Y),
        "make_model": make_model,
        "my_loss": my_loss,
        "np": np,
        "ops": keras.ops,
        "os": os,
        "others": [],
        "parse": parse,
        "tf": tf,
        "tfparallel": tfparallel,
        "x": X,
        "y": Y,
    }


def with_a_model(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """The same, and a model that is made under `strategy`."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        hidden = keras.layers.Dense(10, "tanh")  # a stage of two
        model = keras.Sequential([keras.Input((32,)), hidden, keras.layers.Dense(10)])
        model.compile("adam", loss, metrics=["accuracy"])
    return {
        **names_of_pages(),
        "dataset": tf.data.Dataset.from_tensor_slices((X, Y)).batch(64),
        "loss_function": loss,
        "model": model,
        "optimizer": model.optimizer,
        "strategy": strategy,
    }


def run_snippet(snippet: Snippet) -> None:
    """Runs it in the current folder, as a reader who has what it needs.

    Where that is nothing in particular: a strategy of two devices.
    """
    match snippet.needs:
        case needs if needs == UNTOUCHED:
            names = names_of_pages()
        case "a pipeline":
            stages = ["CPU:0", "CPU:1"]
            names = with_a_model(tfparallel.PipelineStrategy(stages, num_microbatches=2))
        case _:
            names = with_a_model(tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]))
    match snippet.needs:
        case "files of yours":
            names["files"] = write_files(Path.cwd())
        case "a file of weights":
            build_model().save_weights("model.weights.h5")
        case "the folder configs of a checkout":
            Path("configs").symlink_to(ROOT / "configs")
    run = _compiled(snippet, names)
    if snippet.needs == "a step that runs on replicas":
        names |= {"y_pred": tf.ones((8, 10)), "labels": tf.zeros(8, tf.int32)}
        names["strategy"].run(tf.autograph.experimental.do_not_convert(run))
    else:
        run()


def _compiled(snippet: Snippet, names: dict[str, Any]) -> Callable[[], None]:
    # A laptop has no GPU: its logical CPUs stand for them. And it has no disk of that name.
    text = re.sub("(?i)gpu:", "CPU:", snippet.code).replace("/mnt/disk/", "")
    code = compile(text, snippet.name, "exec")
    return lambda: exec(code, names)
