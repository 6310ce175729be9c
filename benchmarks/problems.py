"""The models that are timed, described once for TensorFlow and torch, with their data.

Both frameworks name their layers alike, so that one file of initial weights serves all contestants:
the dense kernel that Keras calls `dense_0/kernel` is torch's `dense_0.weight`, transposed.
"""

from dataclasses import dataclass

import numpy as np

NUM_CLASSES = 10
LEARNING_RATE = 0.01
MOMENTUM = 0.9
COMPARED_STEPS = 8  # from the same weights, before anything is timed
NUM_BATCHES = 4  # different batches, repeated for as long as steps are asked for


@dataclass(frozen=True)
class Problem:
    """One model and its batch.

    Attributes:
        input_shape: of one example, channels last.
        global_batch: rows of one step over all replicas.
        steps: timed steps in one turn of a contestant.
        dense_widths: hidden widths of an MLP, or empty.
        block_filters: filters of each residual block of a ResNet, or empty. A block whose filters
            differ from those before it halves the resolution.
    """

    name: str
    input_shape: tuple[int, ...]
    global_batch: int
    steps: int
    dense_widths: tuple[int, ...] = ()
    block_filters: tuple[int, ...] = ()

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """`NUM_BATCHES` pairs: features `[global_batch, *input_shape]`, labels `[global_batch]`."""
        rng = np.random.default_rng(0)
        shape = (self.global_batch, *self.input_shape)
        return [
            (
                rng.normal(size=shape).astype("float32"),
                rng.integers(0, NUM_CLASSES, self.global_batch).astype("int32"),
            )
            for _ in range(NUM_BATCHES)
        ]


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem("mlp", (32,), global_batch=64, steps=60, dense_widths=(64, 64)),
        # 1024*2048 + 2048*2048 + 2048*2048 + 2048*10 = 10.5 M parameters, 42 MB of gradients
        Problem("mlp10m", (1024,), global_batch=64, steps=12, dense_widths=(2048, 2048, 2048)),
        # 75 k parameters in 7 convolutions + 2 projections: time is compute
        Problem("resnet", (32, 32, 3), global_batch=32, steps=20, block_filters=(16, 32, 64)),
    )
}


def joined(batches) -> tuple[np.ndarray, np.ndarray]:
    """All features and all labels of a list of batches."""
    xs, ys = zip(*batches, strict=True)
    return np.concatenate(xs), np.concatenate(ys)


def rows_of_worker(array, rank: int, num_workers: int):
    """The contiguous rows of one worker, the ones that tfparallel and tf.distribute give it."""
    rows = len(array) // num_workers
    return array[rank * rows : (rank + 1) * rows]
