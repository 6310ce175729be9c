"""What every transport is asked, and what numpy says to it."""

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfparallel.communication.collectives import Collectives

DTYPES = (
    tf.bool,
    tf.uint8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
    tf.int8,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.bfloat16,
    tf.float16,
    tf.float32,
    tf.float64,
    tf.complex64,
    tf.complex128,
)
LENGTHS = (0, 1, 1000)  # of which no number of places divides all


def given(dtype: tf.DType, shape: tuple[int, ...], index: int) -> np.ndarray:
    """What place `index` has: small whole numbers, whose sums every dtype holds exactly."""
    rng = np.random.default_rng([index, *shape])
    low, high = (0, 2) if dtype == tf.bool else (0 if dtype.is_unsigned else -4, 5)
    numbers = rng.integers(low, high, shape)
    if dtype.is_complex:
        numbers = numbers + 1j * rng.integers(-4, 5, shape)
    return numbers.astype(dtype.as_numpy_dtype)


def summed(arrays: list[np.ndarray], dtype: tf.DType) -> np.ndarray:
    if dtype == tf.bool:
        return np.any(arrays, axis=0)
    wide = np.complex128 if dtype.is_complex else np.float64
    return np.sum([each.astype(wide) for each in arrays], axis=0).astype(dtype.as_numpy_dtype)


def asked(collectives: Collectives, dtype: tf.DType, length: int) -> list[tf.Tensor]:
    """All six collectives, of what this place has."""
    size, index = collectives.size, collectives.index

    def own(*shape: int) -> tf.Tensor:
        return tf.constant(given(dtype, shape, index), dtype)

    return [
        collectives.all_reduce(own(length)),
        collectives.reduce_scatter(own(size, length)),
        collectives.all_gather(own(length + index, 3)),
        *collectives.all_gather_each([own(length), own(length + 2)]),
        collectives.all_to_all(own(size, length, 2)),
        collectives.broadcast(own(length, 2)),
    ]


NAMES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_gather_each",
    "all_gather_each",
    "all_to_all",
    "broadcast",
)


def expected(size: int, index: int, dtype: tf.DType, length: int) -> list[np.ndarray]:
    """The same of numpy, which has what all places have."""

    def of_all(shape: Callable[[int], tuple[int, ...]]) -> list[np.ndarray]:
        return [given(dtype, shape(i), i) for i in range(size)]

    return [
        summed(of_all(lambda i: (length,)), dtype),
        summed(of_all(lambda i: (size, length)), dtype)[index],
        np.concatenate(of_all(lambda i: (length + i, 3))),
        np.concatenate(of_all(lambda i: (length,))),
        np.concatenate(of_all(lambda i: (length + 2,))),
        np.stack([rows[index] for rows in of_all(lambda i: (size, length, 2))]),
        of_all(lambda i: (length, 2))[0],
    ]


def differences(
    results: list[np.ndarray], size: int, index: int, dtype: tf.DType, length: int
) -> Iterator[str]:
    """Which results are not numpy's, bit for bit."""
    for name, result, right in zip(
        NAMES, results, expected(size, index, dtype, length), strict=True
    ):
        same = result.shape == right.shape and result.dtype == right.dtype
        if not same or result.tobytes() != right.tobytes():
            yield (
                f"{name} of {dtype.name}, {length} on place {index} of {size}: "
                f"{result.shape} {result.dtype}, not {right.shape} {right.dtype}"
            )


def asked_of_all_dtypes(collectives: Collectives, length: int) -> list[list[tf.Tensor]]:
    return [asked(collectives, dtype, length) for dtype in DTYPES]


def all_differences(collectives: Collectives, in_function: bool) -> list[str]:
    """Of all dtypes and lengths, in one order on all places."""
    found: list[str] = []
    ask = tf.function(asked_of_all_dtypes, autograph=False) if in_function else asked_of_all_dtypes
    for length in LENGTHS:
        for dtype, results in zip(DTYPES, ask(collectives, length), strict=True):
            arrays = [np.asarray(each) for each in results]
            found += differences(arrays, collectives.size, collectives.index, dtype, length)
    return found
