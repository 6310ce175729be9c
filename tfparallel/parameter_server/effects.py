"""What a step would change, written down instead of done.

A worker's step reads variables and computes; it changes nothing. Everything that it would have
assigned is handed in as data and applied by the parameter servers alone, one step's effects after
another's:

    worker            forward, backward                 parameter servers
    --------          -----------------                 -----------------
    v.assign(v + x)   effects: v += x          ------>  v.assign_add(x)
    opt.apply(g, w)   effects: apply g to w    ------>  opt.apply(g, w)

So no update is lost, none is seen half done, and a worker that dies, at whatever moment, has either
handed its step in or left no trace of it: the step can be given to another worker.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfparallel.parameter_server.worker_state import Remembered
from tfparallel.replicas.local_copies import first_copy

_thread = threading.local()


def current_effects() -> "Effects | None":
    """The effects of the step that the calling thread is tracing on behalf of a worker."""
    effects = getattr(_thread, "effects", None)
    if effects is None or tf.executing_eagerly():
        return None
    return effects


@dataclass(frozen=True)
class Effect:
    """One change: `carry_out` is called with the values of `tensors`, on the parameter servers.

    Attributes:
        tensors: tensors and `IndexedSlices` of the worker's graph, or None.
        devices: where each of them is needed.
        carry_out: makes the change.
    """

    tensors: list
    devices: list[str]
    carry_out: Callable[[list], Any]


class Effects:
    """The changes of one step, in order, and what variables would be after them."""

    _graph: tf.Graph  # of the step, while it is traced

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.kept: list[tuple[Remembered, tf.Tensor]] = []
        self._values: dict[int, tf.Tensor] = {}  # what the step sees, by the variable's id
        self._seen: list[Any] = []  # keeps ids from being used again
        self._updated: dict[int, str] = {}  # by the variable's id: the optimizer that updates it

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within it, the calling thread's assignments go here."""
        _thread.effects = self
        self._graph = tf.compat.v1.get_default_graph()
        try:
            yield
        finally:
            _thread.effects = None

    def read(self, variable: tf.Variable, read: Callable[[], tf.Tensor]) -> tf.Tensor:
        """The value that the step sees: what `read()` gave first, and what it assigned since.

        It is read in the step's own graph: a branch of a condition may be the first to ask.
        """
        if id(variable) not in self._values:
            with self._graph.as_default():
                self._values[id(variable)] = read()
            self._seen.append(variable)
        return self._values[id(variable)]

    def assigned(self, variable: tf.Variable, read: Callable[[], tf.Tensor]) -> tf.Tensor | None:
        """What the step has assigned to a weight (SpectralNormalization does); None if nothing.

        Its gradient is the variable's, as that of what is read on one device after an assignment.
        """
        if id(variable) not in self._values:
            return None
        value, on_tape = tf.stop_gradient(self._values[id(variable)]), read()
        return value + (on_tape - tf.stop_gradient(on_tape))

    def assign(
        self, variable: tf.Variable, value: object, read: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """`variable.assign(value)`; a value that was computed from the variable adds to it.

        Another worker may change the variable in between: what this step contributes to a sum, a
        counter or a moving average is the difference to what it read.
        """
        value = tf.cast(tf.convert_to_tensor(value), variable.dtype)
        if variable.trainable:
            self.read(variable, read)
        if id(variable) in self._values and variable.dtype != tf.bool:
            return self._add(variable, value - self.read(variable, read), value)
        self._record(variable, value, lambda values: variable.assign(values[0]), value)
        return value

    def assign_add(
        self, variable: tf.Variable, delta: object, read: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """`variable.assign_add(delta)`."""
        delta = tf.cast(tf.convert_to_tensor(delta), variable.dtype)
        return self._add(variable, delta, self.read(variable, read) + delta)

    def defer(
        self,
        what: str,
        tensors: Sequence,
        devices: Sequence[str],
        carry_out: Callable[[list], object],
    ) -> None:
        """Any other change, as `Effect` describes it.

        Args:
            what: is changed, for an error.

        Raises:
            NotImplementedError: in a branch, a loop or a function of its own within the step, of
                which servers, which make the change, do not know whether it runs.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise NotImplementedError(
                "A step on behalf of a worker makes changes outside of conditions, loops and "
                f"functions of its own, under mode='async'. Received: {what} inside of one. "
                "Compute values there and assign them outside; to update every k-th step, apply "
                "the optimizer in each step and give it gradient_accumulation_steps=k."
            )
        self.effects.append(Effect(list(tensors), list(devices), carry_out))

    def update(self, variables: Iterable[tf.Variable], optimizer: str) -> None:
        """The optimizer of that name updates `variables`, to values that no worker knows."""
        self._updated.update((id(variable), optimizer) for variable in variables)

    def warn_of_update(self, variable: tf.Variable) -> None:
        """Says, once a step, that a variable is read as it was before the step's own update."""
        if id(variable) not in self._updated:
            return
        warnings.warn(
            f"A step reads variable '{variable.name}' after optimizer "
            f"'{self._updated[id(variable)]}' was applied to it. Under mode='async' it gets the "
            "value of before: what an optimizer updates is seen from the next step on. Read it "
            "first if that is meant; mode='sync' shows what is updated.",
            stacklevel=2,
        )
        self._updated.clear()

    def keep(self, slot: Remembered, tensor: tf.Tensor) -> None:
        """The worker remembers `tensor` when the step has been applied."""
        self.kept.append((slot, tensor))

    def _add(self, variable: tf.Variable, delta: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        self._record(variable, delta, lambda values: variable.assign_add(values[0]), value)
        return value

    def _record(
        self, variable: tf.Variable, tensor: tf.Tensor, carry_out: Callable, value: tf.Tensor
    ) -> None:
        what = f"variable '{variable.name}', assigned"
        self.defer(what, [tensor], [first_copy(variable).device], carry_out)
        self._values[id(variable)] = value
        self._seen.append(variable)

    def carry_out(self, values: Sequence[list]) -> None:
        """Makes all changes, with the values of all effects' tensors."""
        for effect, tensors in zip(self.effects, values, strict=True):
            effect.carry_out(tensors)
