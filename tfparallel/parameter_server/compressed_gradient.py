"""A gradient that a worker hands in in fewer bytes, and the servers restore.

    worker                                        parameter server
    gradient + residual --compress--> payload --> decompress --> the optimizer's update
    residual = what the payload leaves out

The residual is the worker's own. It is of the gradient of the loss, not of the scaled loss: a step
may be applied under another loss scale than the next one is computed with.
"""

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.communication.compression.buckets import Ranks
from tfparallel.communication.compression.cast import Cast
from tfparallel.communication.compression.compression_report import (
    CompressionReport,
    VariableReport,
)
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.compression.names import as_compressor
from tfparallel.communication.compression.quantize import QSGD, TernGrad
from tfparallel.communication.compression.sign_sgd import SignSGD
from tfparallel.communication.compression.top_k import TopK
from tfparallel.coordination.lost_tasks import speaks_of_lost_task
from tfparallel.internals import BaseOptimizer
from tfparallel.internals.keras_layers import trained_by
from tfparallel.parameter_server.effects import Effects
from tfparallel.parameter_server.worker_state import Remembered, WorkerStates

_ALONE = Ranks(0, 1)
# Those whose payload says all: RandomK's places, PowerSGD's rounds and Adaptive's plan are things
# that ranks agree on, and asynchronous workers agree on nothing.
_SUPPORTED = (Cast, TopK, QSGD, TernGrad, SignSGD)


def checked_compressor(compression: Compressor | str | None) -> Compressor | None:
    """The compressor that `compression` stands for.

    Raises:
        ValueError: for one that needs ranks which train in step.
    """
    if compression is None:
        return None
    compressor = as_compressor(compression)
    if not isinstance(compressor, _SUPPORTED):
        names = ", ".join(each.__name__ for each in _SUPPORTED)
        raise ValueError(
            f"`compression` of a parameter server strategy must be one of {names}: each worker "
            f"hands in alone what others have no part in. Received: {compressor!r}."
        )
    return compressor


@dataclass(frozen=True)
class Payload:
    """What is handed in for one gradient.

    Attributes:
        tensors: the payload, or the gradient itself.
        restore: makes the gradient of them, on the servers, given the loss scale that the worker
            had and the one that the gradient is to have; None where losses are not scaled.
    """

    tensors: list
    restore: Callable[[Sequence, Any, Any], Any]


def as_it_is(gradient: tf.Tensor | tf.IndexedSlices) -> Payload:
    """A gradient that is not compressed."""

    def restore(
        tensors: Sequence, scale: tf.Tensor | None, scale_now: object
    ) -> tf.Tensor | tf.IndexedSlices:
        (arrived,) = tensors
        if scale is None:
            return arrived
        factor = tf.cast(scale_now / scale, arrived.dtype)
        if isinstance(arrived, tf.IndexedSlices):
            return tf.IndexedSlices(arrived.values * factor, arrived.indices, arrived.dense_shape)
        return arrived * factor

    return Payload([gradient], restore)


