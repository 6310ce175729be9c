"""What a gradient tape sees of the arguments of a stage's function.

arguments    x    handle of part 0   handle of part 1    handle of v
tape         x    handle of w                            handle of v
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import record
from tfparallel.internals.distribute import container_of
from tfparallel.pipeline.stage_variables import InPartsOnStage


class ArgumentsOnTape:
    """Of one call.

    Args:
        inputs: tensors.
        captures: tensors, and variables of TensorFlow.

    Attributes:
        arguments: of the function, tensors.
    """

    def __init__(self, inputs: Sequence[tf.Tensor], captures: Sequence[tf.Tensor | tf.Variable]):
        handles = [x.handle if isinstance(x, tf.Variable) else x for x in captures]
        self.arguments: list[tf.Tensor] = [*inputs, *handles]
        self._parts = [_part(x) for x in (*inputs, *captures)]
        self._seen = [
            argument if part is None else part.container.on_tape(part.copy)
            for argument, part in zip(self.arguments, self._parts, strict=True)
        ]

    def watched(self) -> tuple[bool, ...]:
        """For each argument whether a tape asks for its gradient."""
        return tuple(record.should_record_backprop([x]) for x in self._seen)

    def seen(self) -> list[tf.Tensor]:
        """What a tape is told that the function takes, each variable once."""
        return [self._seen[positions[0]] for positions in self._groups()]

    def told_apart(self) -> list[tf.Tensor]:
        """The arguments as tapes of any order differentiate them: each part is made of the whole.

            handle of w  ->  handle of part 0, handle of part 1  ->  the function

        A tape that is persistent, or in another, differentiates the function by itself, and knows
        no other handle of `w` than the one that it is asked about.
        """
        arguments = list(self.arguments)
        for positions in self._groups():
            if (part := self._parts[positions[0]]) is None:
                continue
            for i in positions:
                with tf.device(arguments[i].device):
                    arguments[i] = tf.identity(arguments[i])
            own = [arguments[i] for i in positions]
            seen = [part.container.on_tape(part.copy)]
            record.record_operation("PartsOfWhole", own, seen, self._of_whole(positions))
        return arguments

    def _of_whole(self, positions: Sequence[int]) -> Callable[..., list]:
        """The gradient of a whole, of those of the arguments at `positions`."""
        return lambda *own: [self._gradient(dict(zip(positions, own, strict=True)), positions)]

    def gradients(self, own: Sequence) -> list:
        """The gradients of what a tape sees, of those of all arguments."""
        return [self._gradient(own, positions) for positions in self._groups()]

    def _gradient(
        self, own: Sequence | Mapping[int, object], positions: Sequence[int]
    ) -> tf.Tensor | tf.IndexedSlices | None:
        part = self._parts[positions[0]]
        if part is None:
            return own[positions[0]]
        found = {self._parts[i].number: own[i] for i in positions}  # type: ignore[union-attr]
        numbers = range(part.container.num_parts)
        return part.container.gradient_of_whole([found.get(i) for i in numbers])

    def _groups(self) -> list[list[int]]:
        """The positions of arguments that are one for the tape."""
        groups: dict[Any, list[int]] = {}
        for i, part in enumerate(self._parts):
            key = i if part is None else (id(part.container), part.copy)
            groups.setdefault(key, []).append(i)
        return list(groups.values())


class _Part:
    """A variable that is a part of another one."""

    def __init__(self, container: InPartsOnStage, variable: tf.Variable):
        self.container = container
        self.copy, self.number = container.place_of(variable)


def _part(argument: object) -> _Part | None:
    container = container_of(argument) if isinstance(argument, tf.Variable) else None
    return _Part(container, argument) if isinstance(container, InPartsOnStage) else None
