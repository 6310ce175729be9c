"""Variables in parts of which each process updates a piece of every part.

    model 2, shard 2 over processes      rank 0                     rank 1
    a weight                             parts 0 and 1, whole       parts 0 and 1, whole
    its slots, and what is updated       pieces 0 and 2             pieces 1 and 3

In an optimizer's update (`shard_view`) a weight is this process's pieces of it, which are there
until those of all processes have become the new parts. A slot is its pieces everywhere; whoever
reads the whole gathers it, on all processes alike. With `Sharding(host=...)` both are in the
host's memory, from where pieces go to the other processes anyway.

Source: Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, stages 1 and 2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.hybrid.pieces_of_parts import PiecesOfParts, PlaceOfPart, gathered
from tfparallel.hybrid.sharded_groups import SharedSplitVariable
from tfparallel.hybrid.split_stage_variable import SplitStageVariable
from tfparallel.internals import record
from tfparallel.replicas.device_names import hosts_of
from tfparallel.sharded.part_of_copy import PartOfCopy
from tfparallel.sharded.shard_view import current_numbers
from tfparallel.tensor_parallel.known_parts import put_together
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import SplitVariable


class InPiecesOfProcesses(SplitVariable):
    """Mixin of variables that are this process's pieces: always, or in an update.

    Attributes:
        pieces_of_parts: how they are cut; None where the variable is as any in parts.
    """

    pieces_of_parts: PiecesOfParts | None = None
    _rows_of_parts: Rows

    def __getattr__(self, name: str) -> object:
        """Of the first part. TensorFlow asks the value, which would be gathered to look."""
        if "parts" not in vars(self):  # while it is made
            return super().__getattr__(name)
        if name.startswith("_"):  # what TensorFlow notes on a part is the part's own
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'.")
        return getattr(self.parts[0][0], name)

    def is_in_pieces_here(self) -> bool:
        """Whether the caller computes with this process's pieces."""
        return self.pieces_of_parts is not None

    @property
    def stored(self) -> Rows:
        """What `own_parts` are."""
        cut = self.pieces_of_parts
        return cut.own if cut is not None and self.is_in_pieces_here() else self._rows_of_parts

    @stored.setter
    def stored(self, rows: Rows) -> None:
        self._rows_of_parts = rows

    def places_of_parts(self) -> list[PlaceOfPart]:
        """How each part is in pieces."""
        cut: Any = self.pieces_of_parts
        return [PlaceOfPart(cut, part) for part in range(len(self.rows.sizes))]

    def pieces(self, value: tf.Tensor | tf.IndexedSlices | tf.Variable) -> list:
        """Of a value of the whole, dense or sparse, one for each of `stored`."""
        cut = self.pieces_of_parts
        if cut is None or not self.is_in_pieces_here():
            return super().pieces(value)
        return self._cut(value, cut.every)[cut.index :: cut.count]


class WeightInPieces(InPiecesOfProcesses):
    """A weight, whole in each process, of which an update computes this process's pieces."""

    _being_updated: dict[int, PartOfCopy]  # by the `id` of the part

    def is_in_pieces_here(self) -> bool:
        return super().is_in_pieces_here() and current_numbers() is not None

    def cut_over(self, count: int, index: int) -> None:
        """Has `count` processes update a piece of each part; of these `index` is this one."""
        self.pieces_of_parts = PiecesOfParts(self.rows, count, index)
        self._being_updated = {}

    def own_parts(self) -> tuple:
        """What is updated of the caller's copy, or all of it outside of updates."""
        parts = super().own_parts()
        return self._pieces_of(parts) if self.is_in_pieces_here() else parts

    def _pieces_of(self, parts: Sequence[tf.Variable]) -> tuple[PartOfCopy, ...]:
        return tuple(self._piece_of(k, part) for k, part in enumerate(parts))

    def _piece_of(self, k: int, part: tf.Variable) -> PartOfCopy:
        cut: Any = self.pieces_of_parts
        if id(part) not in self._being_updated:
            shape = self._shape_of_part(cut.own.sizes[k])
            own: Callable = lambda value: cut.own_of(k, value)  # noqa: E731
            is_on_host = self.distribute_strategy.extended.sharding.slots_on_host
            device = hosts_of([part.device])[0] if is_on_host else part.device
            self._being_updated[id(part)] = PartOfCopy(part, self, own, shape, device)
        return self._being_updated[id(part)]

    def take(self) -> None:
        """Begins an update of the caller's copy, if the caller is who assigns it."""
        if self.is_assigned_here():
            for piece in self._pieces_of(super().own_parts()):
                piece.take()

    def read_pieces(self) -> list[tf.Tensor]:
        """This process's pieces, updated or where they are stored; outside of replicas."""
        return [piece.read_value() for piece in self._pieces_of(self.parts[0])]

    def publish(self, parts: Sequence[tf.Tensor]) -> None:
        """Ends an update: all copies of this process get the new value of each part."""
        for copy in self.parts:
            for part, piece, value in zip(copy, self._pieces_of(copy), parts, strict=True):
                with tf.device(part.device):
                    part.assign(tf.identity(value))
                piece.leave()


class SlotInPieces(InPiecesOfProcesses):
    """An optimizer's slot of a weight in pieces: each process has its own ones."""

    has_pieces_elsewhere = True

    def beside(self, weight: WeightInPieces) -> None:
        """Has its pieces be those that are updated of `weight`."""
        self.pieces_of_parts = weight.pieces_of_parts

    def whole(self) -> tf.Tensor:
        """Of all processes, which have to ask together."""
        extended = self.distribute_strategy.extended
        with record.stop_recording(), tf.device(extended._host_device):
            parts = gathered(extended.between_processes, self.places_of_parts(), self.read_stored())
            return put_together(parts, self.rows)

    def numpy(self) -> np.ndarray:
        """The whole, of all processes."""
        return self.whole().numpy()


class GroupWeight(WeightInPieces, SharedSplitVariable):
    """That of groups of devices."""

    @property
    def _is_shared(self) -> bool:
        return self.pieces_of_parts is not None


class GroupSlot(SlotInPieces, SharedSplitVariable):
    """That of groups of devices."""


class StageWeight(WeightInPieces, SplitStageVariable):
    """That of pipelines, whose first microbatch updates it."""

    def tell_copies(self) -> None:
        """As the base's, but of an update of pieces, behind which all copies get the parts."""
        if not self.is_in_pieces_here():
            super().tell_copies()


class StageSlot(SlotInPieces, SplitStageVariable):
    """That of pipelines."""
