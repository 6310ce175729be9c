"""Which activations are computed again in the backward pass, instead of kept until then.

A stage then keeps its inputs for a microbatch, and what must not be computed twice: random numbers,
and the results of operations with effects.

Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; in a pipeline, GPipe, Huang et al. 2019,
https://arxiv.org/abs/1811.06965, and "except_last" in torchgpipe, Kim et al. 2020,
https://arxiv.org/abs/2004.09910.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfparallel.internals.hooks import shadowed, wrapped
from tfparallel.pipeline.plans.action import Action
from tfparallel.pipeline.plans.partition import matches
from tfparallel.pipeline.plans.schedule import Schedule
from tfparallel.replicas.remat_scopes import Wants, wanted_by_scopes
from tfparallel.segments.layer_paths import Patterns

Choice = str | Patterns
_WORDS = ("none", "except_last", "full")


class Rematerialization:
    """What is computed again.

    Args:
        choice: "none"; "full"; "except_last": all, but not for a microbatch whose backward pass on
            a stage directly follows its forward pass (under GPipe the last one, under 1F1B all of
            the last stage), as nothing would be saved; or patterns of names of layers.
        schedule: the order of passes.

    Raises:
        ValueError: for another word, or patterns that are none.
    """

    def __init__(self, choice: Choice, schedule: Schedule):
        if (isinstance(choice, str) and choice not in _WORDS) or not choice:
            raise ValueError(
                f"rematerialize must be one of {', '.join(map(repr, _WORDS))} or a set of patterns "
                f"of layer names. Received: rematerialize={choice!r}."
            )
        self._choice = choice
        self._patterns = () if isinstance(choice, str) else tuple(choice)
        self._has_scopes = False
        self._marked: set[tf.Operation] = set()
        self._at_once = {
            (before.stage, before.microbatch)
            for order in schedule.orders
            for before, after in itertools.pairwise(order)
            if before.kind == "forward" and _ends(before, after)
        }

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse a pattern that matches none of a model's `names` of layers.

        Raises:
            ValueError: naming the pattern.
        """
        idle = [p for p in self._patterns if not any(matches(name, p) for name in names)]
        if idle:
            raise ValueError(
                "Every pattern of rematerialize must match a layer. Received: "
                f"{', '.join(map(repr, idle))}. The layers are "
                f"{', '.join(map(repr, names[:10]))}{' ...' if len(names) > 10 else ''}."
            )

    @contextlib.contextmanager
    def traced(self, name: str) -> Iterator[None]:
        """Within it, the operations of the layer of this name are traced."""
        if not any(matches(name, pattern) for pattern in self._patterns):
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        self._marked.update(graph.get_operations()[before:])

    @contextlib.contextmanager
    def as_scopes_say(self, model: keras.Model) -> Iterator[None]:
        """Within it, a step of `model` is traced; layers of a `keras.RematScope` do as it says."""
        with contextlib.ExitStack() as hooks:
            for layer, wants in wanted_by_scopes(model):
                self._has_scopes = True
                hooks.enter_context(
                    shadowed(
                        layer,
                        "call",
                        wrapped(layer, "call", functools.partial(self._call, wants)),
                        during="the tracing of a pipeline's step",
                        why="What a layer of a `RematScope` computes is noted.",
                    )
                )
            yield

    def _call(self, wants: Wants, original: Callable, *args: object, **kwargs: object) -> object:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        outputs = original(*args, **kwargs)
        if wants(outputs):
            self._marked.update(graph.get_operations()[before:])
        return outputs

    def is_done(self, stage: int, microbatch: int) -> bool:
        """Whether anything is computed again on `stage` for `microbatch`."""
        is_left_out = self._choice == "except_last" and (stage, microbatch) in self._at_once
        return (self._choice != "none" or self._has_scopes) and not is_left_out

    @property
    def recomputes(self) -> Callable[[tf.Operation], bool]:
        """Whether the results of an operation are computed again, where it `is_done`."""
        is_in_part = self._patterns or self._choice == "none"
        return self._marked.__contains__ if is_in_part else lambda operation: True


def _ends(forward: Action, after: Action) -> bool:
    same_pass = (after.stage, after.microbatch) == (forward.stage, forward.microbatch)
    return same_pass and after.kind in ("backward", "backward_input")
