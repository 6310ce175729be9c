"""Layers that the user puts on a stage, by constructing them within `with strategy.stage(i):`."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfparallel.internals.new_operations import new_operations_told
from tfparallel.pipeline.parts import Part


class Placement:
    """Which operations were constructed for which stage.

    Args:
        num_stages: how many stages there are.
    """

    def __init__(self, num_stages: int):
        self._num_stages = num_stages
        self._stage_of: Any = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def stage(self, index: int) -> Iterator[None]:
        """Within it, what the calling thread constructs is put on stage `index`.

        Raises:
            ValueError: if there is no such stage.
        """
        if not isinstance(index, int) or not 0 <= index < self._num_stages:
            raise ValueError(
                f"A stage must be a whole number from 0 to {self._num_stages - 1}. "
                f"Received: stage({index!r})."
            )
        stage_of = self._stage_of

        def put_on_stage(operation: keras.Operation) -> None:
            stage_of[operation] = index

        with new_operations_told(put_on_stage):
            yield

    def places(self, parts: Sequence) -> bool:
        """Whether some of `parts` were constructed for a stage."""
        return any(self._placed(part) is not None for part in parts)

    def _placed(self, part: Part) -> int | None:
        """The stage that a part was constructed for, or else the innermost model around it."""
        own = [self._stage_of.get(each) for each in (part.operation, *reversed(part.models))]
        return next((stage for stage in own if stage is not None), None)

    def stages(self, parts: Sequence) -> list[int]:
        """The stage of each of `parts`, which `places`.

        Operations that are no layers, such as `x + y`, and were constructed outside of any stage
        are 0 here: they follow what they take.

        Raises:
            ValueError: naming layers that were not constructed for a stage.
        """
        names = [
            part.name
            for part in parts
            if self._placed(part) is None and isinstance(part.operation, keras.Layer)
        ]
        if names:
            raise ValueError(
                "Where some layers are constructed in `with strategy.stage(i):`, all must be. "
                f"Received: {', '.join(map(repr, names[:10]))} outside of any stage."
            )
        return [self._placed(part) or 0 for part in parts]


def check_no_stage_is_empty(stage_of: Sequence[int], num_stages: int, model_name: str) -> None:
    """Refuse a division that leaves a stage without layers.

    Raises:
        ValueError: naming the stages.
    """
    empty = sorted(set(range(num_stages)) - set(stage_of))
    if empty:
        raise ValueError(
            f"Every stage must have a layer. Received: none for stage "
            f"{', '.join(map(str, empty))} of model '{model_name}'. A layer goes behind all whose "
            "outputs it takes: give stages in the order in which the layers run, or use fewer."
        )
