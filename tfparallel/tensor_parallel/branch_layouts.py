"""Which device of a group has and computes each layer of a branch: found in a model, or given.

A weight of a branch is whole on its device: a variable in one part, which is not on the first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import keras

from tfparallel.internals.keras_layers import layers_of, own_variables
from tfparallel.tensor_parallel.branches import places
from tfparallel.tensor_parallel.calls_on_device import hook_on_device
from tfparallel.tensor_parallel.computing_groups import ComputingGroups
from tfparallel.tensor_parallel.cuts import is_cut_by_type
from tfparallel.tensor_parallel.found_layouts import Found, FoundLayouts, as_call
from tfparallel.tensor_parallel.layer_calls import ModelCalls
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.mesh_groups import MeshGroups
from tfparallel.tensor_parallel.rows import Rows


@dataclass
class FoundBranches(FoundLayouts):
    """`layout="branches"`: what is computed side by side is, the dearest branches first."""

    def find(
        self, extended: ComputingGroups, model: keras.Model, calls: ModelCalls
    ) -> dict[int, Found]:
        """As `FoundLayouts.find`; hooks the layers of branches."""
        del model
        ends = [id(x) for x in calls.borders]
        found = places([as_call(call) for call in calls.calls], ends, self.groups.parts)
        weights: dict[int, Found] = {}
        for layer, place in found.items():
            rows = _whole_on(place.device)
            for each in layers_of(layer):
                for weight in own_variables(each):
                    weights[id(weight)] = rows(tuple(weight.shape)) or place.reason or _SCALAR
            if place.device is not None:
                self.branches[layer] = place.device
                hook_on_device(layer, extended, place.device)
        return weights

    def hook(self, model: keras.Model, extended: ComputingGroups) -> None:
        """`find` has done so."""


_SCALAR = "a scalar is on the first device"


def _whole_on(device: int | None) -> Callable[[tuple], Rows | None]:
    """Makes of a shape how a weight is kept: on that device, if it is not the first."""

    def rows(shape: tuple) -> Rows | None:
        return Rows(0, (shape[0],), first=device) if device and shape else None

    return rows


@dataclass
class GivenBranches(Layouts):
    """Patterns of paths, each with the number of a device.

    Attributes:
        devices: by pattern, a regular expression that is searched for in paths of layers.
    """

    devices: Mapping[str, int] = field(default_factory=dict)

    def check_devices(self) -> None:
        """Refuses what is no device of the group.

        Raises:
            ValueError: naming pattern and number.
        """
        for pattern, number in self.devices.items():
            if number not in range(self.groups.parts):
                raise ValueError(
                    f"Expected the number of a device of the group, 0 to {self.groups.parts - 1}. "
                    f"Received: {number!r} for {pattern!r}."
                )

    def _rows(
        self, path: str, shape: tuple, trainable: bool, blocks: int
    ) -> tuple[Rows | None, str]:
        del blocks
        device = self._device_of(path)
        if not trainable:
            return None, "it is not trainable: each replica assigns it"
        if device is None:
            return None, "no pattern matches"
        if not shape or not device:
            return None, "on the first device"
        return Rows(0, (shape[0],), first=device), ""

    def _device_of(self, path: str) -> int | None:
        matching = [pattern for pattern in self.devices if re.search(pattern, path)]
        numbers = {self.devices[pattern] for pattern in matching}
        self._matched.update(matching)
        if len(numbers) > 1:
            raise ValueError(
                f"Expected one device for '{path}'. Received: {matching} match it, which say "
                f"{sorted(numbers)}."
            )
        return numbers.pop() if numbers else None

    def hook(self, model: keras.Model, extended: ComputingGroups) -> None:
        """Has devices compute the layers of `model` whose paths match."""
        within: set[int] = set()
        for layer in layers_of(model):
            is_one = len(layers_of(layer)) == 1 or is_cut_by_type(layer)
            if layer is model or not is_one or id(layer) in within:
                continue
            device = self._device_of(layer.path or layer.name)
            if device is not None:
                within |= {id(each) for each in layers_of(layer)}
                self.branches[layer] = device
                hook_on_device(layer, extended, device)

    def check_patterns(self, model: keras.Model) -> None:
        """Refuses patterns that match nothing.

        Raises:
            ValueError: naming the patterns, and the paths that there are.
        """
        unused = [pattern for pattern in self.devices if pattern not in self._matched]
        if unused:
            raise ValueError(
                f"Every pattern must match a layer. Received: {unused}, which match none of "
                f"{[layer.path or layer.name for layer in layers_of(model)]}."
            )


def given_branches(devices: Mapping[str, int], groups: MeshGroups) -> GivenBranches:
    """Branches by patterns.

    Raises:
        ValueError: for numbers of devices that the group has not.
    """
    branches = GivenBranches(None, groups, devices=dict(devices))
    branches.check_devices()
    return branches
