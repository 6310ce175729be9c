"""How long calls of layers take, forward and backward, each by itself on a device.

Several calls are compiled as one function, with their weights among its arguments. On the device
they come one after the other, and between them a CPU looks at the clock:

    clock -> call of nothing -> number -> clock -> passes of a layer -> number -> clock -> ...

A device may be asynchronous: what it is given is done later. So the clock waits for a number that
all outputs and gradients had to be there for; of that, the time of a call of nothing is no cost.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import get_keras_mask, set_keras_mask
from tfparallel.internals.shared_constants import constants_shared
from tfparallel.pipeline.crossing_bytes import nbytes
from tfparallel.pipeline.no_trace import ValuesApart

_REPEATS = 3
_LEAST_S = 1e-7  # of a call: what takes less than a call of nothing still is not free
_MOST_CALLS = 16  # in one function
_MOST_BYTES = 1 << 26  # that wait for being timed, beside one call's
_LIKE_SIZES = 2.0  # how many times larger or smaller is still in proportion


class TimedCall:
    """A call of a layer that will be timed, together with others.

    Args:
        passes: does both passes of tensors.
        given: those tensors.

    Attributes:
        seconds: how long it takes; 0.0 until it has been timed.
    """

    def __init__(self, passes: Callable, given: Sequence[tf.Tensor]):
        self.passes, self.given = passes, given
        self.seconds = 0.0


class InProportion(NamedTuple):
    """A call that is not timed: it does what another one does, with so many times as much."""

    other: TimedCall
    times: float

    @property
    def seconds(self) -> float:
        """As of `TimedCall`."""
        return self.other.seconds * self.times


class TimedCalls:
    """Times calls of layers; of those that compute alike, of tensors of like sizes, the first.

    Args:
        device: where.
    """

    def __init__(self, device: str):
        self._device = device
        spec = tf.DeviceSpec.from_string(device)
        self._clock = spec.replace(device_type="CPU", device_index=0).to_string()
        self._known: dict[str, list[tuple[_Sizes, TimedCall]]] = {}
        self._waiting: list[TimedCall] = []

    def add(
        self, operation: keras.Operation, call: Callable, args: tuple, kwargs: dict
    ) -> TimedCall | InProportion:
        """`call(*args, **kwargs)` and its backward pass, timed by `finish` at the latest.

        Others may be timed now, for which whoever calls this must be prepared.

        Args:
            operation: whose call it is.
        """
        key, sizes = _likeness(operation, args, kwargs), _sizes(operation, args, kwargs)
        known = [] if key is None else self._known.setdefault(key, [])
        for others, timed in known:
            if sizes.are_like(others):
                return InProportion(timed, sizes.num_given / others.num_given)
        with tf.device(self._device):
            timed = TimedCall(*_passes(operation, call, args, kwargs))
        known.append((sizes, timed))
        self._waiting.append(timed)
        num_bytes = sum(nbytes(x) for each in self._waiting for x in each.given)
        if len(self._waiting) == _MOST_CALLS or num_bytes > _MOST_BYTES:
            self.finish()
        return timed

    def finish(self) -> None:
        """Times what has been added."""
        calls, self._waiting = self._waiting, []
        with tf.device(self._device):
            for call, seconds in zip(calls, _times_s(calls, self._clock), strict=True):
                call.seconds = max(seconds, _LEAST_S)
                del call.passes, call.given  # which hold tensors


class _Sizes(NamedTuple):
    """Of what a call is given.

    Attributes:
        num_given: numbers in its tensors, without masks; 1 where there are none.
        of_each: all sizes of the tensors, then those of the weights.
    """

    num_given: int
    of_each: list[int]

    def are_like(self, others: "_Sizes") -> bool:
        """Whether none is more than `_LIKE_SIZES` times the other's, of as many."""
        pairs = zip(self.of_each, others.of_each, strict=True)
        return all(
            own == other or max(own, other) <= _LIKE_SIZES * min(own, other)
            for own, other in [(self.num_given, others.num_given), *pairs]
        )


def _sizes(operation: keras.Operation, args: tuple, kwargs: dict) -> _Sizes:
    given = [x for x in keras.tree.flatten((args, kwargs)) if isinstance(x, tf.Tensor)]
    of_each = [size for x in (*given, *getattr(operation, "weights", ())) for size in x.shape]
    return _Sizes(sum(math.prod(x.shape) for x in given) or 1, of_each)


def _likeness(operation: keras.Operation, args: tuple, kwargs: dict) -> str | None:
    """Equal for calls that do the same, maybe of other sizes: of one class and configuration."""
    try:
        config = json.dumps(_without_names(operation.get_config()), default=repr, sort_keys=True)
    except Exception:  # of a user's class, which tells nothing: each of its layers is timed
        return None
    weights = [(len(w.shape), w.dtype, w.trainable) for w in getattr(operation, "weights", ())]
    given = keras.tree.map_structure(_kind, (args, kwargs))
    return f"{id(type(operation))} {config} {weights} {given}"


def _without_names(config: object) -> object:
    if isinstance(config, dict):
        return {str(key): _without_names(own) for key, own in config.items() if key != "name"}
    return [_without_names(own) for own in config] if isinstance(config, list | tuple) else config


