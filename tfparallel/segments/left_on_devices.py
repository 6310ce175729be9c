"""Tensors that a function leaves on other devices than that of its call.

TensorFlow sends what a called function takes and returns through the device of the call. Where that
is not who needs it, the function writes it to an array that is on its device, and returns a number:

    called on device 0         device 1
    forward                    writes what it keeps there
    backward                   reads it, and the array ends

An array is a resource, of which a call takes the handle. It ends with its step at the latest.
"""

import collections
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from tfparallel.internals import FuncGraph
from tfparallel.segments.graph_copy import GraphFunction


class LeftOnDevices:
    """Which of some tensors are left, and how.

    Args:
        tensors: of one graph.
        devices: of those that are made on one of these, the floating ones are left.
        handles: by the `id` of arguments of the graph, what they are given: a variable's value is
            made where the variable is.
        are_read_once: whether each is read once, and takes no memory then.

    Attributes:
        others: the numbers of the tensors that are not left.
        num_arrays: of a call.
    """

    def __init__(
        self,
        tensors: Sequence[tf.Tensor],
        devices: Collection[str],
        handles: Mapping[int, tf.Tensor] | None = None,
        are_read_once: bool = False,
    ):
        self._shapes, self._are_read_once = [tensor.shape for tensor in tensors], are_read_once
        self._at: dict[tuple[str, tf.DType], list[int]] = collections.defaultdict(list)
        self.others = []
        for i, tensor in enumerate(tensors):
            device = _device_of(tensor, handles or {})
            if device in devices and tensor.dtype.is_floating:
                self._at[device, tensor.dtype].append(i)
            else:
                self.others.append(i)
        self.num_arrays = len(self._at)
        self._readers: list[GraphFunction] = []

    def new_arrays(self, moves: Mapping[str, str]) -> list[tf.Tensor]:
        """Handles of empty arrays, for one call.

        Args:
            moves: which device does what one in the functions does, where that is another.
        """
        handles = []
        for (device, dtype), at in self._at.items():
            with tf.device(moves.get(device, device)):
                handle, _ = tf.raw_ops.TensorArrayV3(
                    size=len(at), dtype=dtype, clear_after_read=self._are_read_once
                )
            handles.append(handle)
        return handles

    def placeholders(self) -> list[tf.Tensor]:
        """For handles of arrays, in the graph under construction."""
        return [tf.compat.v1.placeholder(tf.resource) for _ in self._at]

    def write(self, handles: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """For each array a number that is there when those of `tensors` are in it."""
        written = []
        for ((device, _), at), handle in zip(self._at.items(), handles, strict=True):
            with tf.device(device):
                flow = tf.constant(0.0)
                for index, i in enumerate(at):
                    flow = tf.raw_ops.TensorArrayWriteV3(
                        handle=handle, index=index, value=tensors[i], flow_in=flow
                    )
            written.append(flow)
        return written

    def read(
        self, handles: Sequence[tf.Tensor], written: Sequence[tf.Tensor]
    ) -> dict[int, tf.Tensor]:
        """The tensors by their numbers, within a function, where they were left.

        Args:
            handles: of arrays.
            written: what `write` has returned.
        """
        tensors: dict[int, tf.Tensor] = {}
        places = zip(self._at.items(), handles, written, strict=True)
        for ((device, dtype), at), handle, flow in places:
            with tf.device(device):
                tensors |= zip(at, self._read(at, dtype, handle, flow), strict=True)
        return tensors

    def read_by_calls(
        self, handles: Sequence[tf.Tensor], written: Sequence[tf.Tensor], moves: Mapping[str, str]
    ) -> dict[int, tf.Tensor]:
        """As `read`, by a call for each array; `moves` as of `new_arrays`."""
        if not self._readers:
            self._readers = [self._reader(at, dtype) for (_, dtype), at in self._at.items()]
        tensors: dict[int, tf.Tensor] = {}
        places = zip(self._at.items(), self._readers, handles, written, strict=True)
        for ((device, _), at), reader, handle, flow in places:
            values = reader(moves.get(device, device), [handle, flow])
            tensors |= zip(at, values, strict=True)
        return tensors

    def _reader(self, at: Sequence[int], dtype: tf.DType) -> GraphFunction:
        graph = FuncGraph("tfparallel_left")
        with graph.as_default():
            handle = tf.compat.v1.placeholder(tf.resource)
            flow = tf.compat.v1.placeholder(tf.float32, [])
            values = self._read(at, dtype, handle, flow)
        return GraphFunction("tfparallel_left", graph, [handle, flow], values)

    def _read(
        self, at: Sequence[int], dtype: tf.DType, handle: tf.Tensor, flow: tf.Tensor
    ) -> list[tf.Tensor]:
        values = []
        # Two operations, and not one for each.
        for index, i in zip(tf.unstack(tf.range(len(at))), at, strict=True):
            value = tf.raw_ops.TensorArrayReadV3(
                handle=handle, index=index, flow_in=flow, dtype=dtype
            )
            value.set_shape(self._shapes[i])
            values.append(value)
        return values

    def close(
        self, handles: Sequence[tf.Tensor], read: Mapping[int, tf.Tensor]
    ) -> list[tf.Operation]:
        """Has the arrays end once `read` is."""
        closed = []
        for ((device, _), at), handle in zip(self._at.items(), handles, strict=True):
            with tf.device(device), tf.control_dependencies([read[i] for i in at]):
                closed.append(tf.raw_ops.TensorArrayCloseV3(handle=handle))
        return closed


def _device_of(tensor: tf.Tensor, handles: Mapping[int, tf.Tensor]) -> str:
    resources = [x for x in tensor.op.inputs if x.dtype == tf.resource]
    return next((handles.get(id(x), x).device for x in resources), tensor.op.device)
