"""A method or attribute of one instance, of Keras or TensorFlow, replaced: for a time or for good.

Classes are never changed, so what is not ours notices nothing. What was on the instance before, by
the user or by another hook, is kept and comes back:

    shadowed          within a `with`
    hook_once         as long as the object lives
    hook_next_call    until it has been called

Each call says `why`, and `during` what; `docs/hooks.md` is made of that, by
`python docs/hook_table.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

_MARK = "_tfparallel_hook"
_NOTHING = object()


def wrapped(instance: object, name: str, hook: Callable) -> Callable:
    """`hook`, which takes the method first and then its arguments, as that method of `instance`."""
    original = getattr(instance, name)
    return functools.wraps(original)(functools.partial(hook, original))


@contextlib.contextmanager
def shadowed(
    instance: object, name: str, replacement: object, *, during: str, why: str
) -> Iterator[None]:
    """Within it, `instance` has `replacement` as its attribute `name`.

    What the instance itself had there comes back, also after an error; what its class has is never
    touched. Those that are nested must be left in the opposite order.

    Args:
        instance: of any class whose instances have a `__dict__`.
        name: of the attribute.
        replacement: such as `wrapped` gives.
        during: what, for the table of hooks; a literal.
        why: for the table of hooks; a literal.
    """
    del during, why
    attributes = vars(instance)
    before = attributes.get(name, _NOTHING)
    attributes[name] = replacement
    try:
        yield
    finally:
        _put_back(attributes, name, before)


def hook_once(
    instance: object, name: str, replacement: Callable, *, why: str, mark: str = _MARK
) -> None:
    """Gives `instance` the method `replacement` for good; twice changes nothing.

    Args:
        instance: of any class whose instances have a `__dict__`.
        name: of the method.
        replacement: such as `wrapped` gives.
        why: for the table of hooks; a literal.
        mark: by which the hook is known, where a method may have several.
    """
    del why
    if not is_hooked(instance, name, mark):
        setattr(replacement, mark, True)
        vars(instance)[name] = replacement


def is_hooked(instance: object, name: str, mark: str = _MARK) -> bool:
    """Whether `hook_once` has been here, also where something is before its hook by now."""
    return getattr(vars(instance).get(name), mark, False)


def hook_next_call(instance: object, name: str, replacement: Callable, *, why: str) -> None:
    """Has the next call of the method `name` of `instance` go to `replacement`, and no other.

    When it is called, what was there is back. A call that never came is forgotten.

    Args:
        instance: of any class whose instances have a `__dict__`.
        name: of the method.
        replacement: takes the arguments of the method.
        why: for the table of hooks; a literal.
    """
    del why
    attributes = vars(instance)
    before = attributes.get(name, _NOTHING)
    before = before.before if isinstance(before, _NextCall) else before
    attributes[name] = _NextCall(attributes, name, before, replacement)


class _NextCall:
    def __init__(self, attributes: dict, name: str, before: object, replacement: Callable):
        self._attributes, self._name, self._replacement = attributes, name, replacement
        self.before = before

    def __call__(self, *args: object, **kwargs: object) -> object:
        _put_back(self._attributes, self._name, self.before)
        return self._replacement(*args, **kwargs)


def _put_back(attributes: dict, name: str, before: object) -> None:
    if before is _NOTHING:
        attributes.pop(name, None)
    else:
        attributes[name] = before
