"""The functions of the stages: each is traced once, and called for every microbatch."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals.shared_constants import constants_shared
from tfparallel.replicas.local_copies import copies_here
from tfparallel.segments.differentiated_graphs import note_segment
from tfparallel.segments.wide_integers import WideFunction, widened


class StageFunctions:
    """Those of one step that is being traced.

    Args:
        is_shared: whether they are of several pipelines.
        pipelines: all devices of each, in one order, where devices are written into functions that
            are shared. Default: functions are on no device of their own.

    Attributes:
        places: of the functions, as `GraphFunction` has it.
    """

    def __init__(self, is_shared: bool = False, pipelines: Sequence[Sequence[str]] = ()) -> None:
        self._is_shared, self._pipelines = is_shared, pipelines
        self.places = functools.partial(_places, pipelines)
        self._sources: dict[Any, Any] = {}
        self._concrete: dict[Hashable, Any] = {}
        self._traced: dict[Hashable, tuple[Any, WideFunction]] = {}
        self._returned: dict[Any, Sequence[tf.DType]] = {}
        self._built: dict[Hashable, Any] = {}
        self._trainable: dict[Any, Sequence] = {}

    def concrete(
        self, stage: int, key: Hashable, function: Callable, inputs: Sequence
    ) -> tf.types.experimental.ConcreteFunction:
        """`function` on `stage` as it is traced for `inputs`, at its first call with a key.

        It takes and returns int64 for int32: `wide_integers.py`.
        """
        dtypes = tuple(x.dtype for x in inputs)
        if (stage, key, dtypes) not in self._traced:
            wide = WideFunction(function, dtypes)
            self._traced[stage, key, dtypes] = _traced_once(stage, wide), wide
        traced, wide = self._traced[stage, key, dtypes]
        if not self._is_shared:
            concrete = traced.get_concrete_function(*widened(inputs))
            self._returned.setdefault(concrete, wide.returned)
            return concrete
        # TensorFlow would trace anew for the replicas of each device.
        shapes = (stage, key, dtypes, *(tuple(x.shape) if x.shape.rank else None for x in inputs))
        if shapes not in self._concrete:
            with contextlib.nullcontext() if self._pipelines else tf.device(None):
                concrete = traced.get_concrete_function(*widened(inputs))
            self._concrete[shapes] = concrete
            self._returned.setdefault(concrete, wide.returned)
            self._sources[concrete] = traced
        return self._concrete[shapes]

    def traced_here(
        self, concrete: tf.types.experimental.ConcreteFunction, inputs: Sequence
    ) -> tf.types.experimental.ConcreteFunction:
        """`concrete` with the devices of the calling pipeline, for who does not ask `places`.

        Args:
            inputs: of the call, as the function takes them.
        """
        if not self._pipelines or concrete not in self._sources:
            return concrete
        return self._sources[concrete].get_concrete_function(*inputs)

    def returned(self, concrete: object) -> Sequence[tf.DType]:
        """The types of what the function itself returned when it was traced."""
        return self._returned[concrete]

    def watched_variables(self, concrete: tf.types.experimental.ConcreteFunction) -> Sequence:
        """Variables that tapes must hear of, and the step's graph at the first call."""
        if concrete in self._trainable:
            return self._trainable[concrete]
        variables = concrete.graph.variables
        self._trainable[concrete] = [x for x in variables if x.trainable]
        return variables

    def captures(
        self,
        concrete: tf.types.experimental.ConcreteFunction,
        own_copy: Callable[[tf.Variable], tf.Variable],
    ) -> list[tf.Tensor | tf.Variable]:
        """What `concrete` takes beside its inputs: tensors, and the caller's copies of variables.

        Args:
            own_copy: of a variable that `concrete` was traced with.
        """
        copies = [copy for variable in concrete.graph.variables for copy in copies_here(variable)]
        by_handle = {id(copy.handle): copy for copy in copies}
        return [
            own_copy(by_handle[id(each)]) if id(each) in by_handle else each
            for each in concrete.captured_inputs
        ]

    def once(self, key: Hashable, build: Callable, *arguments: object) -> Any:
        """What `build(*arguments)` gave when it was first asked for with this key."""
        if key not in self._built:
            self._built[key] = build(*arguments)
        return self._built[key]


def _places(pipelines: Sequence[Sequence[str]], device: str) -> Mapping[str, str]:
    """Where a function that `device` calls computes: in its pipeline, whoever has traced it."""
    own = next((each for each in pipelines if device in each), ())
    return {old: new for each in pipelines for old, new in zip(each, own, strict=True)}


def _traced_once(stage: int, function: Callable) -> object:
    def named(*inputs: tf.Tensor) -> list:
        graph = tf.compat.v1.get_default_graph()
        note_segment(graph)
        # The name is that in errors of the stage's operations.
        with tf.name_scope(f"stage_{stage}"), constants_shared(graph):
            return function(*inputs)

    named.__name__ = f"tfparallel_stage_{stage}"
    return tf.function(named, autograph=False)
