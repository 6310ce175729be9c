"""Batches of one size: rows of padding fill those that are smaller.

An XLA program is of static shapes; a batch of another size is another program. So that one is
enough, every replica gets as many rows. Those of padding repeat a row of the batch, so that nothing
can be computed of them that could not be of the batch, and count nowhere:

    7 rows, 2 replicas of 4 rows     rows    0 1 2 3 | 4 5 6 6
                                     totals  7 7 7 7 | 7 7 7 0

`totals` says of each row how many there are in the batch, 0 of padding. It tells a replica its
share of the rows, without asking the others.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.internals import TrainerCall, distribute_utils
from tfparallel.internals.datasets import batch_rows_of
from tfparallel.replicas.batch import Rows, num_rows, split_rows


class WholeBatch(NamedTuple):
    """A batch without rows of padding, or a replica's part of one; of a type by `of_size`.

    Attributes:
        data: nest of tensors `[rows, ...]`.
    """

    data: Any


class PaddedBatch(NamedTuple):
    """A batch, or a replica's part of one, of which some rows may be padding; likewise.

    Attributes:
        data: nest of tensors `[rows, ...]`.
        totals: int32 `[rows]`; -1 of a batch of more rows than fit, which a step refuses.
    """

    data: Any
    totals: Any


@functools.cache
def of_size(kind: type, rows: int) -> type:
    """A type for batches of `kind` that give each replica so many rows, its `ROWS`.

    Keras's functions of a batch would be traced for any number of rows once they have had two, of
    `fit` and `evaluate` say, or of two calls. Batches of different types get traces of their own.
    """
    return type(f"{kind.__name__}Of{rows}", (kind,), {"__slots__": (), "ROWS": rows})


def know_rows(batch: PaddedBatch | WholeBatch) -> None:
    """Tells TensorFlow again how many rows each replica has, as the type of `batch` says.

    What it hands a loop over several steps (`steps_per_execution`) may be the end of the data, and
    has lost the number.
    """
    kind: Any = type(batch)
    for part in tf.nest.flatten(batch, expand_composites=True):
        if part is not None and part.shape.rank:
            part.set_shape([kind.ROWS, *part.shape[1:]])


def padded(data: object, num_replicas: int, rows: int) -> PaddedBatch:
    """`data` with `rows` rows for each replica, one replica's after the other's.

    Args:
        data: nest of dense tensors `[rows of the batch, ...]`.
        num_replicas: in what order they follow is `split_rows`' order.
        rows: enough for each replica.
    """
    total = num_rows(data)
    places, totals = _places(total, num_replicas, rows)

    def filled(leaf: tf.Tensor | None) -> tf.Tensor | None:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        return tf.ensure_shape(tf.gather(leaf, places), [num_replicas * rows, *leaf.shape[1:]])

    return of_size(PaddedBatch, rows)(keras.tree.map_structure(filled, data), totals)


def _places(total: Rows, num_replicas: int, rows: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Which row of the batch is in each place, and `totals`."""
    bounds = split_rows(total, num_replicas, range(num_replicas))
    first, end = (tf.cast(tf.stack(each), tf.int32)[:, None] for each in zip(*bounds, strict=True))
    own, total = first + tf.range(rows), tf.cast(total, tf.int32)
    totals = tf.where(own < end, total, 0)
    return tf.reshape(tf.minimum(own, total - 1), [-1]), tf.reshape(totals, [-1])


def parts_by_replica(data: object, num_replicas: int, rows: int) -> object:
    """A nest of `[num_replicas * rows, ...]` as one of `PerReplica`s, each replica's rows alone."""

    def part(leaf: tf.Tensor | None, replica: int) -> tf.Tensor | None:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        return tf.ensure_shape(leaf[replica * rows : (replica + 1) * rows], [rows, *leaf.shape[1:]])

    parts = [
        tf.nest.map_structure(lambda leaf, i=i: part(leaf, i), data) for i in range(num_replicas)
    ]
    return distribute_utils.regroup(parts, always_wrap=True)


