"""One variable of which each rank stores its part.

As `SplitVariable` says, but that whoever reads the whole gathers it: outside of a step, too, and on
all ranks together (`get_weights`, `save`).
"""

import numpy as np
import tensorflow as tf

from tfparallel.internals import record
from tfparallel.tensor_parallel.known_parts import cut_apart
from tfparallel.tensor_parallel.ranks import ModelRanks, exchange_here, where_ranks_exchange
from tfparallel.tensor_parallel.split_variable import SplitVariable


class VariableOfRanks(SplitVariable):
    """Reads and assignments of a variable whose parts are those of the strategy's ranks."""

    has_pieces_elsewhere = True
    worker_bounds = None  # ranks write no shards of files: rank 0 writes wholes, which all gather

    @property
    def _ranks(self) -> ModelRanks:
        return self.distribute_strategy.extended.ranks

    @property
    def here(self) -> tuple[int, ...]:
        """This rank's part."""
        return (self._ranks.index,)

    def read_stored(self) -> list[tf.Tensor]:
        """This rank's part, and stand-ins for those of the others."""
        (own,), ranks, shape = self.own_parts(), self._ranks, self.shape.as_list()
        values = []
        with record.stop_recording(), tf.device(own.device):
            for i, size in enumerate(self.stored.sizes):
                shape[self.stored.dim] = size
                values.append(
                    own.read_value()
                    if i == ranks.index
                    else ranks.stand_in(shape, self.dtype, self._own_name())
                )
        return values

    def _values_of_parts(self) -> list[tf.Tensor]:
        return cut_apart(self.whole(), self.stored)

    def whole(self) -> tf.Tensor:
        """All parts as one, gathered."""
        with where_ranks_exchange(), self._ranks.meeting():
            return super().whole()

    def _to_parts(self, name: str, value: tf.Tensor | tf.IndexedSlices | tf.Variable) -> object:
        if self._current() is None and not exchange_here():
            raise NotImplementedError(
                "In a loop or a tf.function within a step, ranks read a variable in parts as it is "
                f"before. Received: {name} of '{self.name}' there. Update it in the step itself, "
                "or let one process control the others (cluster_resolver=...)."
            )
        return super()._to_parts(name, value)

    def numpy(self) -> np.ndarray:
        """The whole; all ranks have to ask together."""
        return self.whole().numpy()
