"""What was given up cannot change anything any more: locks on the parameter servers.

The chief's call of a function that spans tasks may fail while a part of it still runs on a server:
the chief hears of a dead worker before the servers do. What is done next must not meet it there.

    a function on a server          the fence
    ----------------------          ---------
    takes the server's lock         takes the same lock: waits for what still runs
    checks the generation           raises the generation: what arrives later fails its check
    reads and changes variables
    lets go, also when it fails     all that ran before has ended

TensorFlow lets go of a lock when the call that holds it is over, in whichever way, and none of its
operations runs any more (`MutexLock`; `tf.CriticalSection` is made of it).
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import ResourceVariable, run_independently
from tfparallel.internals.graphs import run_after


class Fence:
    """The locks and generations of parameter servers.

    Args:
        devices: of the servers.

    Attributes:
        generation: int64 scalar, an argument of every guarded function.
        taken_by: who called guarded functions last; a reference that keeps nobody alive.
    """

    taken_by: Callable[[], Any]

    def __init__(self, devices: Sequence[str]):
        self._devices = devices
        self._locks: list[tf.Tensor] = []
        self._generations: list[tf.Variable] = []
        self.generation, self.taken_by = tf.constant(0, tf.int64), _nobody
        for device in devices:
            with tf.init_scope(), tf.device(device):
                name = f"tfparallel_{uuid.uuid4()}"  # an earlier chief's may be held still
                self._locks.append(tf.raw_ops.MutexV2(container="", shared_name=name))
                self._generations.append(ResourceVariable(self.generation))
        self._raise = tf.function(self._raise_generations, autograph=False)

    def guard(self, graph: tf.Graph, generation: tf.Tensor) -> None:
        """Guards what a function under construction does on the servers; called at its end.

        Args:
            graph: of the function.
            generation: its argument.
        """
        for i, device in enumerate(self._devices):
            handles = [inner for outer, inner in graph.captures if outer.device == device]
            guarded = {operation: None for inner in handles for operation in inner.consumers()}
            if not guarded:
                continue
            with tf.device(device):
                lock = tf.raw_ops.MutexLock(mutex=self._locks[i])
                with tf.control_dependencies([lock]):
                    is_given_up = tf.less(generation, self._generations[i].read_value())
                    check = tf.debugging.Assert(
                        tf.logical_not(is_given_up), ["This call was given up by the chief."]
                    )
                run_independently(graph, [lock.op, check])  # not after what they shall precede
                for operation in guarded:
                    run_after(operation, check)
                with tf.control_dependencies(list(guarded)):
                    tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    def raise_generation(self) -> None:
        """Waits until no guarded call runs on the servers, and lets none of them begin later."""
        self.generation = self.generation + 1
        self._raise(self.generation)

    def _raise_generations(self, generation: tf.Tensor) -> None:
        for i, device in enumerate(self._devices):
            with tf.device(device):
                lock = tf.raw_ops.MutexLock(mutex=self._locks[i])
                with tf.control_dependencies([lock]):
                    raised = self._generations[i].assign(generation, read_value=False)
                with tf.control_dependencies([raised]):
                    tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def _nobody() -> None:
    return None
