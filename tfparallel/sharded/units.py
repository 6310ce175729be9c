"""Layers whose weights are gathered when they are called, freed after it, and gathered again.

    forward    gather 1 | layer 1, gather 2 | layer 2, gather 3 | layer 3
    backward   layer 3, gather 2 | layer 2, gather 1 | layer 1             (`prefetch=1`)

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
https://arxiv.org/abs/2304.11277, section 3.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import values_util
from tfparallel.internals.keras_layers import behind, layers_of, own_variables
from tfparallel.segments.layer_paths import check_patterns, is_named, layers_by_path
from tfparallel.segments.step_segments import Called, Weights
from tfparallel.sharded.unit_gathers import UnitGathers

_thread = threading.local()


def given_whole(variable: tf.Variable) -> tf.Tensor | None:
    """The whole of a variable in the unit that the calling thread is in; None elsewhere."""
    return getattr(_thread, "wholes", {}).get(id(variable))


def forget_whole(variable: tf.Variable) -> None:
    """The variable is assigned in the unit that the calling thread is in: it is read again then."""
    _thread.wholes = {k: v for k, v in getattr(_thread, "wholes", {}).items() if k != id(variable)}


class UnitWeights:
    """Those of a unit in one call by one replica.

    Args:
        extended: of the strategy.
        variables: sharded ones.
        i: of the replica in this process.
    """

    def __init__(self, extended: UnitGathers, variables: Sequence, i: int):
        self._extended, self._variables, self._i = extended, variables, i
        self._parts: list = []

    def gather(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The wholes."""
        self._parts = [variable.read_parts(self._i) for variable in self._variables]
        return self._gathered(after)

    def gather_again(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The wholes of the same parts: what a step has assigned since does not count."""
        if not self._extended._sharding.reshard_after_forward:
            return []
        return self._gathered(after)

    def _gathered(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.control_dependencies(after):
            sent_as = self._extended._sharding.gather_dtype
            return self._extended._wholes(self._variables, self._parts, self._i, sent_as)

    @contextlib.contextmanager
    def given(self, wholes: Sequence[tf.Tensor]) -> Iterator[None]:
        """Within it, the variables read as `wholes`."""
        before = getattr(_thread, "wholes", {})
        _thread.wholes = {**before, **dict(zip(map(id, self._variables), wholes, strict=True))}
        for variable, whole in zip(self._variables, wholes, strict=True):
            variable.note_read(whole, self._i)
        inside = _thread.wholes
        try:
            yield
        finally:
            forgotten = inside.keys() - _thread.wholes.keys()
            _thread.wholes = {k: v for k, v in before.items() if k not in forgotten}


def units_of(
    model: keras.Model,
    patterns: Sequence[str] | None,
    is_sharded: Callable[[object], bool],
    rematerialized: Sequence[tuple[keras.Layer, Callable]] = (),
    offloaded: Sequence[keras.Layer] = (),
) -> list[Called]:
    """The layers of `model` that are units, each with what gives the weights of a call.

    Args:
        patterns: of layers, each of which is a unit with all layers in it; None for all layers that
            have weights themselves, and those of Keras that call others in loops (RNNs, wrappers).
        is_sharded: whether a variable is gathered.
        rematerialized: layers that are computed again, and for which outputs. Each is a unit with
            all layers in it, as it needs the weights of all of them to be computed again.
        offloaded: layers whose activations are on the host until their backward passes. They are
            segments, and units as others are.

    Raises:
        ValueError: for a pattern that names no layer.
    """
    wants = {id(layer): wanted for layer, wanted in rematerialized}
    moved = {id(layer): layer for layer in offloaded}
    units = [
        Called(
            layer,
            functools.partial(_weights_of, layer, with_inner, is_sharded),
            wants.get(id(layer)),
            moved.pop(id(layer), None) is not None,
        )
        for layer, with_inner in layers_of_units(model, patterns, rematerialized)
    ]
    return units + [Called(layer, offloads=True) for layer in moved.values()]


def layers_of_units(
    model: keras.Model,
    patterns: Sequence[str] | None,
    rematerialized: Sequence[tuple[keras.Layer, Callable]] = (),
) -> list[tuple[keras.Layer, bool]]:
    """The layers that are units, and whether with all layers in them; arguments as `units_of`."""
    layers = layers_by_path(model)
    if patterns is None:
        chosen = [(layer, _is_with_inner(layer)) for layer in layers.values()]
    else:
        check_patterns("units", patterns, layers)
        chosen = [(layer, True) for path, layer in layers.items() if is_named(path, patterns)]
    again = {id(layer): layer for layer, _ in rematerialized}
    known = {id(layer) for layer, _ in chosen}
    chosen += [(layer, True) for key, layer in again.items() if key not in known]
    return [
        (layer, with_inner or id(layer) in again)
        for layer, with_inner in chosen
        if not isinstance(layer, keras.layers.InputLayer)
    ]


def _is_with_inner(layer: keras.Layer) -> bool:
    return isinstance(layer, (keras.layers.RNN, keras.layers.Wrapper))


def unit_variables(layer: keras.Layer, with_inner: bool) -> list[tf.Variable]:
    """TensorFlow's variables of a unit, each once."""
    own = [x for each in (layers_of(layer) if with_inner else [layer]) for x in own_variables(each)]
    return list({id(behind(x)): behind(x) for x in own}.values())


def _weights_of(
    layer: keras.Layer, with_inner: bool, is_sharded: Callable[[object], bool]
) -> Weights | None:
    """What a call of `layer` gathers; None if that is nothing, or is there in a unit around it."""
    variables = unit_variables(layer, with_inner)
    missing = [x for x in variables if is_sharded(x) and given_whole(x) is None]
    i = values_util.get_current_replica_id_as_int()
    if not missing or i is None:
        return None
    return UnitWeights(missing[0].distribute_strategy.extended, missing, i)
