"""How far each microbatch of a step has come: which round it is in, and where a tensor was made.

A round is one way of all microbatches through the stages and back. A step has one, unless it
computes forward again after gradients: a GAN, whose generator is trained with the discriminator
that has just been, has two. The schedule orders the passes of each round.
"""

import collections
from collections.abc import Iterable

import tensorflow as tf


class Rounds:
    """Of one step that is being traced."""

    def __init__(self) -> None:
        self._round: collections.Counter[int] = collections.Counter()
        self._is_back: set[int] = set()
        self._made_in: dict[tf.Operation, tuple[int, int]] = {}

    def current(self, microbatch: int) -> int:
        """The round of what `microbatch` computes forward now."""
        if microbatch in self._is_back:
            self._is_back.remove(microbatch)
            self._round[microbatch] += 1
        return self._round[microbatch]

    def come_back(self, microbatch: int) -> int:
        """Tells that `microbatch` is on its way back; gives its round, which ends with that."""
        self._is_back.add(microbatch)
        return self._round[microbatch]

    def note(self, operation: tf.Operation, in_round: int, stage: int) -> None:
        """Tells of a pass: an operation of `stage`."""
        self._made_in[operation] = (in_round, stage)

    def latest(self, tensors: Iterable[tf.Tensor]) -> tuple[int, int]:
        """The last round, and its last stage, that `tensors` of the step's graph depend on."""
        operations = [tensor.op for tensor in tensors if tf.is_symbolic_tensor(tensor)]
        stack = [operation for operation in operations if operation not in self._made_in]
        while stack:
            operation = stack[-1]
            before = [tensor.op for tensor in operation.inputs]
            unknown = [each for each in before if each not in self._made_in]
            if unknown:
                stack += unknown
            else:
                latest = max((self._made_in[each] for each in before), default=(0, 0))
                self._made_in.setdefault(stack.pop(), latest)
        return max((self._made_in[each] for each in operations), default=(0, 0))
