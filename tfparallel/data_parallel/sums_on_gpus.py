"""What workers join on their GPUs, where their gradients meet, while no host waits for a GPU."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.communication.carried_dtypes import moved_by, summed_by
from tfparallel.communication.stock_collectives import GATHERED, SUMMED
from tfparallel.internals import (
    CollectiveAllReduce,
    Mirrored,
    PerReplica,
    ReduceOp,
    distribute_utils,
)
from tfparallel.internals.distribute import gather_alike, launchers_of
from tfparallel.replicas.across_workers import WorkersExtended
from tfparallel.replicas.variables import sums_of_copies


class SumsOnGpus(WorkersExtended):
    """Mixin of workers that have replicas on `_devices`, which `_cross_device_ops` reduces."""

    _devices: Sequence[str]
    _cross_device_ops: CollectiveAllReduce

    def _sum_on_gpus(self, tensor: tf.Tensor) -> tf.Tensor:
        """In one order with the gradients' sums."""
        return summed_by(self._sum_of_first, tensor, SUMMED)

    def _sum_of_first(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum over workers of what their first devices have; the others add nothing."""
        first, *others = self._devices
        with tf.device(first):
            parts = [tf.identity(tensor)]
        for device in others:
            with tf.device(device):
                parts.append(tf.zeros(tf.shape(tensor), tensor.dtype))
        return self._sum_of_devices(parts)

    def _sum_of_devices(self, parts: list[tf.Tensor]) -> tf.Tensor:
        """The sum of what the devices of all workers have, on the first of each."""
        value = PerReplica(parts) if len(parts) > 1 else parts[0]
        (total,) = self._cross_device_ops.batch_reduce(ReduceOp.SUM, [(value, value)])
        return self._local_results(total)[0]

    def _sums_of_all(self, variables: Sequence) -> list[tf.Tensor]:
        """As the base's, in one collective: no device waits for another of its worker."""
        if not self._has_nccl or self._weights_check is not None:
            return super()._sums_of_all(variables)
        floats = [v for v in variables if v.dtype.is_floating]
        others = [v for v in variables if not v.dtype.is_floating]
        sums = iter(sums_of_copies(floats, self._sum_of_devices))
        rest = iter(self._sum_and_check_weights(sums_of_copies(others)))
        return [next(sums if v.dtype.is_floating else rest) for v in variables]

    def _sums_in_rows(self, pairs: Sequence) -> list:
        """Sums over all replicas of sparse gradients: the rows of all, equal indices not merged.

        TensorFlow's gather asks the GPUs for their numbers of rows, and the host waits for the
        answer behind all that they were given before. Numbers of rows are shapes: hosts know them
        when what computes the rows is launched, and tell one another.
        """
        by_device = [list(self._local_results(value)) for value, _ in pairs]
        if tf.executing_eagerly():  # TensorFlow gathers in functions only
            copies = tf.function(self._rows_of_all)(by_device)
        else:
            copies = self._rows_of_all(by_device)
        return [distribute_utils.regroup(tuple(each), wrap_class=Mirrored) for each in copies]

    def _rows_of_all(self, gradients: list[list[tf.IndexedSlices]]) -> list[list[tf.IndexedSlices]]:
        """Of each gradient, given by local device, the rows of all replicas on each of these."""
        launchers, sums = launchers_of(self._cross_device_ops), []
        for parts, counts in zip(gradients, self._numbers_of_rows(gradients), strict=True):
            copies = []
            for launcher, device, part in zip(launchers, self._devices, parts, strict=True):
                with tf.device(device):
                    copies.append(_gathered(launcher, part, counts))
            sums.append(copies)
        return sums

    def _numbers_of_rows(self, gradients: list[list[tf.IndexedSlices]]) -> list[tf.Tensor]:
        """Of each gradient `[replicas]`, int32, on the host: how many rows each replica has."""
        numbers = []
        for parts in gradients:
            for device, part in zip(self._devices, parts, strict=True):
                with tf.device(device):  # to ask for a shape elsewhere is to send what has it
                    numbers.append(tf.shape(part.values)[0])
        with tf.device(self._host_device):
            own = tf.stack(numbers)
            counts = self._collectives.all_gather_each([own])[0] if self._num_workers > 1 else own
            by_worker = tf.reshape(counts, [self._num_workers, len(gradients), -1])
            return [tf.reshape(by_worker[:, i], [-1]) for i in range(len(gradients))]


def _gathered(launcher: object, part: tf.IndexedSlices, counts: tf.Tensor) -> tf.IndexedSlices:
    """The rows of all devices, one device after the other.

    Args:
        launcher: of the collectives of a device.
        part: its own rows.
        counts: `[devices]`, on the host.
    """
    values = _gathered_rows(launcher, part.values, counts)
    # int64, which GPUs have in their memory
    indices = _gathered_rows(launcher, tf.cast(part.indices, tf.int64), counts)
    return tf.IndexedSlices(values, indices, part.dense_shape)


def _gathered_rows(launcher: object, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """All devices' `[rows, ...]`, sent as long as the longest: a gather is of what is alike."""
    shape, longest = tf.shape(rows), tf.reduce_max(counts)
    missing = tf.zeros(tf.concat([[longest - shape[0]], shape[1:]], 0), rows.dtype)
    padded = tf.concat([rows, missing], 0)
    gathered = moved_by(lambda sent: gather_alike(launcher, sent), padded, GATHERED)
    starts = longest * tf.range(counts.shape[0])
    parts = [gathered[starts[i] : starts[i] + counts[i]] for i in range(counts.shape[0])]
    return tf.concat(parts, 0)
