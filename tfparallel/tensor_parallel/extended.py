"""The five decisions under tensor parallelism: a replica is a group of devices.

One thread traces a replica's step as it is written, so there is one loss, one Dropout mask and one
set of metrics a replica. Layers whose weights are in parts compute on all devices of the group, all
else on its first. How rows are split, and how a step runs, stay as under `MirroredStrategy`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import (
    TrainerCall,
    device_util,
    distribute_lib,
    values_util,
)
from tfparallel.internals.keras_epochs import surround_epochs
from tfparallel.replicas.device_names import names_of_groups
from tfparallel.replicas.local import LocalExtended
from tfparallel.tensor_parallel.gradients import as_whole, in_parts, sum_parts
from tfparallel.tensor_parallel.holds_parts import HoldsParts
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.numbers_of_update import NumberOfUpdate
from tfparallel.tensor_parallel.rows import Rows


class TensorParallelExtended(HoldsParts, LocalExtended):
    """Variables in parts as `layouts` says, computed with where they are.

    Args:
        container_strategy: the strategy.
        layouts: with the groups of devices.
        reports_lost_processes: makes the context of training in which errors name a process that is
            lost; None where all devices are of this one.

    Raises:
        ValueError: if the first device of a group is of another process than the first of all.
    """

    _replicated_class = NumberOfUpdate

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        layouts: Layouts,
        reports_lost_processes: Callable | None = None,
    ):
        self._user_cross_device_ops = None
        self.reports_lost_processes = reports_lost_processes
        self.layouts = layouts
        groups = layouts.groups.groups
        _check_first_devices(groups)
        super().__init__(container_strategy, [group[0] for group in groups])
        self._groups = [[device_util.canonicalize(d, self._devices[0]) for d in g] for g in groups]

    def _description(self) -> str:
        devices = names_of_groups(self._groups)
        return f"num_replicas={self._num_replicas_in_sync}, devices={devices}"

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        if self.reports_lost_processes is not None:
            surround_epochs(call.epoch_iterator, self.reports_lost_processes)
        return super()._keras_dataset(dataset, call)

    # ---- groups ----------------------------------------------------------------------------------

    def own_group(self) -> list[str]:
        """The devices of the calling replica; outside of replicas, of the first."""
        context = distribute_lib.get_replica_context()
        if context is None or context.strategy is not self._container_strategy():
            return self._groups[0]
        return self._groups[values_util.get_current_replica_id_as_int()]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Where variables live: on all devices."""
        return tuple(device for group in self._groups for device in group)

    # ---- where variables live --------------------------------------------------------------------

    def _devices_of_parts(self, rows: Rows, shards: int) -> tuple[str, ...]:
        del shards
        own = slice(rows.first, rows.first + len(rows.sizes))
        return tuple(device for group in self._groups for device in group[own])

    # ---- how gradients meet ----------------------------------------------------------------------

    def _reduce_gradients(self, gradients: list) -> list:
        if self._compresses:
            return super()._reduce_gradients(gradients)
        variables = self._variables_of(gradients)
        parts = [in_parts(g, v) for g, v in zip(gradients, variables, strict=True)]
        split = [(p, v) for p, v in zip(parts, variables, strict=True) if p is not None]
        summed = iter(self._sum_parts(*map(list, zip(*split, strict=True))) if split else [])
        whole = [g for g, p in zip(gradients, parts, strict=True) if p is None]
        reduced = iter(super()._reduce_gradients(whole))
        return [
            next(reduced) if p is None else as_whole(next(summed), v.stored)
            for p, v in zip(parts, variables, strict=True)
        ]

    def _sum_parts(self, parts: list[list[tf.Tensor]], variables: list) -> list[list[tf.Tensor]]:
        """The sums over replicas of gradients of `variables`, each in parts, as they are stored."""
        firsts = [variable.rows.first for variable in variables]
        return sum_parts(parts, firsts, self._groups, self._over_workers())

    def _over_workers(self) -> Callable[[list], list] | None:
        """Adds up parts over workers, which do not compress."""
        if self._workers is None:
            return None
        return functools.partial(self._sum_gradients_across_workers, source=None)


def _check_first_devices(groups: Sequence[Sequence[str]]) -> None:
    """A replica's step is that of a device of this process."""
    firsts = [group[0] for group in groups]
    specs: list[Any] = [tf.DeviceSpec.from_string(device) for device in firsts]
    if len({(spec.job, spec.task) for spec in specs}) > 1:
        raise ValueError(
            "The first device of each replica must be one of the first process. Received: "
            f"{firsts}. Let the mesh's axis of the model go over processes, not that of the batch: "
            "for data parallel outside take MultiWorkerMirroredStrategy(inner=...)."
        )
