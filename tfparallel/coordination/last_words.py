"""What a process says before C++ ends it, for an exception that nobody has caught.

A library's own thread may end so: Python gets no exception then, and no chance to say anything.
"""

import ctypes
import weakref
from collections.abc import Callable

_Handler = ctypes.CFUNCTYPE(None)
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate, in GCC's and LLVM's libraries
_LIBRARIES = ("libstdc++.so.6", "libc++abi.dylib")
_handlers: list = []  # given to C++ so far; it may call the last at any time


def say_before_abort(last_words: Callable[[], None]) -> None:
    """Has a method called before C++ aborts this process, in the thread that fails.

    Args:
        last_words: its object is not kept alive by this. It may end the process; where it returns,
            the process is aborted as ever.
    """
    set_terminate = _set_terminate()
    if set_terminate is None:  # another runtime of C++: it ends without them
        return
    method = weakref.WeakMethod(last_words)

    def handle() -> None:
        found = method()
        if found is not None:
            found()
        _Handler(before)()

    handler = _Handler(handle)
    _handlers.append(handler)
    before = set_terminate(handler)


def _set_terminate() -> Callable | None:
    for name in _LIBRARIES:
        try:
            function = getattr(ctypes.CDLL(name), _SET_TERMINATE)
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [_Handler], ctypes.c_void_p
        return function
    return None
