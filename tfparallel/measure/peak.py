"""How many floating-point operations devices do in a second at best: of one large product."""

import time
from collections.abc import Sequence

import tensorflow as tf

_SIZE = 1024  # of the matrices: large enough that nothing but multiplying is seen
_AT_LEAST_S = 0.2
_MOST_ROUNDS = 64


def measured_flops_per_s(devices: Sequence[str], dtype: str = "float32") -> float:
    """Of all devices together, each of which multiplies two square matrices: the best of rounds.

    Args:
        devices: that compute at the same time.
        dtype: of the numbers.
    """
    with tf.init_scope():
        matrices = [_matrix(device, dtype) for device in devices]

        @tf.function(autograph=False)
        def products() -> list[tf.Tensor]:
            found = []
            for device, matrix in zip(devices, matrices, strict=True):
                with tf.device(device):
                    found.append(tf.reduce_sum(tf.linalg.matmul(matrix, matrix)))
            return found

        best_s = _best_s(products)
    return 2 * _SIZE**3 * len(devices) / best_s


def _matrix(device: str, dtype: str) -> tf.Tensor:
    with tf.device(device):
        return tf.cast(tf.fill([_SIZE, _SIZE], 1 / _SIZE), dtype)


def _best_s(products: tf.types.experimental.PolymorphicFunction) -> float:
    products()  # traces
    best_s, began_s = float("inf"), time.perf_counter()
    for _ in range(_MOST_ROUNDS):
        started_s = time.perf_counter()
        for each in products():
            each.numpy()  # waits for the device
        best_s = min(best_s, time.perf_counter() - started_s)
        if time.perf_counter() - began_s > _AT_LEAST_S:
            break
    return best_s
