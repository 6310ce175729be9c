r"""Predict clicks with a wide Embedding table on parameter servers.

    tfparallel launch --standalone --workers 2 --ps 2 examples/parameter_server.py
    tfparallel launch --standalone --workers 2 --ps 2 examples/parameter_server.py --mode sync

With an evaluator, which follows the checkpoints:

    tfparallel launch --standalone --workers 2 --ps 2 --evaluator \
        examples/parameter_server.py --checkpoints /tmp/click

One device, to compare with:

    python examples/parameter_server.py --one_device

Several hosts: the same command on each, with this host's place in TF_CONFIG, and a firewall or a
private network around all of them:

    TF_CONFIG='{"cluster": {"chief": ["10.0.0.1:2222"], "ps": ["10.0.0.2:2222"],
                            "worker": ["10.0.0.3:2222", "10.0.0.4:2222"]},
                "task": {"type": "worker", "index": 0}}' \
    python examples/parameter_server.py --insecure_network

The task is made of Python's own standard library, so that nothing is downloaded. An example is a
word of the source and the three before it, each hashed into the rows of a large table; the label
says whether the word is followed by "(", as a call is. That is what click models look like: a few
sparse features, most of them rare, and one bit to predict.
"""

import contextlib
import sysconfig
import tokenize
import zlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import tfparallel
from tfparallel.parameter_server import (
    CheckpointsForEvaluator,
    evaluate_checkpoints,
    is_evaluator,
)

FLAGS = flags.FLAGS
flags.DEFINE_enum("mode", "async", ["async", "sync"], "How workers share the work.")
flags.DEFINE_integer("max_staleness", None, "At most so many updates between reading and applying.")
flags.DEFINE_integer("table_rows", 200_000, "Rows of the embedding table.")
flags.DEFINE_integer("epochs", 2, "How often to see all examples.")
flags.DEFINE_bool("one_device", False, "Train without a strategy.")
flags.DEFINE_string("checkpoints", None, "Where the chief writes for the evaluator.")
flags.DEFINE_string("backup", None, "Where to keep a backup, from which the same command resumes.")
flags.DEFINE_bool("insecure_network", False, "Allow addresses that other machines can reach.")

NUM_FEATURES = 4


def main(_):
    """Train, test and report; workers and parameter servers stay in the strategy's constructor."""
    tf.get_logger().setLevel("WARNING")  # no line for each reduction that is set up
    logging.set_verbosity(logging.WARNING)
    scope = contextlib.nullcontext()
    if not FLAGS.one_device:
        strategy = tfparallel.ParameterServerStrategy(
            mode=FLAGS.mode,
            max_staleness=FLAGS.max_staleness,
            insecure_network=FLAGS.insecure_network,
        )
        scope = strategy.scope()

    keras.utils.set_random_seed(0)
    features, labels = click_examples(FLAGS.table_rows)
    num_train = len(features) * 4 // 5
    with scope:
        model = build_model(FLAGS.table_rows)
        model.compile(
            optimizer=keras.optimizers.Adam(0.002),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
        )
    test = {"y": labels[num_train:], "batch_size": 2048}
    if is_evaluator():
        for line in evaluate_checkpoints(model, features[num_train:], FLAGS.checkpoints, **test):
            print(f"step {line['step']}: test loss {line['loss']:.4f}, AUC {line['auc']:.4f}")
        return

    callbacks = [tfparallel.callbacks.Measure(verbose=1)]
    if FLAGS.checkpoints:
        callbacks.append(CheckpointsForEvaluator(FLAGS.checkpoints, keep=5))
    if FLAGS.backup:
        callbacks.append(tfparallel.callbacks.BackupAndRestore(FLAGS.backup))
    model.fit(
        features[:num_train],
        labels[:num_train],
        batch_size=512,
        epochs=FLAGS.epochs,
        callbacks=callbacks,
        verbose=2,
    )
    result = model.evaluate(features[num_train:], return_dict=True, verbose=0, **test)
    print(f"test loss {result['loss']:.4f}, AUC {result['auc']:.4f}")


def build_model(table_rows: int) -> keras.Model:
    """A logistic regression on hashed features, and a small network on their embeddings."""
    ids = keras.Input((NUM_FEATURES,), dtype="int32")
    wide = keras.layers.Embedding(table_rows, 1, name="wide")(ids)
    deep = keras.layers.Embedding(table_rows, 8, name="deep")(ids)
    deep = keras.layers.Dense(32, activation="relu")(keras.layers.Flatten()(deep))
    logits = keras.layers.Dense(1)(deep) + keras.ops.sum(wide, axis=1)
    return keras.Model(ids, logits)


def click_examples(table_rows: int, num_files: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Return features `[examples, 4]` and labels `[examples, 1]`, in a fixed random order."""
    features, labels = [], []
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py"))[:num_files]:
        with tokenize.open(path) as file:
            tokens = [t for t in tokenize.generate_tokens(file.readline) if t.string.strip()]
        words = [token.string for token in tokens]
        for i in range(3, len(words) - 1):
            if tokens[i].type == tokenize.NAME:
                crossed = [words[i], *(f"{back} {words[i - back]}" for back in (1, 2, 3))]
                features.append([zlib.crc32(each.encode()) % table_rows for each in crossed])
                labels.append([words[i + 1] == "("])
    order = np.random.default_rng(0).permutation(len(features))
    return np.array(features, "int32")[order], np.array(labels, "float32")[order]


if __name__ == "__main__":
    app.run(main)
