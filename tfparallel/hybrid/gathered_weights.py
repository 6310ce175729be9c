"""Weights of which a process has its pieces between steps, and all while one runs.

    Sharding          between steps     a step begins     it updates     it ends
    ----------------  ----------------  ----------------  -------------  -----------------
    "gradients",      all weights       -                 pieces         pieces of all are
    "optimizer"                                                          gathered
    "parameters"      pieces            pieces of all     pieces         all but pieces is
                                        are gathered                     freed

So weights cross processes once a step with each of them. To gather a stage's weights for each
microbatch would send them as often, and could not overlap.

Source: Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, stage 3, with what torchtitan
does beside pipelines: weights that are gathered stay until the step ends.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfparallel.hybrid.pieces_of_parts import gathered
from tfparallel.hybrid.pieces_of_processes import GroupWeight, StageWeight, WeightInPieces
from tfparallel.internals import record
from tfparallel.pipeline.stage_variables import is_on
from tfparallel.sharded.shard_view import current_numbers


class GatheredWeight(WeightInPieces):
    """A weight whose parts take memory in a step only.

    Attributes:
        is_apart: whether its pieces are stored, and parts are made of them; until it is, and for
            ever if a step makes it, it is as any `WeightInPieces`.
        is_here: whether the parts are there, and what the pieces are.
    """

    is_apart, is_here = False, True
    _is_here_for_python = True
    _has_newer_parts = False  # whether parts were assigned since the pieces were

    @property
    def has_pieces_elsewhere(self) -> bool:
        """Whether no process has all of it between steps."""
        return self.is_apart

    def is_in_pieces_here(self) -> bool:
        # While a step is traced, losses are tried in Python, for which it has filled nothing.
        is_filled = self.is_here and (self._is_here_for_python or not tf.executing_eagerly())
        return super().is_in_pieces_here() or (self.is_apart and not is_filled)

    def store_pieces(self) -> None:
        """From here on its pieces are stored; outside of steps."""
        self.is_apart = self._has_newer_parts = True
        self.free()

    # ---- in a step -------------------------------------------------------------------------------

    def fill(self, parts: Sequence[tf.Tensor]) -> None:
        """All copies of this process get the value of each part."""
        for copy in self.parts:
            for part, value in zip(copy, parts, strict=True):
                with tf.device(part.device):
                    _replace(part, tf.identity(value))
        self.is_here, self._has_newer_parts = True, False
        self._is_here_for_python = tf.executing_eagerly()

    def free(self) -> None:
        """The parts take no memory any more; what was assigned to them is in the pieces."""
        for copy in self.parts:
            for part, piece in zip(copy, self._pieces_of(copy), strict=True):
                if self._has_newer_parts:
                    piece.take()
                with tf.device(part.device):
                    _replace(part, _nothing(part))
        self.is_here = self._has_newer_parts = False

    def take(self) -> None:
        """Begins an update, for which the pieces are there but for what was assigned to parts."""
        if not self.is_apart or self._has_newer_parts:
            super().take()

    def publish(self, parts: Sequence[tf.Tensor]) -> None:
        """Ends an update behind which the step reads the weight."""
        if self.is_apart:
            self.fill(parts)
        else:
            super().publish(parts)

    def end_update(self) -> None:
        """Ends one behind which it does not."""
        self.is_here = self._has_newer_parts = False

    # ---- reading and assigning -------------------------------------------------------------------

    def copies(self) -> list[tuple]:
        if not self.is_in_pieces_here():
            return super().copies()
        return [self._pieces_of(copy) for copy in self.parts]

    def read_parts(self) -> list[tf.Tensor]:
        """As `SplitVariable`'s; outside of steps all processes have to ask together."""
        if not self.is_in_pieces_here() or current_numbers() is not None:
            return super().read_parts()
        extended = self.distribute_strategy.extended
        with record.stop_recording(), tf.device(extended._host_device):
            return gathered(extended.between_processes, self.places_of_parts(), self.read_stored())

    def _values_of_parts(self) -> list[tf.Tensor]:
        return self.read_parts() if self.is_in_pieces_here() else super()._values_of_parts()

    def _tape_variable(self) -> tf.Variable:
        return self.parts[self._copy() or 0][0]

    def numpy(self) -> np.ndarray:
        """The whole, of all processes."""
        return self.whole().numpy()

    def _to_parts(self, name: str, value: tf.Tensor | tf.IndexedSlices | tf.Variable) -> object:
        if not self.is_in_pieces_here():
            self._has_newer_parts = True
        return super()._to_parts(name, value)


class GatheredGroupWeight(GatheredWeight, GroupWeight):
    """That of groups of devices."""


class GatheredStageWeight(GatheredWeight, StageWeight):
    """That of pipelines."""

    def _move_copy(self, index: int, devices: Sequence[str]) -> None:
        """As the base's, of pieces: nothing is gathered to move it."""
        is_there = all(map(is_on, self.parts[index], devices))  # where functions read its pieces
        if is_there or not self.is_apart:
            super()._move_copy(index, devices)
            return
        with tf.init_scope():
            pieces = [piece.read_value() for piece in self._pieces_of(self.parts[index])]
            for part in self.parts[index]:
                self._being_updated.pop(id(part)).leave()
                _replace(part, tf.zeros(part.shape, part.dtype))
            super()._move_copy(index, devices)
            moved = self._pieces_of(self.parts[index])
            for part, piece, value in zip(self.parts[index], moved, pieces, strict=True):
                piece.assign(value)
                _replace(part, _nothing(part))


def _nothing(part: tf.Variable) -> tf.Tensor:
    """What takes no memory, of a shape that TensorFlow is not told: it is not the variable's."""
    empty = tf.zeros([0] * len(part.shape), part.dtype)
    return tf.raw_ops.PlaceholderWithDefault(input=empty, shape=tf.TensorShape(None))


def _replace(part: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value of another size than that of now."""
    tf.raw_ops.AssignVariableOp(resource=part.handle, value=value, validate_shape=False)
