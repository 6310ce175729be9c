"""Attention layers of other libraries, and of users, by heads: their own `call`, for each device.

Between the projections to heads and the one from heads such a layer treats heads alike, whatever it
does with positions: rotary embeddings, groups of queries, a window, norms of a head. So each device
runs it on its own heads, with projections that give and take those:

    query, key, value      the layer's own, which have rules; of them each device takes its heads
    what is between        the layer's `call`, once for each device, on its heads
    output                 by rows: the sum over devices

KerasHub's are known by name; nothing of it is imported.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals.hooks import shadowed
from tfparallel.internals.keras_layers import layers_of, own_variables
from tfparallel.tensor_parallel.calls_on_device import call_on_device
from tfparallel.tensor_parallel.group import Group, shared_inputs
from tfparallel.tensor_parallel.layer_rules import (
    is_plain_tensor,
    layer_rule,
    rule_by_name,
    rules_of,
)
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import split_of

_HEADS = 2  # dim of queries, keys, values and what comes of them: `[rows, positions, heads, size]`


@dataclass(frozen=True)
class HeadsOf:
    """Where an attention layer has what, by names of its attributes.

    Attributes:
        query, key, value: `EinsumDense` of the layer's first argument, `[rows, positions, heads,
            size]`.
        output: the `EinsumDense` whose result `call` returns.
        counts: numbers of heads that `call` reads, and the projection, of these four, that has as
            many.
        whole_if: arguments of `call` with which it is computed as on one device.
        applies: whether a layer of the type is computed by heads; by default each is.
    """

    query: str = "_query_dense"
    key: str = "_key_dense"
    value: str = "_value_dense"
    output: str = "_output_dense"
    counts: Mapping[str, str] = field(default_factory=dict)
    whole_if: Sequence[str] = ("cache",)
    applies: Callable[[Any], bool] = lambda layer: True

    def to_heads(self, layer: keras.Layer) -> list:
        """The three projections."""
        return [getattr(layer, name) for name in (self.query, self.key, self.value)]


_DECLARED: dict[type, HeadsOf] = {}


def attention_by_heads(layer_type: type, heads: HeadsOf | None = None) -> None:
    """Declares that layers of a type compute their heads alike, and how they call what they have.

    For layers without Dropout; others are computed as on one device.

    Args:
        layer_type: a subclass of `keras.Layer`.
        heads: names of its attributes; by default those of Keras's own attention layers.
    """
    _DECLARED[layer_type] = heads or HeadsOf()
    layer_rule(layer_type)(_by_heads)


def heads_of(layer: keras.Layer) -> HeadsOf | None:
    """What was declared of a built layer that can be computed by heads; None for any other."""
    rules_of(layer)  # declares what is known by name
    for cls in type(layer).__mro__:
        if cls in _DECLARED:
            heads = _DECLARED[cls]
            inherits = getattr(type(layer), "call", None) is getattr(cls, "call", None)
            return heads if inherits and heads.applies(layer) and not _drops(layer) else None
    return None


def _drops(layer: keras.Layer) -> bool:
    """Whether it draws masks, which devices would draw anew."""
    return any(isinstance(x, keras.layers.Dropout) and x.rate > 0 for x in layers_of(layer))


def heads_dim(projection: keras.layers.EinsumDense, is_output: bool) -> int:
    """The dim of an `EinsumDense`'s kernel that is its heads."""
    terms, output = projection.equation.replace(" ", "").split("->")
    left, right = terms.split(",")
    return right.index((left if is_output else output)[_HEADS])


def _by_heads(
    group: Group, layer: keras.Layer, original: Callable, *args: object, **kwargs: object
) -> tf.Tensor:
    heads = heads_of(layer)
    rows = None if heads is None else _rows_of_heads(group, layer, heads)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    inputs = next(iter(given.values()))  # also where it is given by its name
    if heads is None or rows is None or not is_plain_tensor(inputs):
        return NotImplemented
    if any(given.get(name) is not None for name in heads.whole_if):
        return NotImplemented
    with shared_inputs():
        projected = [projection(inputs) for projection in heads.to_heads(layer)]
    parts = [group.parts(x, r) for x, r in zip(projected, rows, strict=True)]

    def call(*own: tf.Tensor, args: tuple, kwargs: dict) -> tf.Tensor:
        return _own_heads(layer, heads, original, own, args, kwargs)

    attended = [
        call_on_device(device, call, tuple(own), {"args": args, "kwargs": kwargs})
        for device, *own in zip(group.devices, *parts, strict=True)
    ]
    return getattr(layer, heads.output)(group.joined(attended, _HEADS))


def _rows_of_heads(group: Group, layer: keras.Layer, heads: HeadsOf) -> list[Rows] | None:
    """How queries, keys and values are in parts: as the output's kernel, each with its queries."""
    output, projections = getattr(layer, heads.output), heads.to_heads(layer)
    dim = heads_dim(output, True)
    rows = group.rows(output.kernel) if isinstance(output.kernel, keras.Variable) else None
    if rows is None or rows.dim != dim or _is_cut_elsewhere(layer, [*projections, output]):
        return None
    found = []
    for projection in projections:
        count = projection.kernel.shape[heads_dim(projection, False)]
        queries, rest = divmod(sum(rows.sizes), count)
        if rest or any(size % queries for size in rows.sizes):
            return None
        found.append(Rows(_HEADS, tuple(size // queries for size in rows.sizes)))
    return found


def _is_cut_elsewhere(layer: keras.Layer, projections: Sequence) -> bool:
    others = [each for each in layers_of(layer) if each not in projections]
    return any(split_of(w) is not None for each in others for w in own_variables(each))


def _own_heads(
    layer: keras.Layer, heads: HeadsOf, original: Callable, own: Sequence, args: tuple, kwargs: dict
) -> tf.Tensor:
    """What a device's heads make of their queries, keys and values, before the last projection."""
    taken: list[tf.Tensor] = []

    def take(attended: tf.Tensor, *_: object, **__: object) -> tf.Tensor:
        taken.append(attended)
        return attended

    with contextlib.ExitStack() as stack:
        for projection, x in zip(heads.to_heads(layer), own, strict=True):
            stack.enter_context(_has(projection, "call", lambda *_, x=x, **__: x))
        stack.enter_context(_has(getattr(layer, heads.output), "call", take))
        for name, of_projection in heads.counts.items():
            counted = dict(zip((heads.query, heads.key, heads.value), own, strict=True))
            stack.enter_context(_has(layer, name, counted[of_projection].shape[_HEADS]))
        result = original(*args, **kwargs)
    if len(taken) != 1 or result is not taken[0]:
        raise TypeError(
            f"A layer that attention_by_heads declares returns what its '{heads.output}' gives. "
            f"Received: {result!r} from {layer!r}. Give the layer a rule by layer_rule instead."
        )
    return result


@contextlib.contextmanager
def _has(layer: keras.Layer, name: str, own: object) -> Iterator[None]:
    with shadowed(
        layer,
        name,
        own,
        during="a device's heads",
        why="It projects to what a device has, and counts that.",
    ):
        yield


def _has_projections(layer: keras.Layer) -> bool:
    """Whether a layer of this KerasHub is as the one that was looked at."""
    return all(hasattr(layer, name) for name in ("_query_dense", "_key_dense", "_value_dense"))


def _gemma_applies(layer: keras.Layer) -> bool:
    """Its scale may be of the number of heads, which is not that of a device."""
    return hasattr(layer, "query_dense") and getattr(layer, "query_head_dim_normalize", False)


_AS_IN_KERAS = HeadsOf(applies=_has_projections)
_OF_GEMMA = HeadsOf(
    query="query_dense",
    key="key_dense",
    value="value_dense",
    output="output_dense",
    counts={"num_query_heads": "query_dense", "num_key_value_heads": "key_dense"},
    applies=_gemma_applies,
)
for _name, _heads in (
    ("LlamaAttention", _AS_IN_KERAS),
    ("QwenAttention", _AS_IN_KERAS),
    ("CachedMistralAttention", _AS_IN_KERAS),
    ("CachedGemmaAttention", _OF_GEMMA),
):
    rule_by_name("keras_hub", _name, functools.partial(attention_by_heads, heads=_heads))
