"""Several ranks in one process: a thread for each, that meet in every collective."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from tfparallel.internals import ResourceVariable

TIMEOUT_S = 120.0


class Meeting:
    """Where the threads exchange arrays; it notes what each collective sent."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks)
        self._arrays: list = [None] * num_ranks
        self.sent: list[tuple[str, int]] = []  # by rank 0: kind, bytes of its payload

    def exchange(self, rank: int, kind: str, arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
        if rank == 0:
            self.sent.append((kind, sum(array.nbytes for array in arrays)))
        self._arrays[rank] = (kind, arrays)
        self._barrier.wait(TIMEOUT_S)
        met = list(self._arrays)
        self._barrier.wait(TIMEOUT_S)
        assert {k for k, _ in met} == {kind}, "ranks are in different collectives"
        return [arrays for _, arrays in met]

    def bytes_sent(self, kind: str) -> int:
        return sum(size for each, size in self.sent if each == kind)

    def run(self, function) -> list:
        """What `function(transport)` returns on every rank."""
        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [
                pool.submit(function, ThreadTransport(r, self)) for r in range(self.num_ranks)
            ]
            return [future.result(TIMEOUT_S) for future in futures]


class ThreadTransport:
    """One rank's side of a `Meeting`; usable eagerly and in a `tf.function`."""

    def __init__(self, rank: int, meeting: Meeting):
        self.rank, self.world_size = rank, meeting.num_ranks
        self._meeting = meeting
        # TensorFlow keeps operations on one resource in the program's order, in branches too.
        self._order = ResourceVariable(0.0)

    def all_reduce_sum(self, tensors):
        return self._collective("sum", tensors, lambda parts: np.sum(parts, 0, parts[0].dtype))

    def all_gather(self, tensors):
        assert all(tensor.dtype == tf.uint8 for tensor in tensors)
        shapes = [[self.world_size, *tensor.shape] for tensor in tensors]
        return self._collective("gather", tensors, np.stack, shapes)

    def all_gather_rows(self, tensor):
        shapes = [[None, *tensor.shape[1:]]]
        return self._collective("rows", [tensor], np.concatenate, shapes)[0]

    def _collective(self, kind, tensors, combine, shapes=None):
        def meet(*arrays):
            met = self._meeting.exchange(self.rank, kind, list(arrays))
            return [combine([part[i] for part in met]) for i in range(len(arrays))]

        dtypes = [tensor.dtype for tensor in tensors]
        with tf.control_dependencies([self._order.assign_add(1.0)]):
            results = tf.nest.flatten(tf.numpy_function(meet, tensors, dtypes))
        with tf.control_dependencies(results):
            self._order.assign_add(1.0)
        for result, shape in zip(results, shapes or [t.shape for t in tensors], strict=True):
            result.set_shape(shape)
        return list(results)


class Gradients:
    """Random gradients of variables of given shapes, different by rank and step.

    Attributes:
        variables: what `GradientCompression` wants of variables.
    """

    def __init__(self, shapes, num_ranks: int):
        self._shapes, self._num_ranks = shapes, num_ranks
        names = [f"layer_{i}/kernel" for i in range(len(shapes))]
        self.variables = [Variable(n, s) for n, s in zip(names, shapes, strict=True)]

    def of(self, rank: int, step: int) -> list[tf.Tensor]:
        rng = np.random.default_rng([rank, step])
        return [tf.constant(rng.normal(size=shape), tf.float32) for shape in self._shapes]

    def total(self, i: int, steps) -> np.ndarray:
        """Of one variable, over all ranks and some steps, float64."""
        parts = [self.of(rank, step)[i] for rank in range(self._num_ranks) for step in steps]
        return np.sum(np.asarray(parts, "float64"), 0)


class Variable:
    def __init__(self, path: str, shape):
        self.path, self.shape = path, tf.TensorShape(shape)
