"""Which layers and operations a thread constructs, told as they are constructed.

`keras.Operation.__init__`, which all of them call, asks last which `keras.RematScope`s are open.
Keras keeps those in a list for each thread; a list of ours in its place is asked, and sees by whom.

    Operation.__init__ -> get_current_remat_mode -> `if not remat_scope_stack`

Before Keras 3.15 it was `Layer.__init__` that asked: there, operations that are no layers are not
told.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

import keras
from keras.src.backend.common import global_state, remat
from keras.src.layers.layer import Layer

STACK = "remat_scope_stack"  # its name in Keras's global state
_ASKS = remat.get_current_remat_mode.__code__
_CONSTRUCTS = [
    kind.__init__.__code__
    for kind in (keras.Operation, Layer)
    if _ASKS.co_name in kind.__init__.__code__.co_names
]


@contextlib.contextmanager
def new_operations_told(tell: Callable[[keras.Operation], None]) -> Iterator[None]:
    """Within it, `tell` is called with each operation that the calling thread constructs.

    Nested ones are told in the opposite order of `with`: the innermost last.
    """
    before = global_state.get_global_attribute(STACK)
    asked = _Asked(before, tell)
    global_state.set_global_attribute(STACK, asked)
    try:
        yield
    finally:
        if global_state.get_global_attribute(STACK) is asked:  # else `clear_session` has been here
            global_state.set_global_attribute(STACK, before)


class _Asked(list):
    """The open scopes, which tell who asks whether there are any."""

    def __init__(self, scopes: list | None, tell: Callable[[keras.Operation], None]):
        super().__init__(scopes or ())
        self._before, self._tell = scopes, tell

    def __bool__(self) -> bool:
        operation = _constructed_by(2)
        if operation is not None:
            self.tell(operation)
        return len(self) > 0

    def tell(self, operation: keras.Operation) -> None:
        """Tells those around it first."""
        if isinstance(self._before, _Asked):
            self._before.tell(operation)
        self._tell(operation)


def _constructed_by(depth: int) -> keras.Operation | None:
    """The operation whose constructor asks for open scopes, so many frames from here."""
    frame = sys._getframe(depth)
    caller = frame.f_back
    if frame.f_code is not _ASKS or caller is None or caller.f_code not in _CONSTRUCTS:
        return None
    return caller.f_locals["self"]
