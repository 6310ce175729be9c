"""Which layers are cut how: Megatron's pairs, found in the calls of a model's layers. Pure.

Tensors that layers pass on in parts (activations, Dropout, additions, norms) belong together: a
*stretch*. Where all layers that lead into a stretch can be cut by columns, and all that take from
it by rows, it is never gathered:

    Dense -> gelu -> Dropout -> Dense            column [ stretch ] row
    Dense -> silu --\\
                     Multiply -> Dense           two columns, one row
    Dense ----------/

Each layer is in one pair. Of those that overlap, the one with the most products is taken first.

Source: Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

ALONE_FROM = 0.01  # a layer without a partner is cut from this share of all products


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        layer: the same for all calls of a layer.
        inputs, outputs: tensors.
        ways: the layer's ways to be cut, and into at most how many parts.
        dims: for "column" and "row", which dim of output or input is in parts.
        flops: of this call.
        passes: whether it gives in parts what it gets in parts; its own weights then are "aligned".
    """

    layer: Hashable
    inputs: tuple[Hashable, ...]
    outputs: tuple[Hashable, ...]
    ways: Mapping[str, int] = field(default_factory=dict)
    dims: Mapping[str, int | None] = field(default_factory=dict)
    flops: int = 0
    passes: bool = False


@dataclass(frozen=True)
class Decision:
    """What becomes of a layer: the name of a way; "" where it stays whole; why, either way."""

    way: str
    reason: str


@dataclass
class _Stretch:
    tensors: set = field(default_factory=set)
    into: list[Call] = field(default_factory=list)
    out_of: list[Call] = field(default_factory=list)
    within: list[Call] = field(default_factory=list)


def decisions(
    calls: Sequence[Call], borders: Sequence[Hashable], parts: int
) -> dict[Hashable, Decision]:
    """What becomes of each layer that multiplies, or looks up.

    Args:
        calls: of a model, in their order.
        borders: the model's inputs and outputs, which are whole.
        parts: devices of a group.
    """
    found: dict[Hashable, Decision] = {}
    _heads_and_tokens(calls, parts, found)
    pairs = [s for s in _stretches(calls) if _is_pair(s, calls, set(borders), parts)]
    for stretch in sorted(pairs, key=_flops, reverse=True):
        members = {call.layer for call in (*stretch.into, *stretch.out_of)}
        if members & set(found):
            continue
        found |= {call.layer: Decision("column", "of a pair") for call in stretch.into}
        found |= {call.layer: Decision("row", "of a pair") for call in stretch.out_of}
        found |= {c.layer: Decision("aligned", "in a pair") for c in stretch.within if c.ways}
    _alone(calls, parts, found)
    return found


def _flops(stretch: _Stretch) -> int:
    return sum(call.flops for call in (*stretch.into, *stretch.out_of, *stretch.within))


def _heads_and_tokens(calls: Sequence[Call], parts: int, found: dict) -> None:
    for call in calls:
        for way in ("heads", "tokens"):
            if call.ways.get(way, 0) >= parts:
                found[call.layer] = Decision(way, "")
            elif way == "heads" and way in call.ways:
                few = f"{call.ways[way]} heads for {parts} devices"
                found[call.layer] = Decision("", few)


def _stretches(calls: Sequence[Call]) -> list[_Stretch]:
    """Tensors that belong together, with the layers at their ends, in the order of calls."""
    leader: dict[Hashable, Hashable] = {}

    def find(tensor: Hashable) -> Hashable:
        while leader.setdefault(tensor, tensor) != tensor:
            tensor = leader[tensor]
        return tensor

    def unite(tensors: Sequence[Hashable]) -> None:
        for tensor in tensors[1:]:
            leader[find(tensor)] = find(tensors[0])

    by_layer: dict[Hashable, list[Call]] = {}
    for call in calls:
        by_layer.setdefault(call.layer, []).append(call)
        if call.passes:
            unite((*call.inputs, *call.outputs))
    for same in by_layer.values():  # a layer that is called twice is cut one way
        if not same[0].passes:
            unite([x for call in same for x in call.inputs[:1]])
            unite([x for call in same for x in call.outputs[:1]])
    stretches: dict[Hashable, _Stretch] = {}
    for call in calls:
        for tensor in (*call.inputs, *call.outputs):
            stretches.setdefault(find(tensor), _Stretch()).tensors.add(tensor)
        if call.passes:
            stretches[find(call.outputs[0])].within.append(call)
            continue
        for tensor in call.outputs:
            stretches[find(tensor)].into.append(call)
        for tensor in call.inputs:
            stretches[find(tensor)].out_of.append(call)
    return list(stretches.values())


def _is_pair(stretch: _Stretch, calls: Sequence[Call], borders: set, parts: int) -> bool:
    into, out_of = stretch.into, stretch.out_of
    if not into or not out_of or stretch.tensors & borders:
        return False
    made = {x for call in calls for x in call.outputs}
    if not stretch.tensors <= made:  # something between layers made it
        return False
    if {call.layer for call in into} & {call.layer for call in out_of}:
        return False
    sizes = [c.ways.get("column", 0) for c in into] + [c.ways.get("row", 0) for c in out_of]
    dims = [c.dims.get("column") for c in into] + [c.dims.get("row") for c in out_of]
    return len(set(sizes)) == 1 and sizes[0] >= parts and len(set(dims)) == 1


def _alone(calls: Sequence[Call], parts: int, found: dict) -> None:
    """Columns for layers without a partner, if they are worth the gather behind them."""
    total = sum(call.flops for call in calls) or 1
    flops: dict[Hashable, int] = {}
    ways: dict[Hashable, Mapping[str, int]] = {}
    for call in calls:
        if call.ways and call.layer not in found and not call.passes:
            flops[call.layer] = flops.get(call.layer, 0) + call.flops
            ways[call.layer] = call.ways
    for layer, own in flops.items():
        possible = [way for way in ("column", "row") if ways[layer].get(way, 0) >= parts]
        if not possible:
            found[layer] = Decision("", f"{max(ways[layer].values())} indices for {parts} devices")
        elif own < ALONE_FROM * total:
            found[layer] = Decision("", f"no partner, {own / total:.1%} of the products")
        else:
            found[layer] = Decision(possible[0], "no partner: gathered")
