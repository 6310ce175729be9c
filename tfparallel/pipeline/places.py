"""On which stage each part of a model is."""

import keras

from tfparallel.pipeline.parts import Calls, Member, Part, is_opened, members
from tfparallel.pipeline.stages import Stages


class Places:
    """Where the parts of a model are."""

    def __init__(self, stages: Stages):
        self._by_key: dict[tuple, tuple[Part, int]] = {}
        self._paths: dict[int, str] = {}
        for part, stage in zip(stages.parts, stages.stage_of, strict=True):
            for depth, model in enumerate(part.models, 1):
                path = "/".join(part.name.split("/")[:depth])
                self._paths.setdefault(id(model), path)
            self._by_key[part.key] = (part, stage)
            # For a call that the division does not know of, such as a user's own of a nested model.
            self._by_key.setdefault(part.key[1:], (part, stage))
            # For a Sequential model that Keras builds, as a graph, in the first step only.
            self._by_key.setdefault((id(part.operation),), (part, stage))

    def find(self, operation: object, key: tuple[Calls, int]) -> tuple[Part, int]:
        """The part of this operation and key, and its stage."""
        keys = (key, key[1:], (id(operation),))
        return next(self._by_key[each] for each in keys if each in self._by_key)

    def path(self, model: keras.Model) -> str:
        """The name of a nested model, behind those of the models around it."""
        return self._paths[id(model)]

    def stages(self, member: Member, calls: Calls) -> set[int]:
        """All stages of a member of a model, within `calls`."""
        if is_opened(member.operation):
            return self.stages_of_model(member.operation, member.within(calls))
        return {self.find(member.operation, member.key(calls))[1]}

    def stages_of_model(self, model: keras.Model, calls: Calls) -> set[int]:
        """All stages of a nested model, within `calls`."""
        return set().union(*(self.stages(member, calls) for member in members(model)))
