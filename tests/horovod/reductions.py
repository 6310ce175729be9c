"""Training under MPI, by the ring and by Adasum.

`horovodrun --mpi -np 4 python -m tests.horovod.reductions FOLDER`
"""

import sys

import keras
import numpy as np

import tfparallel
from tests.helpers import tiny_compile_options, tiny_data, tiny_model

BATCH, ROWS = 8, 24
LEARNING_RATE = 0.1


def compiled_model():
    """The model of every run."""
    keras.utils.set_random_seed(1)
    model = tiny_model()
    model.compile(keras.optimizers.SGD(LEARNING_RATE), **tiny_compile_options())
    return model


def fit(model):
    """The weights after three steps."""
    x, y = tiny_data(ROWS)
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return model.get_weights()


def main(folder):
    for reduction in ("ring", "adasum"):
        strategy = tfparallel.HorovodStrategy(reduction=reduction)
        with strategy.scope():
            model = compiled_model()
        np.savez(f"{folder}/{reduction}-{strategy.rank}.npz", *fit(model))
    try:
        tfparallel.HorovodStrategy(reduction="hierarchical")
    except ValueError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
