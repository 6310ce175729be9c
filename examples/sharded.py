"""A model whose weights and Adam slots are in parts, one on each of four logical CPUs.

    python examples/sharded.py                       # four devices of one process
    python examples/sharded.py --shard optimizer     # whole weights, slots in parts

On several hosts set TF_CONFIG on each and run the same command: all devices of all workers share.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TFPARALLEL_LOGICAL_CPUS", "4")

import keras
import numpy as np

import tfparallel


def main() -> None:
    """Trains, then prints what each replica of this process stores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", default="parameters")
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()

    strategy = tfparallel.ShardedStrategy(shard=options.shard)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(options.width, activation="gelu") for _ in range(4)]
        model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])

    rng = np.random.default_rng(0)
    x = rng.normal(size=(2048, 64)).astype("float32")
    print(strategy.summary(model, x[:128]))
    y = np.argmax(x[:, :10], axis=1)
    measure = tfparallel.callbacks.Measure(verbose=1)
    model.fit(x, y, batch_size=128, epochs=2, verbose=2, callbacks=[measure])

    variables = [*model.variables, *model.optimizer.variables]
    whole = sum(np.prod(v.shape) * 4 for v in variables)
    for replica in range(len(strategy.extended.worker_devices)):
        parts = [v.value.values[replica] for v in variables]
        stored = sum(np.prod(part.shape) * 4 for part in parts)
        print(f"replica {replica} stores {stored / 1e6:.2f} MB of {whole / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
