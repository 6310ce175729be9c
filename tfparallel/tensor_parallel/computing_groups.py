"""What a layer that is computed in parts asks of the strategy: who computes it together."""

from collections.abc import Sequence
from typing import Protocol

import keras

from tfparallel.tensor_parallel.mesh_groups import MeshGroups


class LayoutsInStep(Protocol):
    """How layers are in parts while they are computed; `Layouts` is one."""

    groups: MeshGroups
    cuts_sequences: bool

    def of_output(self, layer: keras.Layer) -> Sequence[str | None] | None:
        """How the output of `layer` is to be in parts; None: as its rule leaves it."""


class ComputingGroups(Protocol):
    """The groups of devices of an `extended`; `HoldsParts` says more of it."""

    @property
    def layouts(self) -> LayoutsInStep:
        """How weights and outputs are in parts."""

    def own_group(self) -> Sequence[str]:
        """The devices that the caller computes with."""

    def is_own_context(self) -> bool:
        """Whether the caller is a replica of this strategy, or outside of all replicas."""
