"""Steps that all workers share, done again when a worker was lost in the middle of one.

    copies       steps                     a worker dies        it is back
    C := V0      V0 -> V1 -> V2 -> V3      V3 -> half of V4     V := C;  V0 -> V1 -> V2 -> V3 -> V4
    C := V8      ...

Some of a step's changes may have been made when it fails. So the servers keep copies of what
training changes, and the chief remembers what the steps since were called with: it goes back to the
copies and does those steps again, with the same rows and seeds. What comes of it is what would have
come of it.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfparallel.coordination.machine import THIS_MACHINE, Machine
from tfparallel.parameter_server.fence import Fence
from tfparallel.parameter_server.recovery import Recovery
from tfparallel.parameter_server.variable_copies import VariableCopies, changed_by

# Of one step. Some may fail although all tasks are there: until the watch has seen a task that went
# on, it cuts connections.
_TRIES = 10
_PAUSE_S = 0.5


class RepeatedSteps:
    """Runs the steps of one model, again if need be. Its copies live as long as it does.

    Args:
        fence: of the parameter servers, for all models.
        recovery: knows who is gone.
        copy_every_steps: after how many steps copies are made anew.
        waiting: gives a context for calls that wait for all workers.
        machine: what the chief runs on.
        copies: of the variables; by default made on the servers.
    """

    def __init__(
        self,
        fence: Fence,
        recovery: Recovery,
        copy_every_steps: int,
        waiting: Callable[[], contextlib.AbstractContextManager],
        machine: Machine = THIS_MACHINE,
        copies: VariableCopies | None = None,
    ):
        self._recovery, self._copy_every_steps = recovery, copy_every_steps
        self._waiting, self._machine = waiting, machine
        self._fence, self._copies = fence, VariableCopies(fence) if copies is None else copies
        self._since: list[tuple[Callable, Any]] = []  # steps that the copies do not have
        self._are_old = True
        self.num_repeated = 0

    def guarded(self, step: Callable) -> Callable:
        """`step`, a function of tensors, as a function of the fence's generation and those."""

        def guarded(generation: tf.Tensor, tensors: object) -> object:
            outputs = step(tensors)
            self._fence.guard(tf.compat.v1.get_default_graph(), generation)
            return outputs

        return guarded

    def cover(self, graph: tf.Graph) -> None:
        """Copies what the function of this graph changes, from now on."""
        if self._copies.cover(changed_by(graph)):
            self._are_old = True

    def changed_elsewhere(self) -> None:
        """A variable was changed by no step: going back to the copies would undo it."""
        self._are_old = True

    def forget(self) -> None:
        """No step is done again: what they were called with, arrays among it, may go."""
        self._since, self._are_old = [], True

    def run(self, function: Callable, tensors: Callable[[], object]) -> object:
        """The outputs of one step.

        Args:
            function: is `guarded`, and covered.
            tensors: gives what it is called with, anew where the step is done again.

        Raises:
            ServerLost, WorkerLost: where the step cannot be done again.
        """
        copies = self._copies
        if self._fence.taken_by() is not self:  # another model's steps may have changed ours
            self._fence.taken_by, self._are_old = weakref.ref(self), True
        if self._are_old or len(self._since) >= self._copy_every_steps:
            self._until_done(copies.take, copies.take, lambda: None)
            self._since, self._are_old = [], False
        self._since.append((function, tensors))
        generation = self._fence.generation
        return self._until_done(
            lambda: function(generation, tensors()), copies.restore, self._repeat
        )

    def _repeat(self) -> object:
        """Does all steps since the copies; returns the outputs of the last."""
        outputs = None
        for function, tensors in self._since:
            outputs = function(self._fence.generation, tensors())
        self.num_repeated += len(self._since)
        tf.get_logger().warning(
            "all workers are there: did %d steps again, of which one was not done before.",
            len(self._since),
        )
        return outputs

    def _until_done(self, call: Callable, prepare: Callable, again: Callable) -> Any:
        """`call()`; where it fails and everyone is there, `prepare()` and `again()`.

        Args:
            call, again: of which the first that succeeds gives what is returned.
            prepare: needs the servers alone.
        """
        for attempt in itertools.count():
            try:
                with self._waiting():
                    if attempt == 0:
                        return call()
                    with self._recovery.of_servers_alone():
                        self._fence.raise_generation()
                        prepare()
                    return again()
            except tf.errors.OpError as error:
                self._recovery.await_all_workers(error)
                if attempt == _TRIES:
                    raise
                self._machine.sleep(_PAUSE_S)