@dataclass(frozen=True)
class BatchSize:
    """How many rows the batches of a dataset have.

    Attributes:
        rows: of each, or at most.
        may_differ: whether there may be smaller ones, which get rows of padding.
    """

    rows: int
    may_differ: bool


def batch_size_of(
    dataset: tf.data.Dataset,
    call: TrainerCall,
    num_replicas: int,
    batch_rows: int | None,
    why_whole: str | None,
) -> BatchSize:
    """What is known of the batches of `dataset` before they come.

    Args:
        dataset: as Keras hands it over.
        call: for which.
        num_replicas: of the strategy.
        batch_rows: what the strategy was told that a batch has at most, or None.
        why_whole: why the model's step cannot do with padding, or None.

    Raises:
        ValueError: if it cannot be made of one size.
    """
    specs = [leaf for leaf in tf.nest.flatten(dataset.element_spec) if hasattr(leaf, "shape")]
    other = [type(spec).__name__ for spec in specs if not isinstance(spec, tf.TensorSpec)]
    if other:
        raise ValueError(
            f"TPUStrategy divides batches of dense tensors. Received: {other}. Make them dense "
            "(tf.RaggedTensor.to_tensor, tf.sparse.to_dense)."
        )
    known = next((spec.shape[0] for spec in specs if spec.shape.rank), None)
    least = batch_rows or 0 if why_whole is None else 0
    if known is not None and known % num_replicas == 0 and known >= least:
        return BatchSize(known, may_differ=False)
    if why_whole is not None:
        raise ValueError(
            f"TPUStrategy needs batches of one size, a multiple of its {num_replicas} replicas, "
            f"where it cannot fill them with rows of padding: {why_whole}. Received: batches of "
            f"{known or 'any number of'} rows. Leave the rest out: tf.data's "
            "batch(drop_remainder=True)."
        )
    adapter: Any = call.data_adapter
    rows = batch_rows or known or adapter.batch_size or batch_rows_of(dataset)
    if rows is None:
        raise ValueError(
            "TPUStrategy fills batches up to one number of rows, which has to be known before they "
            "come. Received: batches of a generator, PyDataset or pipeline that does not tell "
            "theirs. Say how many rows a batch has at most: TPUStrategy(batch_rows=64), or use "
            "tf.data's .batch(64)."
        )
    return BatchSize(rows, may_differ=True)


def parts_on_host(size: BatchSize, num_replicas: int, own: range) -> Callable[..., object]:
    """A function for `Dataset.map`: of a batch what the replicas `own` get, one after the other."""
    rows = -(-size.rows // num_replicas)
    total = num_replicas * rows

    def own_parts(leaf: tf.Tensor) -> tf.Tensor:
        part = leaf[own.start * rows : own.stop * rows]
        return tf.ensure_shape(part, [len(own) * rows, *leaf.shape[1:]])

    def cut(*elements: object) -> object:
        data = elements if len(elements) > 1 else elements[0]
        if size.may_differ:
            batch = padded(data, num_replicas, rows)
            too_many = tf.greater(num_rows(data), total)
            batch = batch._replace(totals=tf.where(too_many, -1, batch.totals))
            return tf.nest.map_structure(own_parts, batch)
        batch = of_size(WholeBatch, rows)(data)
        return tf.nest.map_structure(own_parts, batch)

    return cut


def checked_at_most(data: object, limit: int) -> tf.Operation:
    """An operation that fails if a batch has more rows than a program was compiled for."""
    return tf.debugging.assert_less_equal(num_rows(data), limit, _TOO_MANY)


def checked_to_fit(totals: tf.Tensor) -> tf.Operation:
    """An operation that fails if `totals` are of a batch of more rows than fit.

    In the step: an error of the input pipeline may come to it as the end of the data.
    """
    return tf.debugging.assert_non_negative(totals, _TOO_MANY)


_TOO_MANY = (
    "TPUStrategy compiles a step for one number of rows, which smaller batches are filled up to. "
    "Received a batch of more rows. Say how many a batch has at most: TPUStrategy(batch_rows=...)"
)
