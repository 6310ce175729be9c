"""The devices that compute one replica, as the rule of a layer sees them."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.internals.keras_state import autocast
from tfparallel.tensor_parallel.exchanges import (
    copy_on_each,
    gather_on_each,
    met,
    scatter_sum,
    sum_of,
)
from tfparallel.tensor_parallel.known_parts import joined, known_parts, on_device, parts_of
from tfparallel.tensor_parallel.ranks import ranks_of_caller
from tfparallel.tensor_parallel.rows import Rows, even_rows
from tfparallel.tensor_parallel.split_variable import split_of

_thread = threading.local()
_COPIES = "_tfparallel_copies"  # attribute of a tensor in parts: the whole on each device


@contextlib.contextmanager
def shared_inputs() -> Iterator[None]:
    """Within it, layers by columns of one tensor share its copies on the devices.

    Around what starts no tape of its own: that one would not see where the copies come from.
    """
    before = getattr(_thread, "shared", None)
    _thread.shared = {}
    try:
        yield
    finally:
        _thread.shared = before


class Group:
    """What a rule computes with.

    Args:
        devices: one for each part.
        output_layout: which axis of the mesh the layout names for each dim of the layer's output.
        model_axis: that of the group.
        cuts_sequences: whether `[rows, positions, features]` is in parts along positions between
            a layer by rows and one by columns.
    """

    def __init__(
        self,
        devices: Sequence[str],
        output_layout: Sequence[str | None] | None = None,
        model_axis: str | None = None,
        cuts_sequences: bool = False,
    ):
        self.devices = tuple(devices)
        self._output_layout, self._model_axis = output_layout, model_axis
        self._cuts_sequences = cuts_sequences

    def dim_of_output(self, layer: keras.Layer, rank: int) -> int | None:
        """The dim along which the layout asks for the layer's output in parts; None for none.

        Raises:
            ValueError: for a layout that is not of `rank` dims.
        """
        layout = self._output_layout
        if layout is None or self._model_axis not in layout or len(self.devices) == 1:
            return None
        if len(layout) != rank:
            raise ValueError(
                f"The layout of '{layer.path}/output' must name an axis, or None, for each of "
                f"{rank} dims. Received: {tuple(layout)}."
            )
        return list(layout).index(self._model_axis)

    def rows(self, variable: keras.Variable) -> Rows | None:
        """How a Keras variable is in parts, one for each device; None for any other, and no one's.

        A variable that is in one part is stored in pieces of that, and computed with as a whole.
        """
        split = split_of(variable)
        if split is None or len(split.rows.sizes) != len(self.devices):
            return None
        return split.rows

    def read(self, variable: keras.Variable) -> list[tf.Tensor]:
        """The parts of a split Keras variable, each on its device, in the layer's dtype."""
        split = split_of(variable)
        if split is None:
            raise ValueError(f"Expected a variable in parts. Received: {variable.path}.")
        values = []
        for device, value in zip(self.devices, split.part_values(), strict=True):
            with tf.device(device):
                values.append(autocast(variable, value))
        return values

    def read_or_slice(self, variable: keras.Variable, rows: Rows) -> list[tf.Tensor]:
        """The parts of a Keras variable along `rows`: its own, or slices of the whole."""
        if self.rows(variable) == rows:
            return self.read(variable)
        return parts_of(tf.convert_to_tensor(variable), rows)

    def rows_of_sequence(self, shape: tf.TensorShape) -> Rows | None:
        """How a tensor is to be in parts along positions; None where it is not to be."""
        count = len(self.devices)
        if not self._cuts_sequences or len(shape) != 3 or (shape[1] or 0) < count:
            return None
        return even_rows(1, shape[1], count)

    def scattered(self, terms: Sequence[tf.Tensor], rows: Rows) -> tf.Tensor:
        """The sum of a tensor on each device, in parts."""
        return joined(scatter_sum(terms, rows, self.devices), rows.dim)

    def on_each(self, tensor: tf.Tensor) -> tf.Tensor | list[tf.Tensor]:
        """A tensor for all devices; one in parts along positions is put together on each."""
        rows = self.known_rows(tensor)
        if rows is None or not self._cuts_sequences or rows.dim != 1 or len(tensor.shape) != 3:
            return self._shared(tensor)
        copies = getattr(tensor, _COPIES, None)
        if copies is None:  # query, key and value read the same
            copies = gather_on_each(self.parts(tensor, rows), rows, self.devices)
            setattr(tensor, _COPIES, copies)
        return copies

    def _shared(self, tensor: tf.Tensor) -> tf.Tensor | list[tf.Tensor]:
        shared = getattr(_thread, "shared", None)
        if shared is None or not tensor.dtype.is_floating or len(self.devices) == 1:
            return tensor
        key = (id(tensor), self.devices)
        if key not in shared:  # the tensor is kept, so that its id stays its own
            shared[key] = tensor, copy_on_each(tensor, self.devices)
        return shared[key][1]

    def known_rows(self, tensor: tf.Tensor) -> Rows | None:
        """How `tensor` is in parts already; None for one that is not."""
        known = known_parts(tensor)
        return None if known is None or len(known[1]) != len(self.devices) else known[0]

    def parts(self, tensor: tf.Tensor, rows: Rows) -> list[tf.Tensor]:
        """The parts of `tensor` along `rows`: those that it is in already, or slices."""
        return parts_of(tensor, rows)

    def compute(
        self, function: Callable, *inputs: Sequence[tf.Tensor] | tf.Tensor
    ) -> list[tf.Tensor]:
        """`function` of each part on its device, forward and backward.

        Args:
            function: of one tensor for each of `inputs`; returns a tensor.
            inputs: for each a list with a tensor for every device, or one tensor for all of them.
        """
        lists = [list(x) if isinstance(x, (list, tuple)) else self._for_all(x) for x in inputs]
        return [
            on_device(device, function, *each)
            for device, *each in zip(self.devices, *lists, strict=True)
        ]

    def _for_all(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """One tensor for all devices; of ranks, its gradient is the sum of theirs."""
        if ranks_of_caller() is None or not tensor.dtype.is_floating:
            return [tensor] * len(self.devices)
        return copy_on_each(tensor, self.devices)

    @property
    def is_of_ranks(self) -> bool:
        """Whether each device is another process's, which traces the step, too."""
        return ranks_of_caller() is not None

    def one_of(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """A part that is computed here, for what is alike in all of them, such as their batch."""
        ranks = ranks_of_caller()
        return parts[0 if ranks is None else ranks.index]

    def met(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Tensors of one shape, one of each device, where one computes with all of them."""
        return met(parts)

    def joined(self, parts: Sequence[tf.Tensor], dim: int) -> tf.Tensor:
        """The whole of which these are the parts; not computed unless something reads it."""
        return joined(parts, dim)

    def summed(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Their sum, on the replica's own device."""
        return sum_of(parts, self.devices)
