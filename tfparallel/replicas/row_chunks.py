"""Values of rows, some rows at a time: what is made of rows times rows never stands as a whole.

    scores of a chunk, [chunk_rows, all rows]  ->  values, [chunk_rows]

The backward pass computes each chunk again, so that only one is in memory at any time.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf


def in_chunks(function: Callable, rows: object, others: object, chunk_rows: int) -> tf.Tensor:
    """`function(rows, others)`, computed for `chunk_rows` rows at a time; differentiable once.

    For a loss of B rows against all B whose scores, [B, B], are too much: in `compute_loss`, with
    `rows` of this replica and `others` from `strategy.all_rows`, or in any other program.

    Args:
        function: gives a value for each row of its first argument, `[rows]`. It takes all that has
            a gradient, variables too, from its arguments.
        rows: a tensor `[rows, ...]`, or a nest of them.
        others: a tensor, or a nest of them, the same for all chunks.
        chunk_rows: at least 1.

    Returns:
        A tensor `[rows]`.

    Raises:
        ValueError: for a `chunk_rows` below 1.
    """
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1. Received: {chunk_rows}.")
    flat_rows = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(rows)]
    flat_others = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(others)]

    def values_of(own: Sequence, every: Sequence) -> tf.Tensor:
        return function(
            keras.tree.pack_sequence_as(rows, own), keras.tree.pack_sequence_as(others, every)
        )

    @tf.custom_gradient
    def values(*flat: tf.Tensor) -> tuple:
        own, every = flat[: len(flat_rows)], flat[len(flat_rows) :]
        starts = _Starts(tf.shape(own[0])[0], chunk_rows)

        def backward(upstream: tf.Tensor) -> list:
            return _gradients(values_of, starts, own, every, upstream)

        return _values(values_of, starts, own, every), backward

    return values(*flat_rows, *flat_others)


class _Starts:
    """Where chunks begin: at least one does, if only of no rows."""

    def __init__(self, num_rows: tf.Tensor, chunk_rows: int):
        self._chunk_rows = chunk_rows
        self.count = tf.maximum(1, -(-num_rows // chunk_rows))

    def part(self, tensor: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return tensor[number * self._chunk_rows : (number + 1) * self._chunk_rows]

    def loop(self, body: Callable, state: list, first: int = 0) -> list:
        """`state` after `body(number, *state)` for every chunk from `first`, in turn."""

        def one(number: tf.Tensor, *state: object) -> list:
            return [number + 1, *body(number, *state)]

        _, *state = tf.while_loop(
            lambda number, *_: number < self.count,
            one,
            [tf.constant(first), *state],
            [tf.TensorShape([]), *map(_shape_of_any_rows, state)],
            parallel_iterations=1,
        )
        return state

    def array(self, like: tf.Tensor) -> tf.TensorArray:
        shape = tf.TensorShape([None, *like.shape[1:]])
        return tf.TensorArray(like.dtype, self.count, element_shape=shape, infer_shape=False)


def _shape_of_any_rows(state: object) -> object:
    """Of what a loop may grow by rows."""
    if isinstance(state, tf.Tensor) and state.shape.rank == 1:
        return tf.TensorShape([None])
    return state.shape if isinstance(state, tf.Tensor) else None


def _values(function: Callable, starts: _Starts, own: Sequence, every: Sequence) -> tf.Tensor:
    def of_chunk(number: tf.Tensor) -> tf.Tensor:
        return function([starts.part(x, number) for x in own], every)

    def body(number: tf.Tensor, values: tf.Tensor) -> list:
        return [tf.concat([values, of_chunk(number)], 0)]

    (values,) = starts.loop(body, [of_chunk(tf.constant(0))], first=1)
    return values


def _gradients(
    function: Callable, starts: _Starts, own: Sequence, every: Sequence, upstream: tf.Tensor
) -> list:
    """With respect to `own` and to `every`, None for those that are no floats."""
    live = [x for x in (*own, *every) if x.dtype.is_floating]
    num_own = len([x for x in own if x.dtype.is_floating])

    def body(number: tf.Tensor, *state: tf.Tensor) -> list:
        parts = [starts.part(x, number) for x in own]
        arrays, sums = state[:num_own], state[num_own:]
        sources = [x for x in (*parts, *every) if x.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            values = function(parts, every)
        found = tape.gradient(
            values, sources, starts.part(upstream, number), tf.UnconnectedGradients.ZERO
        )
        written = [a.write(number, g) for a, g in zip(arrays, found[:num_own], strict=True)]
        return [*written, *[a + g for a, g in zip(sums, found[num_own:], strict=True)]]

    zeros = [tf.zeros_like(x) for x in live[num_own:]]
    state = starts.loop(body, [*map(starts.array, live[:num_own]), *zeros])
    found = iter([*[array.concat() for array in state[:num_own]], *state[num_own:]])
    return [next(found) if x.dtype.is_floating else None for x in (*own, *every)]
