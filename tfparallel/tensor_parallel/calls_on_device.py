"""A layer that one device of a group computes, forward and backward.

`with tf.device(d): y = layer(x)` places the forward pass only: a tape leaves the backward pass to
the device of whoever asks for it. So the call gets a tape of its own, and is recorded as one
operation, from the tensors and the weights that it reads to its outputs.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.internals.probabilities import origin_of, with_origin
from tfparallel.tensor_parallel.computing_groups import ComputingGroups
from tfparallel.tensor_parallel.layer_rules import computes_in_parts


def hook_on_device(layer: keras.Layer, extended: ComputingGroups, number: int) -> None:
    """Has device `number` of each group of `extended` compute `layer`. Twice changes nothing."""
    hook_once(
        layer,
        "call",
        wrapped(layer, "call", functools.partial(_call, extended, number)),
        why="One device of a group computes the layer, as a branch of the model.",
    )


def _call(
    extended: ComputingGroups, number: int, original: Callable, *args: object, **kwargs: object
) -> object:
    if not computes_in_parts(extended):
        return original(*args, **kwargs)
    return call_on_device(extended.own_group()[number], original, args, kwargs)


def call_on_device(device: str, function: Callable, args: tuple, kwargs: dict) -> object:
    """`function(*args, **kwargs)` on `device`, and its gradient too.

    Args:
        device: its name.
        function: takes and returns nests with tensors in them; may read variables.
        args, kwargs: what it is called with.
    """
    if not record.could_possibly_record():
        with tf.device(device):
            return function(*args, **kwargs)
    given = keras.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(given) if tf.is_tensor(x) and not _is_variable(x)]
    watched = [i for i in places if given[i].dtype.is_floating]
    own = list(given)
    with tf.device(device):
        for i in places:
            own[i] = tf.identity(given[i])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([own[i] for i in watched])
            args, kwargs = keras.tree.pack_sequence_as((args, kwargs), own)
            outputs = function(*args, **kwargs)
    # Read here, not by `tape.gradient`, which would tell variables that a user's tape asks.
    handles = [variable.handle for variable in tape.watched_variables()]
    sources = [*(own[i] for i in watched), *handles]
    flat = keras.tree.flatten(outputs)
    floating = [i for i, x in enumerate(flat) if tf.is_tensor(x) and x.dtype.is_floating]
    origins = [origin_of(flat[i]) for i in floating]
    targets = [flat[i] for i in floating]
    targets += [origin.logits for origin in origins if origin is not None]
    with record.stop_recording(), tf.device(device):
        results = [tf.identity(x) for x in targets]

    def backward(*gradients: tf.Tensor) -> list:
        with tf.device(device):
            return tape.gradient(targets, sources, list(gradients))

    record.record_operation(
        "CallOnDevice", results, [*(given[i] for i in watched), *handles], backward
    )
    logits = iter(results[len(floating) :])
    for i, result, origin in zip(floating, results, origins, strict=False):
        flat[i] = with_origin(result, origin, origin and next(logits))
    return keras.tree.pack_sequence_as(outputs, flat)


def _is_variable(value: object) -> bool:
    return isinstance(value, (tf.Variable, keras.Variable))
