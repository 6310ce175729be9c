"""Which layers' activations are computed again in the backward pass, or wait for it on the host.

    forward    x -> [block] -> y         kept: x and y, and what must not be computed twice
    backward   dy, x -> [block] again -> dx

    forward    x -> [block] -> y         kept: x, y and what is between them, by the host
    backward   dy, x, y, ... -> dx

What is computed again draws random numbers by the same seeds, so that a step trains to the weights
of one that keeps all. What has effects, is read or received is kept.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import keras

from tfparallel.checked_types import checks_types
from tfparallel.internals.keras_layers import direct_layers
from tfparallel.replicas.remat_scopes import (
    Wants,
    of_any_outputs,
    wanted_by_scopes,
    without_remat_of_keras,
)
from tfparallel.segments.layer_paths import Patterns, check_patterns, is_named, layers_by_path
from tfparallel.segments.step_segments import Called, StepSegments

_WORDS = ("none", "full")


@checks_types
@dataclasses.dataclass(frozen=True)
class MemoryPolicy:
    """What a step keeps from its forward pass for its backward pass.

    `keras.RematScope` says the same of the layers that are made in it, and counts under every
    policy. Of layers in one another the outermost is computed again as a whole.

    Attributes:
        rematerialize: "none"; "full" for each layer that the model has itself, so that of a model
            of blocks each block is computed again on its own; or patterns of layers such as
            `{"block_*"}`, by name or by path.
        offload: said likewise, of layers whose activations are on the host from their forward to
            their backward pass. Of layers that are computed again too, that is what they are
            computed from. It comes back while the layer behind is differentiated.

    Raises:
        ValueError: for another word, or patterns that are none.
    """

    rematerialize: str | Patterns = "none"
    offload: str | Patterns = "none"

    def __post_init__(self) -> None:
        for what in ("rematerialize", "offload"):
            choice = getattr(self, what)
            if (isinstance(choice, str) and choice not in _WORDS) or not choice:
                raise ValueError(
                    f"`{what}` must be one of {', '.join(map(repr, _WORDS))} or a set of "
                    f"patterns of layers. Received: {choice!r}."
                )

    def rematerialized(self, model: keras.Model) -> list[tuple[keras.Layer, Wants]]:
        """The layers that are computed again, and for which outputs.

        Raises:
            ValueError: for a pattern that names no layer.
        """
        chosen: dict[int, tuple[keras.Layer, Wants]] = {}
        for layer, wants in wanted_by_scopes(model):
            chosen[id(layer)] = (layer, wants)
        for layer in _named("rematerialize", self.rematerialize, model):
            chosen[id(layer)] = (layer, of_any_outputs)
        return [
            each for each in chosen.values() if not isinstance(each[0], keras.layers.InputLayer)
        ]

    def offloaded(self, model: keras.Model) -> list[keras.Layer]:
        """The layers whose activations are on the host until their backward passes.

        Raises:
            ValueError: for a pattern that names no layer, or a model that XLA compiles.
        """
        named = _named("offload", self.offload, model)
        if named and getattr(model, "jit_compile", False) is True:
            raise ValueError(
                "XLA computes on one device, and moves nothing to the host. Received: "
                f"offload={self.offload!r}, and a model compiled with jit_compile=True. Leave one "
                "of them out."
            )
        return [layer for layer in named if not isinstance(layer, keras.layers.InputLayer)]

    def segments(self, model: keras.Model) -> list[Called]:
        """The layers that are computed again, or offloaded, as segments of a step."""
        wants = {id(layer): (layer, wanted) for layer, wanted in self.rematerialized(model)}
        moved = {id(layer): layer for layer in self.offloaded(model)}
        again = [Called(x, None, wanted, id(x) in moved) for x, wanted in wants.values()]
        return again + [Called(x, offloads=True) for key, x in moved.items() if key not in wants]

    @contextlib.contextmanager
    def during(
        self,
        model: keras.Model,
        own_devices: Callable[[], Sequence[str]] | None = None,
        in_xla: bool | None = None,
    ) -> Iterator[StepSegments]:
        """Within it, a step of `model` is traced that keeps what the policy says.

        Args:
            own_devices: those that compute the calling replica, where they are several.
            in_xla: whether XLA compiles the step; None: where the model says so.
        """
        if in_xla is None:
            in_xla = getattr(model, "jit_compile", False) is True
        segments = StepSegments(own_devices=own_devices, in_xla=in_xla)
        with without_remat_of_keras(model), segments.called(self.segments(model)):
            yield segments

    def of_groups(self, own_devices: Callable[[], Sequence[str]]) -> Callable:
        """`during`, where several devices compute a replica.

        Args:
            own_devices: gives those of the calling replica.
        """
        return functools.partial(self.during, own_devices=own_devices)


def around_inner(memory: MemoryPolicy | None, inner: object) -> Callable | None:
    """What a strategy of several processes does around a step; None where its `inner` does it.

    Raises:
        ValueError: for a policy beside an inner strategy.
    """
    if inner is None:
        return (memory or MemoryPolicy()).during
    if memory is not None:
        raise ValueError(
            f"A strategy in each process keeps by its own policy. Received: {memory} beside "
            f"inner={inner!r}. Give `memory` to the inner strategy."
        )
    return None


def _named(what: str, choice: str | Patterns, model: keras.Model) -> list[keras.Layer]:
    if choice == "none":
        return []
    if choice == "full":
        return direct_layers(model)
    layers = layers_by_path(model)
    check_patterns(what, choice, layers)
    return [layer for path, layer in layers.items() if is_named(path, choice)]
