"""A batch whose rows are on the replicas' devices already, when the step begins that takes them.

It is cut as `batch.OnHost` cuts: the rows of each replica, in their order. What the host has to
know of it, how many rows there are in all, stays with the host. A step is traced for the shapes
that the dataset tells, not for those of one batch: once, also where the last batch is smaller.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.internals.datasets import CompositeTensor
from tfparallel.internals.distribute import first_replica_of_process, num_replicas_of
from tfparallel.replicas.batch import InPlace, Rows, num_rows, split_rows
from tfparallel.replicas.local_replicas import LocalReplicas


class PlacedBatch(InPlace, CompositeTensor):
    """The rows of this process's replicas, each part on its replica's device.

    Args:
        spec: what a step is traced for.
        tensors: of all parts, one part after the other; then, where `spec` does not tell, the
            number of rows of all replicas.
    """

    def __init__(self, spec: "PlacedSpec", tensors: Sequence[tf.Tensor]):
        self._spec, self._tensors = spec, list(tensors)

    @property
    def _type_spec(self) -> "PlacedSpec":
        return self._spec

    @property
    def total(self) -> Rows:  # type: ignore[override]
        """The rows of all replicas."""
        return self._tensors[-1] if self._spec.total is None else self._spec.total

    @property
    def parts(self) -> list:  # type: ignore[override]
        """Of each replica of this process a nest as the dataset gives."""
        element, count = self._spec.element_spec, self._spec.num_tensors
        starts = range(0, count * len(self._spec.devices), count)
        return [packed(element, self._tensors[i : i + count]) for i in starts]


class PlacedSpec(tf.TypeSpec):
    """What a step knows of a `PlacedBatch` when it is traced.

    Args:
        element_spec: of the dataset.
        bounds: first and last row of each local replica, where the dataset tells how many rows a
            batch has.
        total: the rows of all replicas, where it does.
        devices: of the local replicas.
    """

    def __init__(
        self,
        element_spec: object,
        bounds: tuple[tuple[int, int], ...] | None,
        total: int | None,
        devices: Sequence[str],
    ):
        self.element_spec, self.bounds, self.total = element_spec, bounds, total
        self.devices = tuple(devices)
        self.num_tensors = len(tensor_specs(element_spec))

    value_type = property(lambda self: PlacedBatch)

    def _serialize(self) -> tuple:
        return self.element_spec, self.bounds, self.total, self.devices

    @property
    def _component_specs(self) -> list:
        specs = [
            _of_rows(spec, None if self.bounds is None else self.bounds[i][1] - self.bounds[i][0])
            for i in range(len(self.devices))
            for spec in tensor_specs(self.element_spec)
        ]
        return specs if self.total is not None else [*specs, tf.TensorSpec([], tf.int32)]

    def _to_components(self, value: PlacedBatch) -> list:
        return value._tensors

    def _from_components(self, components: list) -> PlacedBatch:
        return PlacedBatch(self, components)


class BatchPlacement:
    """Puts batches on the devices of a strategy's replicas.

    Args:
        extended: `strategy.extended`.
        element_spec: of the dataset, which `can_be_placed`.
    """

    def __init__(self, extended: LocalReplicas, element_spec: object):
        self._devices, self._host_device = extended.worker_devices, extended._host_device
        self._num_replicas = num_replicas_of(extended)
        first = first_replica_of_process(extended)
        self._replicas = range(first, first + len(self._devices))
        rows = [s.shape[0] for s in tensor_specs(element_spec) if s.shape.rank]
        total = rows[0] if None not in rows and rows[0] >= self._num_replicas else None
        bounds = None if total is None else tuple(self._bounds(total))
        self._spec = PlacedSpec(element_spec, bounds, total, self._devices)

    def _bounds(self, total: int) -> list[tuple]:
        return split_rows(total, self._num_replicas, self._replicas)

    def place(self, batch: object) -> PlacedBatch:
        """`batch`, a nest of the host's tensors `[rows, ...]`, in parts; waits for the copies."""
        leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
        total = num_rows(batch)
        tensors = []
        for (start, end), device in zip(self._bounds(total), self._devices, strict=True):
            with tf.device(self._host_device):
                part = [leaf[start:end] if leaf.shape.rank else leaf for leaf in leaves]
            with tf.device(device):
                tensors += [tf.identity(leaf) for leaf in part]
        if self._spec.total is None:
            with tf.device(self._host_device):
                tensors.append(tf.constant(total))
        return PlacedBatch(self._spec, tensors)


def can_be_placed(element_spec: object) -> bool:
    """Whether batches of a dataset are dense tensors with rows, of types that devices have."""
    specs = [spec for spec in tf.nest.flatten(element_spec) if not _is_none(spec)]
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        return False
    is_known = all(spec.shape.rank is not None for spec in specs)
    is_held = all(spec.dtype.is_numpy_compatible and spec.dtype != tf.string for spec in specs)
    return is_known and is_held and any(spec.shape.rank for spec in specs)


def _is_none(spec: object) -> bool:
    return spec is None or isinstance(spec, type(tf.type_spec_from_value(None)))


def tensor_specs(element_spec: object) -> list[tf.TensorSpec]:
    """Of the tensors of a batch, in order; None is none."""
    return [spec for spec in tf.nest.flatten(element_spec) if not _is_none(spec)]


def _of_rows(spec: tf.TensorSpec, rows: int | None) -> tf.TensorSpec:
    return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec


def packed(element_spec: object, tensors: Sequence[tf.Tensor]) -> object:
    """`tensors` in the structure of `element_spec`, None where that has None."""
    given = iter(tensors)
    flat = [None if _is_none(s) else next(given) for s in tf.nest.flatten(element_spec)]
    return tf.nest.pack_sequence_as(element_spec, flat)


def of_the_only_replica(args: tuple) -> tuple:
    """What a step of one replica is called with: the rows that it has in the place of a batch."""
    return tuple(each.parts[0] if isinstance(each, PlacedBatch) else each for each in args)
