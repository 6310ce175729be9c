"""Variables that exist once, in places of their own: replicas read them from there."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.internals import (
    BaseOptimizer,
    distribute_lib,
    layer_of_late_variable,
    values_util,
)
from tfparallel.replicas.assigned_once import CentralLayerVariable
from tfparallel.replicas.local import LocalExtended
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.state_changes import StateChanges, current_inputs
from tfparallel.replicas.variables import CentralVariable


class CentralExtended(LocalExtended):
    """Replicated computation over variables that exist once, on `parameter_devices`."""

    _replicated_class = CentralVariable
    _changes: StateChanges | None = None  # of `CentralLayerVariable`s, while a step runs

    def _variable_class(self, owner: object, kwargs: Mapping[str, object]) -> type:
        # Statistics need a copy for each replica, also those that are created late.
        own_class = super()._variable_class(owner or layer_of_late_variable(), kwargs)
        is_others = isinstance(owner, (BaseOptimizer, keras.random.SeedGenerator))
        is_once = kwargs.get("aggregation") in (None, tf.VariableAggregation.NONE)
        if own_class is CentralVariable and is_once and not is_others:
            return CentralLayerVariable
        return own_class

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        with super()._step_of(model):
            if self._num_replicas_in_sync == 1:
                yield
                return
            shares: dict[int, tuple] = {}

            def current_replica() -> int | None:
                step, i = current_replica_step(), values_util.get_current_replica_id_as_int()
                if step is not None and i is not None:
                    shares[i] = step.rows, step.weight
                return None if step is None else i

            self._changes = StateChanges(model, current_replica, current_inputs, shares)
            try:
                yield
                self._changes.assign()
            finally:
                self._changes = None

    def _reduce_gradients(self, gradients: list) -> list:
        if current_replica_step() is not None:
            distribute_lib.get_replica_context().merge_call(lambda _: self._assign_changes())
        return super()._reduce_gradients(gradients)

    def _assign_changes(self) -> None:
        if self._changes is not None:
            self._changes.assign()

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        applying = contextlib.nullcontext() if self._changes is None else self._changes.applying()
        with applying:
            return super()._apply_reduced(apply, gradients, variables)

    def _replica_ctx_update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        if isinstance(var, CentralVariable) and values_util.get_current_replica_id_as_int() != 0:
            return None  # replica 0 computes the same update, for all
        return super()._replica_ctx_update(var, fn, args, kwargs, group)
