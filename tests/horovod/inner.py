"""Ranks that each train with a pipeline of two devices.

`horovodrun -np 4 python -m tests.horovod.inner`: each compares what it ends with to one device, in
float64.
"""

import keras

import tfparallel
from tests.helpers import assert_same_training, in_float64, open_logical_cpus, tiny_data, train
from tests.hybrid.models_of_matrix import plain


def main() -> None:
    open_logical_cpus(2)
    options = {"build": plain, "data": tiny_data, "rows": 26, "batch_size": 13, "optimizer": _adam}
    with in_float64():
        inner = tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2)
        strategy = tfparallel.HorovodStrategy(inner=inner)
        candidate = train(strategy, **options)
        keras.backend.clear_session()
        assert_same_training(train(None, **options), candidate, atol=1e-9)
    print("same as one device:", strategy.rank, strategy.world_size, flush=True)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


if __name__ == "__main__":
    main()
