"""Masks that a layer takes away from its inputs, so that whoever takes those later sees none.

Keras's MultiHeadAttention does: it has applied them. On one device "later" is later in the order
in which Keras calls the layers of a model; stages may run parts of it in another order. So within
a graph tensors keep their masks, each call is shown those of one device, and those that were taken
go when all have run.
"""

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence

import keras

from tfparallel.internals import get_keras_mask, set_keras_mask
from tfparallel.internals.keras_layers import functional_graph
from tfparallel.pipeline.parts import Member, members

_SAME = "_tfparallel_same"  # of tensors that are one on one device: all of them


class MasksInOrder:
    """Which masks the members of a graph see.

    Args:
        own: these members, in the order in which Keras calls them. Tensors are named as there.
    """

    def __init__(self, own: Sequence[Member]):
        self._names = [member.operation.name for member in own]
        self._inputs = [
            [id(x) for x in each.node.input_tensors] if each.node else [] for each in own
        ]
        # By a member's number: for tensors whose mask it takes or gives whether they have one then,
        # and for those that it was called with whether it saw one.
        self._changed = [dict.fromkeys(_taken_by(member), False) for member in own]
        self._saw: dict[int, dict[Hashable, bool]] = {}
        self._first: dict[Hashable, Hashable] = {}  # for a tensor that a member gave as it came

    @contextlib.contextmanager
    def seen_by(self, number: int, tensors: Mapping[Hashable, object]) -> Iterator[None]:
        """Within it member `number` is called, and sees the masks that it sees on one device."""
        if all(get_keras_mask(tensors[key]) is None for key in self._inputs[number]):
            yield
            return
        masks = {key: mask for key, x in tensors.items() if (mask := get_keras_mask(x)) is not None}
        before = self._changed_before(number)
        shown = {key: self._is_masked(key, before) for key in masks}
        for key in masks:
            if not shown[key]:
                set_keras_mask(tensors[key], None)
        self._saw[number] = {key: shown[key] for key in self._inputs[number] if key in masks}
        try:
            yield
            left = {key: get_keras_mask(tensors[key]) is not None for key in masks}
            self._changed[number] |= {key: left[key] for key in masks if left[key] != shown[key]}
        finally:
            for key, mask in masks.items():
                set_keras_mask(tensors[key], mask)

    def made(
        self, number: int, tensors: Mapping[Hashable, object], outputs: Mapping[Hashable, object]
    ) -> None:
        """Tells what member `number` gave: some of it may be what it took, as it came."""
        for key, output in outputs.items():
            for own in self._inputs[number]:
                if any(output is each for each in _same(tensors[own])):
                    self._first[key] = self._first.get(own, own)

    def end(self, tensors: Mapping[Hashable, object]) -> None:
        """Takes the masks away that are taken, when all members have run.

        Raises:
            ValueError: if one has not seen what it would have seen on one device.
        """
        for number, saw in self._saw.items():
            before = self._changed_before(number)
            for key, has_seen in saw.items():
                if has_seen != self._is_masked(key, before):
                    _, other = before[self._first.get(key, key)]
                    raise ValueError(self._refusal(self._names[number], self._names[other]))
        changed = self._changed_before(len(self._names))
        for key, tensor in tensors.items():
            if not self._is_masked(key, changed):
                take_mask(tensor)

    def _changed_before(self, number: int) -> dict[Hashable, tuple[bool, int]]:
        """Whether a tensor has its mask when `number` is called, and who has changed that last."""
        before: dict[Hashable, tuple[bool, int]] = {}
        for i in range(number):
            for key, is_masked in self._changed[i].items():
                before[self._first.get(key, key)] = is_masked, i
        return before

    def _is_masked(self, key: Hashable, changed: Mapping[Hashable, tuple[bool, int]]) -> bool:
        is_masked, _ = changed.get(self._first.get(key, key), (True, -1))
        return is_masked

    @staticmethod
    def _refusal(name: str, other: str) -> str:
        return (
            f"Layer '{name}' must not run before layer '{other}', which takes the mask of a tensor "
            f"that both are given, so that '{name}' sees none on one device. Received: a partition "
            f"that has '{name}' on an earlier stage. Put it on the stage of '{other}' or behind it."
        )


def _taken_by(member: Member) -> set[Hashable]:
    """Tensors whose masks a member takes, as far as its graph tells that before it runs.

    What is cast on its way is another tensor.
    """
    operation, node = member.operation, member.node
    if node is None:
        return set()
    attention = keras.layers.MultiHeadAttention
    if isinstance(operation, attention) and type(operation).call is attention.call:
        return {id(x) for x in node.input_tensors if x.dtype == operation.compute_dtype}
    graph = functional_graph(operation) if isinstance(operation, keras.Model) else None
    given = node.arguments.args[:1]
    inputs = keras.tree.flatten(given)
    by_name = any(isinstance(each, dict) for each in given)  # in an order of their own
    if graph is None or by_name or len(inputs) != len(graph.inputs):
        return set()
    taken = {key for each in members(operation) for key in _taken_by(each)}
    pairs = zip(inputs, graph.inputs, strict=True)
    return {id(x) for x, own in pairs if id(own) in taken and x.dtype == own.dtype}


def take_mask(tensor: object) -> None:
    """Takes the mask of a tensor away, and of all that are the same one on one device."""
    for each in _same(tensor):
        if get_keras_mask(each) is not None:
            set_keras_mask(each, None)


def note_same(like: Sequence[object], tensors: Sequence[object]) -> None:
    """Tells that those of `tensors` are one on one device where `like` has one object."""
    first: dict[int, object] = {}
    for own, tensor in zip(like, tensors, strict=True):
        same = _same(first.setdefault(id(own), tensor))
        if not any(tensor is each for each in same):
            same.append(tensor)
            for each in same:
                setattr(each, _SAME, same)


def as_on_one_device(tensors: Sequence) -> list:
    """These `tensors`, one object where they are one on one device: a layer takes one mask then.

    It is the one made last, so that nothing goes ahead of a layer that checked the others.
    """
    given = set(map(id, tensors))
    return [[each for each in _same(x) if id(each) in given][-1] for x in tensors]


def _same(tensor: object) -> list[object]:
    return getattr(tensor, _SAME, [tensor])
