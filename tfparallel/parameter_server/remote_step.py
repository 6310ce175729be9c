"""One kind of step (train, test, predict) as two functions.

compute   on a worker: batch -> outputs, and effects, each handed in where it is needed; changes
          nothing
apply     on the parameter servers: effects -> changes; no worker takes part

A worker that dies in the first has changed nothing; in the second it is not needed any more.

Note: one first call at a time
------------------------------
A function that spans tasks is run by one of them, which calls the others. That task keeps what it
knows of every such function in a `std::vector`, and reads an element of it without a lock while it
makes a call (`EagerClusterFunctionLibraryRuntime::Run`). If another function is then run there for
the first time, the vector grows, the element is freed memory, and the call names a device of random
bytes: "InternalError: Unable to parse request", or worse. So a first call runs alone on its task.
On a worker `CallsOfWorkers` sees to that, among the threads of its devices; on the first parameter
server all calls are those that apply updates, of which there is one at a time. A call is a first
one on each device that it runs on, and for each set of devices that its arguments are on:
TensorFlow keeps what it has made of a function by these.
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.parameter_server.effects import Effect, Effects
from tfparallel.parameter_server.worker_state import WorkerStates


class RemoteStep:
    """A step function, traced for arguments of one structure.

    Args:
        run: called while tracing, with the arguments and the lane's number (a scalar int32
            tensor); gives the outputs.
        specs: nest of `TypeSpec` of the arguments.
        scope: makes the context in which effects are carried out.
        states: what workers remember from step to step.

    Attributes:
        has_effects: whether there is anything to apply.
        bytes_handed_in: the size of the effects, where all shapes are known; at least, elsewhere.
    """

    def __init__(
        self,
        run: Callable[[object, tf.Tensor], object],
        specs: object,
        scope: Callable[[], contextlib.AbstractContextManager],
        states: WorkerStates,
    ):
        traced: dict[str, Any] = {}

        def compute(worker: tf.Tensor, *flat: tf.Tensor) -> tuple:
            arguments = _pack(specs, flat)
            effects = traced["recorder"] = Effects()  # tf.function may trace twice
            with effects.recording():
                traced["outputs"] = run(arguments, worker)
                traced["effects"] = [effect.tensors for effect in effects.effects]
            flat_outputs = tf.nest.flatten(traced["outputs"], expand_composites=True)
            flat_outputs = [tf.convert_to_tensor(output) for output in flat_outputs]
            traced["packed"] = [_is_packed(output) for output in flat_outputs]
            flat_effects = tf.nest.flatten(traced["effects"], expand_composites=True)
            handed_in = _each_on(_flat_devices(effects.effects), flat_effects)
            return (*_pack_scalars(flat_outputs), handed_in, [tensor for _, tensor in effects.kept])

        def apply(*flat: tf.Tensor) -> None:
            with scope():
                traced["recorder"].carry_out(
                    tf.nest.pack_sequence_as(traced["effects"], flat, expand_composites=True)
                )

        self._compute = tf.function(compute, autograph=False).get_concrete_function(
            tf.TensorSpec((), tf.int32), *_flatten(specs)
        )
        self._traced, self._states = traced, states
        self._number = next(_numbers)
        values = self._compute.structured_outputs[2]
        self.has_effects = bool(values)
        self.bytes_handed_in = sum((v.shape.num_elements() or 0) * v.dtype.size for v in values)
        if self.has_effects:
            value_specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
            self._apply = tf.function(apply, autograph=False).get_concrete_function(*value_specs)

    def call(self, lane: int, arguments: object) -> Hashable:
        """What TensorFlow knows a call of `compute` by, once it has run."""
        tensors = [*_flatten(arguments), *self._states.tensors_of(lane)]
        return self._number, lane, *(tensor.backing_device for tensor in tensors)

    def compute(self, lane: int, device: str, arguments: object) -> tuple[list, list, list]:
        """Runs the worker's part on the device of a lane.

        Returns:
            Remote tensors: outputs on the worker (to fetch), effects on parameter servers, and
            what the worker remembers if the step counts (`keep`).
        """
        # Made here: making a tensor elsewhere holds Python's lock, for ever if a task is stopped.
        number = tf.constant(lane)
        with self._states.of_worker(lane, device), tf.device(device):
            *outputs, effects, kept = self._compute(number, *_flatten(arguments))
        return outputs, effects, kept

    def keep(self, lane: int, kept: list) -> None:
        """The step counts: `lane` remembers what `compute` gave."""
        self._states.keep(lane, [slot for slot, _ in self._traced["recorder"].kept], kept)

    def apply(self, device: str, effects: list) -> None:
        """Makes the changes; `device` is that of a parameter server, `effects` are there."""
        with tf.device(device):
            self._apply(*effects)

    def fetch(self, device: str, outputs: Sequence) -> object:
        """The outputs of `compute` on this process's `device`, as `run` gave them."""
        packed, rest = outputs
        with tf.device(device):
            scalars = iter(tf.unstack(tf.identity(packed), packed.shape[0]))
            others = iter([tf.identity(tensor) for tensor in rest])
            flat = [next(scalars if p else others) for p in self._traced["packed"]]
        return tf.nest.pack_sequence_as(self._traced["outputs"], flat, expand_composites=True)


_numbers = itertools.count()


def _flatten(nest: object) -> list:
    flat = tf.nest.flatten(nest, expand_composites=True)
    return [leaf for leaf in flat if leaf is not None]


def _pack(structure: object, flat: Iterable) -> object:
    """`flat` in the form of `structure`, whose leaves may be None."""
    leaves = iter(flat)
    flat = [
        None if leaf is None else next(leaves)
        for leaf in tf.nest.flatten(structure, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)


def _flat_devices(effects: Sequence[Effect]) -> list[str]:
    """Where each component of the tensors of `effects` is needed."""
    return [
        device
        for effect in effects
        for tensor, device in zip(effect.tensors, effect.devices, strict=True)
        for _ in tf.nest.flatten(tensor, expand_composites=True)
    ]


def _each_on(devices: Sequence[str], tensors: Sequence[tf.Tensor]) -> list:
    copies = []
    for device, tensor in zip(devices, tensors, strict=True):
        with tf.device(device):
            copies.append(tf.identity(tensor))
    return copies


def _is_packed(output: tf.Tensor) -> bool:
    return output.dtype == tf.float32 and output.shape.rank == 0


def _pack_scalars(flat_outputs: list) -> tuple[tf.Tensor, list]:
    """All scalars as one vector, which a single call fetches, and the other outputs."""
    scalars = [output for output in flat_outputs if _is_packed(output)]
    others = [output for output in flat_outputs if not _is_packed(output)]
    return tf.stack(scalars) if scalars else tf.zeros([0]), others
