"""How long calls of layers take, forward and backward, each by itself on a device.

A call is compiled as one function with the weights among its arguments, on the device. A device may
be asynchronous: what it is given is done later. So the clock stops when a number has been read that
all outputs and gradients had to be there for; of that, the time of a call of nothing is no cost.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import get_keras_mask, set_keras_mask
from tfparallel.internals.shared_constants import constants_shared
from tfparallel.pipeline.no_trace import ValuesApart

_REPEATS = 3
_LEAST_S = 1e-7  # of a call: what takes less than a call of nothing still is not free


class TimedCalls:
    """Times calls of layers; of those that compute alike, the first.

    Args:
        device: where.
    """

    def __init__(self, device: str):
        self._device = device
        self._known: dict[str, float] = {}
        self._nothing_s: float | None = None

    def seconds(self, operation: keras.Operation, args: tuple, kwargs: dict) -> float:
        """How long `operation(*args, **kwargs)` takes, and its backward pass."""
        key = _likeness(operation, args, kwargs)
        if key is None or key not in self._known:
            seconds = self._measured(operation, args, kwargs)
            if key is None:
                return seconds
            self._known[key] = seconds
        return self._known[key]

    def _measured(self, operation: keras.Operation, args: tuple, kwargs: dict) -> float:
        with tf.device(self._device):
            if self._nothing_s is None:
                one = tf.ones([])
                self._nothing_s = _median_s(tf.function(tf.identity, autograph=False), [one])
            passes, given = _passes(operation, args, kwargs)
            seconds = _median_s(_compiled(passes, given), given)
        return max(seconds - self._nothing_s, _LEAST_S)


def _likeness(operation: keras.Operation, args: tuple, kwargs: dict) -> str | None:
    """Equal for calls that compute alike: those of layers of one class, configuration and size."""
    try:
        config = json.dumps(_without_names(operation.get_config()), default=repr, sort_keys=True)
    except Exception:  # of a user's class, which tells nothing: each of its layers is timed
        return None
    weights = [(tuple(w.shape), w.dtype, w.trainable) for w in getattr(operation, "weights", ())]
    given = keras.tree.map_structure(_kind, (args, kwargs))
    return f"{id(type(operation))} {config} {weights} {given}"


def _without_names(config: object) -> object:
    if isinstance(config, dict):
        return {str(key): _without_names(own) for key, own in config.items() if key != "name"}
    return [_without_names(own) for own in config] if isinstance(config, list | tuple) else config


def _kind(value: object) -> str:
    if not isinstance(value, tf.Tensor):
        return repr(value)
    return f"{value.shape} {value.dtype.name} {get_keras_mask(value) is not None}"


def _passes(
    operation: keras.Operation, args: tuple, kwargs: dict
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
            outputs = keras.tree.flatten(operation(*args_, **kwargs_))
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


def _compiled(passes: Callable, given: Sequence[tf.Tensor]) -> Callable:
    """`passes` as one function; as it is, where a layer computes in Python what cannot be traced.

    If that is not why it fails it fails again.
    """
    try:
        return tf.function(passes, autograph=False).get_concrete_function(*given)
    except Exception:
        return passes


def _median_s(function: Callable, given: Sequence[tf.Tensor]) -> float:
    """Of several calls, each of whose results is read, after one that does not count."""
    float(function(*given))
    times_s = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        float(function(*given))
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s)