def _kind(value: object) -> str:
    if not isinstance(value, tf.Tensor):
        return repr(value)
    return f"{len(value.shape)} {value.dtype.name} {get_keras_mask(value) is not None}"


def _passes(
    operation: keras.Operation, call: Callable, args: tuple, kwargs: dict
) -> tuple[Callable, list[tf.Tensor]]:
    """A function of tensors that does both passes, and those tensors, on the current device."""
    leaves = tf.nest.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
    masked = [i for i in places if get_keras_mask(leaves[i]) is not None]
    weights = list(getattr(operation, "weights", ()))
    given = [
        *(leaves[i] for i in places),
        *(get_keras_mask(leaves[i]) for i in masked),
        *(tf.convert_to_tensor(weight.value) for weight in weights),
    ]

    def passes(*tensors: tf.Tensor) -> tf.Tensor:
        inputs, rest = dict(zip(places, tensors, strict=False)), tensors[len(places) :]
        for i, mask in zip(masked, rest, strict=False):
            set_keras_mask(inputs[i], mask)
        values = rest[len(masked) :]
        own = [inputs.get(i, leaf) for i, leaf in enumerate(leaves)]
        args_, kwargs_ = tf.nest.pack_sequence_as((args, kwargs), own)
        trained = [value for w, value in zip(weights, values, strict=True) if w.trainable]
        asked = [x for x in (*inputs.values(), *trained) if x.dtype.is_floating]
        apart = ValuesApart(
            list(zip(weights, values, strict=True)),
            collect_losses=True,
            initialize_variables=False,
        )
        graph = tf.compat.v1.get_default_graph()
        with apart, constants_shared(graph), tf.GradientTape() as tape:
            tape.watch(asked)
            outputs = keras.tree.flatten(call(*args_, **kwargs_))
        outputs = [y for y in outputs if isinstance(y, tf.Tensor)]
        gradients = tape.gradient([y for y in outputs if y.dtype.is_floating], asked)
        return _number_of([*outputs, *(each for each in gradients if each is not None)])

    return passes, [tf.identity(each) for each in given]


def _number_of(tensors: Iterable) -> tf.Tensor:
    """A number that is there when all of `tensors` are: of one of them, packed with the rest.

    What only waited for the rest would not need it computed.
    """
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in tensors]
    if not values:
        return tf.zeros([])
    there = tf.raw_ops.OptionalGetValue(
        optional=tf.raw_ops.OptionalFromValue(components=values),
        output_types=[each.dtype for each in values],
        output_shapes=[tf.TensorShape(None)] * len(values),
    )
    numeric = [x for x in there if x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool]
    return _first_number(numeric[0].dtype)(numeric[0]) if numeric else tf.zeros([])


@functools.cache
def _first_number(dtype: tf.DType) -> Callable[[tf.Tensor], tf.Tensor]:
    """Of a tensor of any shape; 0 of one without elements."""

    def first(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(tf.reshape(x, [-1])[:1], tf.float32))

    with tf.init_scope(), tf.device(None):
        spec = tf.TensorSpec(None, dtype)
        return tf.function(first, autograph=False).get_concrete_function(spec)


def _times_s(calls: Sequence[TimedCall], clock: str) -> list[float]:
    """Of each, on the current device: by one function, or by one each if that cannot be traced.

    One that cannot be traced alone computes in Python what a graph does not; if that is not why it
    fails it fails again.

    Args:
        calls: of layers.
        clock: the device that has it, a CPU.
    """
    try:
        return _by_function(calls, clock) if calls else []
    except Exception:
        if len(calls) > 1:
            return [seconds for call in calls for seconds in _times_s([call], clock)]
        return [_by_python(*calls)]


def _by_function(calls: Sequence[TimedCall], clock: str) -> list[float]:
    nothing = TimedCall(tf.identity, [tf.ones([])])
    function = _clocked([nothing, *calls], clock)
    given = [*nothing.given, *(x for call in calls for x in call.given)]
    function(*given)  # the first time does not count
    looks_s = [function(*given)[0].numpy() for _ in range(_REPEATS)]
    of_nothing, *times_s = np.median(np.diff(looks_s), axis=0)
    return [float(each - of_nothing) for each in times_s]


def _clocked(calls: Sequence[TimedCall], clock: str) -> tf.types.experimental.ConcreteFunction:
    """A function of what all are given: what the clock says before and after each, and numbers.

    If nobody was given the numbers, TensorFlow would not compute what only the clock waits for.
    """

    def clocked(*tensors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rest, numbers = list(tensors), []
        with tf.device(clock):
            looks = [tf.timestamp()]
        for call in calls:
            own, rest = rest[: len(call.given)], rest[len(call.given) :]
            with tf.control_dependencies(looks[-1:]):
                number = call.passes(*own)
            with tf.device(clock):
                numbers.append(tf.identity(number))
                with tf.control_dependencies(numbers[-1:]):
                    looks.append(tf.timestamp())
        return tf.stack(looks), tf.stack(numbers)

    given = [x for call in calls for x in call.given]
    return tf.function(clocked, autograph=False).get_concrete_function(*given)


def _by_python(call: TimedCall) -> float:
    """What is read at the end is there when all is."""
    times_s = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        float(call.passes(*call.given))
        times_s.append(time.perf_counter() - started)
    return float(np.median(times_s[1:]))
