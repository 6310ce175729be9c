"""Weights in pieces that each replica also keeps whole, for the layers of a step.

    Sharding          stored                    layers read
    ----------------  ------------------------  ------------------------------------------
    "parameters"      pieces                    what is put together at each call
    "gradients",      pieces, and beside them   what was put together once, where the step
    "optimizer"       what layers read          began; pieces, once they have been updated

So weights are sent once a step, however many microbatches there are, for the memory of a whole copy
on each device. All else (gradients, slots, updates, files) is that of pieces: what is kept is made
anew at the beginning of each step, and nobody but a step reads it.

Source: Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, stages 1 and 2.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.hybrid.split_stage_variable import SplitStageVariable
from tfparallel.internals import ResourceVariable, record
from tfparallel.internals.keras_layers import behind, trained_by
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.sharded.options import Sharding
from tfparallel.tensor_parallel.holds_parts import HoldsParts
from tfparallel.tensor_parallel.known_parts import joined, put_together
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import SplitVariable


class KeepsWholes(HoldsParts):
    """Mixed into an extended whose weights are in pieces.

    Attributes:
        sharding: what is in pieces; None for nothing.
    """

    sharding: Sharding | None

    @property
    def _keeps(self) -> bool:
        return self.sharding is not None and self.sharding.shard != "parameters"

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        """Puts the weights of `model` together before its layers are called, where they are kept.

        Nothing is read of what is kept outside of it.
        """
        with super()._step_of(model):
            kept = _kept_of(model.variables) if self._keeps else []
            try:
                for variable in kept:
                    variable.keep()
                yield
            finally:
                for variable in kept:
                    variable.is_kept = False

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        if self._keeps:
            optimizer: Any = apply.__self__  # type: ignore[attr-defined]
            for variable in _kept_of(variables or trained_by(optimizer)):
                variable.is_kept = False  # from here on the pieces are newer
        return super()._apply_reduced(apply, gradients, variables)


def _kept_of(variables: Iterable) -> list["KeptWhole"]:
    every = [behind(variable) for variable in variables]
    return [each for each in every if isinstance(each, KeptWhole) and each.shards > 1]


class KeptWhole(SplitVariable):
    """As `SplitVariable`; what layers read of pieces may be kept, by each replica.

    Attributes:
        is_kept: whether what is kept is what the pieces are, in the step that is traced or runs.
    """

    is_kept = False
    _wholes: list[tuple] | None = None  # of each replica, a variable for each part

    def keep(self) -> None:
        """Puts the parts of each replica together, on its devices; outside of replicas."""
        if self._wholes is None:
            self._wholes = [self._new_wholes(i) for i in range(len(self.parts) * self.shards)]
        for replica, wholes in enumerate(self._wholes):
            copy = self.parts[replica // self.shards]
            for k, whole in enumerate(wholes):
                with tf.device(whole.device), record.stop_recording():
                    pieces = [piece.read_value() for piece in copy[self._pieces_of(k)]]
                    whole.assign(put_together(pieces, self._rows_of_pieces(k)))
        self.is_kept = True

    def _pieces_of(self, part: int) -> slice:
        return slice(part * self.shards, (part + 1) * self.shards)

    def _rows_of_pieces(self, part: int) -> Rows:
        return Rows(self.rows.dim, self.stored.sizes[self._pieces_of(part)], self.rows.blocks)

    def _new_wholes(self, replica: int) -> tuple:
        """Variables for the parts, on the devices where the replica has its pieces of them."""
        copy = self.parts[replica // self.shards]
        wholes = []
        for k, size in enumerate(self.rows.sizes):
            piece = copy[k * self.shards + replica % self.shards]
            shape = self.shape.as_list()
            shape[self.rows.dim] = size
            with tf.init_scope(), tf.device(piece.device):
                new = ResourceVariable(tf.zeros(shape, self.dtype), trainable=False)
            new._distributed_container = weakref.ref(self)
            new.handle._distributed_container = weakref.ref(self)
            wholes.append(new)
        return tuple(wholes)

    def read_parts(self) -> list[tf.Tensor]:
        """As `SplitVariable`'s; of what the calling replica keeps, where that is up to date."""
        replica = self._replica()
        if not self.is_kept or self._wholes is None or replica is None:
            return super().read_parts()
        values = []
        with record.stop_recording():
            for whole in self._wholes[replica]:
                with tf.device(whole.device):
                    values.append(whole.read_value())
        return values

    def _to_parts(self, name: str, value: tf.Tensor | tf.IndexedSlices | tf.Variable) -> object:
        self.is_kept = False
        return super()._to_parts(name, value)

    def bytes_kept(self) -> dict[str, int]:
        """By device what is kept there beside the pieces."""
        kept: dict[str, int] = {}
        for whole in (each for own in self._wholes or [] for each in own):
            size = whole.shape.num_elements() * self.dtype.size
            kept[whole.device] = kept.get(whole.device, 0) + size
        return kept


class KeptStageVariable(KeptWhole, SplitStageVariable):
    """As `SplitStageVariable`; a stage's function may take what its pipeline keeps for parts."""

    def _number_kept(self, variable: tf.Variable) -> tuple[int, int] | None:
        """Of which pipeline and part `variable` is the whole; None for none."""
        for pipeline, wholes in enumerate(self._wholes or []):
            for k, whole in enumerate(wholes):
                if whole is variable:
                    return pipeline, k
        return None

    @property
    def num_parts(self) -> int:  # type: ignore[override]
        """Of each copy: pieces, and behind them what is kept."""
        return len(self.stored.sizes) + len(self.rows.sizes)

    def copy_in(self, pipeline: int, like: tf.Variable) -> tf.Variable:
        """The same piece, or part that is kept, in another pipeline."""
        kept = self._number_kept(like)
        if kept is None or self._wholes is None:
            return super().copy_in(pipeline, like)
        return self._wholes[pipeline][kept[1]]

    def place_of(self, part: tf.Variable) -> tuple[int, int]:
        """The number of the copy, and that in the copy, of a piece or of what is kept."""
        kept = self._number_kept(part)
        if kept is None:
            return super().place_of(part)
        return kept[0] // self.shards, len(self.stored.sizes) + kept[1]

    def gradient_of_whole(self, gradients: Sequence) -> Gradient | None:
        """Of those of pieces, or of those of what is kept: a function reads one or the other."""
        count = len(self.stored.sizes)
        of_kept = gradients[count:]
        if all(gradient is None for gradient in of_kept):
            return super().gradient_of_whole(gradients[:count])
        present = [gradient for gradient in of_kept if gradient is not None]
        if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
            return self.sparse_gradient(self.rows, of_kept)
        parts = []
        for gradient, whole in zip(of_kept, (self._wholes or [()])[0], strict=True):
            if gradient is None:
                gradient = tf.zeros(whole.shape, whole.dtype)
            with tf.device(gradient.device):
                parts.append(tf.identity(tf.convert_to_tensor(gradient)))
        return joined(parts, self.rows.dim, self.rows.blocks)
