"""How a tensor is cut: flat, padded with zeros to a multiple of the shards, in equal pieces.

    [[a b c]     shards of 3 numbers     0: a b c   1: d e f   2: g 0 0
     [d e f]  ->
     [g]    ]

Flat for each variable: no dim has to be divisible, and at most `num_shards - 1` numbers are wasted.
"""

import dataclasses
import math

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class FlatShards:
    """The shards of a tensor.

    Attributes:
        shape: of the whole tensor.
        num_shards: how many shards there are.
    """

    shape: tuple[int, ...]
    num_shards: int

    @property
    def size(self) -> int:
        """Numbers in the whole tensor."""
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """Numbers in a shard, padding included."""
        return -(-self.size // self.num_shards)

    def padded(self, whole: tf.Tensor) -> tf.Tensor:
        """All shards, one after the other, `[num_shards * length]`."""
        flat = tf.reshape(whole, [self.size])
        return tf.pad(flat, [[0, self.num_shards * self.length - self.size]])

    def part(self, whole: tf.Tensor, index: int) -> tf.Tensor:
        """Shard number `index` of a tensor, `[length]`, in memory of its own.

        A slice is a view: a variable that is assigned one keeps the whole alive.
        """
        begin = min(index * self.length, self.size)
        own = tf.reshape(whole, [self.size])[begin : begin + self.length]
        padded = tf.pad(own, [[0, self.length - min(self.length, self.size - begin)]])
        return tf.raw_ops.DeepCopy(x=padded)

    def part_of_rows(self, rows: tf.IndexedSlices, index: int) -> tf.IndexedSlices:
        """What of a sparse gradient belongs to shard number `index`, number by number.

        Rows that are given twice stay twice: optimizers square them before they add them up.
        """
        row = math.prod(self.shape[1:])
        first = tf.cast(rows.indices, tf.int64)[:, tf.newaxis] * row - index * self.length
        places = tf.reshape(first + tf.range(row, dtype=tf.int64), [-1])
        is_own = (places >= 0) & (places < self.length)
        own = tf.where(is_own)[:, 0]  # `boolean_mask` has a GPU send the host how many there are
        values = tf.gather(tf.reshape(rows.values, [-1]), own)
        dense_shape = tf.constant([self.length], tf.int64)
        return tf.IndexedSlices(values, tf.gather(places, own), dense_shape)

    def whole(self, padded: tf.Tensor) -> tf.Tensor:
        """The tensor that `padded` is all shards of."""
        return tf.reshape(padded[: self.size], self.shape)
