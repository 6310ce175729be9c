"""Which layers are computed in parts: a rule for each type of layer, to which users add theirs.

A rule stands for one method of a layer, `call` for nearly all. It is used for layers whose class
inherits that method unchanged, and all that it asks the layer for, as a convolution's operation: a
subclass that overrides it computes something else.

A hook is put on a layer's instance when a weight of it is split, or when a layer around it is
called; it stays. Without parts to compute with, a rule gives `NotImplemented`, and the layer's own
method runs, which reads wholes.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.internals import in_stateless_scope
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.internals.keras_layers import layers_of
from tfparallel.internals.keras_state import enclosing_layers
from tfparallel.internals.keras_trainer import is_exporting
from tfparallel.internals.read_code import names_in
from tfparallel.tensor_parallel.computing_groups import ComputingGroups
from tfparallel.tensor_parallel.group import Group
from tfparallel.tensor_parallel.loops import is_in_loop

_log = logging.getLogger("tfparallel")
_hooked_around: weakref.WeakSet = weakref.WeakSet()  # outermost layers, whose layers all are hooked


class _Rule(NamedTuple):
    method: str
    function: Callable


_RULES: dict[type, dict[str, _Rule]] = {}  # by method
_BY_NAME: dict[tuple[str, str], Callable[[type], None]] = {}


def layer_rule(layer_type: type, method: str = "call") -> Callable:
    """Registers how the devices of a group compute a type of layer. To decorate a function

        rule(group, layer, original, *args, **kwargs)

    which gets a `Group`, the layer, the layer's own bound method, and the method's arguments. It
    returns what the method would, computed by `group`, or `NotImplemented` to leave it to
    `original`, such as for weights that are not in parts.

    Args:
        layer_type: a subclass of `keras.Layer`.
        method: which it stands for; a second rule for it replaces the first.
    """

    def register(function: Callable) -> Callable:
        _RULES.setdefault(layer_type, {})[method] = _Rule(method, function)
        return function

    return register


def rule_by_name(package: str, name: str, register: Callable[[type], None]) -> None:
    """Has the first layer of a class of another package have `register` called with the class."""
    _BY_NAME[package, name] = register


def rules_of(layer: keras.Layer) -> list[_Rule]:
    """The rules for a layer, of methods that its class inherits unchanged."""
    mro = type(layer).__mro__
    for cls in mro:
        named = _BY_NAME.get((cls.__module__.partition(".")[0], cls.__name__))
        if named is not None and cls not in _RULES:
            named(cls)
        if cls in _RULES:
            return [rule for rule in _RULES[cls].values() if _inherits(mro[0], cls, rule.method)]
    return []


@functools.cache
def _inherits(own: type, cls: type, method: str) -> bool:
    """Whether a class has the method of `cls`, and what that asks for, of `cls` too."""
    asked, rest = {method}, [method]
    while rest:
        name = rest.pop()
        member = inspect.getattr_static(cls, name, None)
        if inspect.getattr_static(own, name, None) is not member:
            return False
        if member is not inspect.getattr_static(keras.Layer, name, None):
            rest += [each for each in names_in(member) - asked if hasattr(cls, each)]
            asked.update(rest)
    return True


def hook_layer(layer: keras.Layer, extended: ComputingGroups) -> None:
    """Lets the groups of `extended` compute `layer` by its rules. Twice changes nothing."""
    for rule in rules_of(layer) if isinstance(layer, keras.Layer) else ():
        by_rule = functools.partial(_call, extended, layer, rule.function)
        hook_once(
            layer,
            rule.method,
            wrapped(layer, rule.method, by_rule),
            why="The devices of a group compute the layer, each its part.",
        )


def hook_layers_of(outermost: keras.Layer, extended: ComputingGroups) -> None:
    """`hook_layer` for a layer and all in it, once."""
    if outermost not in _hooked_around:
        _hooked_around.add(outermost)
        for layer in layers_of(outermost):
            hook_layer(layer, extended)


def name_layers_without_rule(layer: keras.Layer, path: str) -> None:
    """Says once that a layer with a split weight computes with the whole of it."""
    if isinstance(layer, keras.Layer) and not rules_of(layer):
        _log.warning(
            "No rule computes layer '%s' (%s) in parts: it reads the whole of '%s', which saves "
            "memory only. See tfparallel.tensor_parallel.layer_rule.",
            layer.name,
            type(layer).__name__,
            path,
        )


def _call(
    extended: ComputingGroups,
    layer: keras.Layer,
    rule: Callable,
    original: Callable,
    *args: object,
    **kwargs: object,
) -> tf.Tensor:
    if not computes_in_parts(extended):
        return original(*args, **kwargs)
    _hook_around(extended)
    layouts = extended.layouts
    group = Group(
        extended.own_group(),
        layouts.of_output(layer),
        layouts.groups.model_axis,
        layouts.cuts_sequences,
    )
    result = rule(group, layer, original, *args, **kwargs)
    return original(*args, **kwargs) if result is NotImplemented else result


def computes_in_parts(extended: ComputingGroups) -> bool:
    """Whether the group of the caller can compute, with gradients that tapes record."""
    if not extended.is_own_context() or in_stateless_scope():
        return False
    return not is_in_loop() and not is_exporting()


def _hook_around(extended: ComputingGroups) -> None:
    """Hooks all layers of the outermost one: those that come next may go on with parts."""
    outermost = next(iter(enclosing_layers()), None)
    if outermost is not None:
        hook_layers_of(outermost, extended)


def is_plain_tensor(tensor: object) -> bool:
    """Whether a rule can compute with it: a dense tensor of known rank."""
    return isinstance(tensor, tf.Tensor) and tensor.shape.rank is not None