class GradientsHandedIn:
    """Compresses gradients while steps are traced, and knows what that saves.

    Args:
        compressor: checked.
        states: where residuals are.
    """

    def __init__(self, compressor: Compressor, states: WorkerStates):
        self._compressor, self._states = compressor, states
        self._rows: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def hand_in(
        self,
        effects: Effects,
        optimizer: BaseOptimizer,
        variable: keras.Variable,
        gradient: tf.Tensor | tf.IndexedSlices,
        scale: tf.Tensor | None,
    ) -> Payload:
        """What to hand in for the gradient of `variable`; called while a step is traced.

        Rows of a table (`IndexedSlices`) go as they are: few of many, as top-k would choose them.

        Args:
            effects: of the step; take the new residual.
            optimizer: whose update it is.
            variable: a Keras variable of the optimizer.
            gradient: tensor or `IndexedSlices`; of the loss times `scale`.
            scale: the loss scale, or None.
        """
        is_compressed = (
            isinstance(gradient, tf.Tensor)
            and gradient.dtype.is_floating
            and gradient.shape.is_fully_defined()
            and self._compressor.applies_to(gradient.shape)
        )
        rows = self._rows.setdefault(optimizer, {})
        is_rows = isinstance(gradient, tf.IndexedSlices)
        sent_as = repr(self._compressor) if is_compressed else "rows" if is_rows else "uncompressed"
        rows[variable.path] = self._row(variable, sent_as)
        if not is_compressed:
            return as_it_is(gradient)
        return self._compressed(effects, optimizer, variable, gradient, scale)

    def report(self) -> list[CompressionReport]:
        """What a worker hands in in one step, for each optimizer that has trained."""
        name = repr(self._compressor)
        return [CompressionReport(name, list(rows.values()), []) for rows in self._rows.values()]

    def memory_of(
        self, optimizer: object, num_workers: int, is_there: Callable[[int], bool]
    ) -> "CompressionMemory":
        """What workers remember of an optimizer's gradients."""
        return CompressionMemory(self._compressor, self._states, optimizer, num_workers, is_there)

    def _row(self, variable: keras.Variable, sent_as: str) -> VariableReport:
        shape = tuple(variable.shape)
        sent = dense = 4 * tf.TensorShape(shape).num_elements()
        if sent_as == repr(self._compressor):
            sent = self._compressor.payload_bytes(shape)
        return VariableReport(variable.path, shape, sent_as, sent, dense)

    def _compressed(
        self,
        effects: Effects,
        optimizer: BaseOptimizer,
        variable: keras.Variable,
        gradient: tf.Tensor,
        scale: tf.Tensor | None,
    ) -> Payload:
        compressor, dtype = self._compressor, gradient.dtype
        position = [id(v) for v in trained_by(optimizer)].index(id(variable))
        state, slots = self._state(optimizer, position, gradient.shape)
        value = tf.cast(gradient, tf.float32)
        is_unscaled = scale is not None and "residual" in state
        if is_unscaled:
            value = value / tf.cast(scale, tf.float32)
        if "residual" in state:
            value = value + state["residual"]
        payload, context = compressor.compress(value, state, _ALONE)
        if "residual" in state:
            left_out = value - compressor.decompress(payload, context)
            is_finite = tf.math.is_finite(tf.reduce_sum(left_out))  # else the step will be skipped
            effects.keep(slots["residual"], tf.where(is_finite, left_out, state["residual"]))
        if "counter" in state:
            effects.keep(slots["counter"], state["counter"] + [0, 1])

        def restore(tensors: Sequence, scale_then: tf.Tensor, scale_now: tf.Tensor) -> tf.Tensor:
            restored = compressor.decompress(tensors, context)
            if scale is not None:
                factor = scale_now if is_unscaled else scale_now / scale_then
                restored = restored * tf.cast(factor, tf.float32)
            return tf.cast(restored, dtype)

        return Payload(list(payload), restore)

    def _state(self, optimizer: object, position: int, shape: tf.TensorShape) -> tuple[dict, dict]:
        def initial_of(worker: int) -> dict[str, tf.Tensor]:
            seed = zlib.crc32(f"{position} {tuple(shape)} {worker}".encode())  # rounds by itself
            return self._compressor.initial_state(shape, seed)

        state, slots = {}, {}
        with tf.init_scope():
            likes = {key: (t.shape, t.dtype) for key, t in initial_of(0).items()}
        for key, like in likes.items():

            def initial(worker: int, key: str = key) -> tf.Tensor:
                return initial_of(worker)[key]

            slots[key] = Remembered(weakref.ref(optimizer), f"{position}/{key}", initial)
            state[key] = self._states.read(slots[key], tf.TensorSpec(*like))
        return state, slots


@dataclass(frozen=True)
class CompressionMemory:
    """What all workers remember of the gradients of one optimizer, for backups.

    Attributes:
        compressor: whose memory it is.
        states: of the workers.
        optimizer: built.
        num_workers: how many there are now.
        is_there: whether a worker, by number, answers.
    """

    compressor: Compressor
    states: WorkerStates
    optimizer: Any
    num_workers: int
    is_there: Callable[[int], bool]

    def state(self) -> dict[str, np.ndarray]:
        """Arrays by "worker/position of the variable/name"; called between steps.

        What a worker that does not answer remembers is lost with it.
        """
        arrays: dict[str, np.ndarray] = {}
        for worker, of_name in self.states.of_owner(self.optimizer).items():
            try:
                if self.is_there(worker):
                    of_worker = {f"{worker}/{name}": np.asarray(v) for name, v in of_name.items()}
                    arrays.update(of_worker)
            except tf.errors.OpError as error:
                if not speaks_of_lost_task(error):
                    raise
        return arrays

    def set_state(self, states: Sequence[Mapping[str, np.ndarray]], num_processes: int) -> None:
        """Sets what `state` returned on the chief, of as many workers or others.

        The residuals of workers that are no more go to others: their sum is what gradients lack.

        Raises:
            ValueError: if it is of another compressor or model.
        """
        del num_processes
        values: dict[int, dict[str, np.ndarray]] = {}
        for path, array in states[0].items():
            worker, name = path.split("/", 1)
            self._check(name, array)
            of_worker = values.setdefault(int(worker) % self.num_workers, {})
            is_residual = name.endswith("/residual")
            of_worker[name] = (
                of_worker[name] + array if name in of_worker and is_residual else array
            )
        self.states.restore(self.optimizer, values)

    def _check(self, name: str, array: np.ndarray) -> None:
        position, key = name.split("/")
        variables = trained_by(self.optimizer)
        shape = tuple(variables[int(position)].shape) if int(position) < len(variables) else None
        known = self.compressor.initial_state(shape, 0) if shape else {}
        if key not in known or tuple(known[key].shape) != array.shape:
            raise ValueError(f"which remembers {name} of shape {array.shape}")
