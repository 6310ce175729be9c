"""Variables that exist once, in places of their own: replicas read them from there."""

from collections.abc import Callable, Mapping
from typing import Any

from tfparallel.internals import layer_of_late_variable, values_util
from tfparallel.replicas.local import LocalExtended
from tfparallel.replicas.variables import CentralVariable


class CentralExtended(LocalExtended):
    """Replicated computation over variables that exist once, on `parameter_devices`."""

    _replicated_class = CentralVariable

    def _variable_class(self, owner: object, kwargs: Mapping[str, Any]) -> type:
        # Statistics need a copy for each replica, also those that are created late.
        return super()._variable_class(owner or layer_of_late_variable(), kwargs)

    def _replica_ctx_update(
        self, var: Any, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> Any:
        if isinstance(var, CentralVariable) and values_util.get_current_replica_id_as_int() != 0:
            return None  # replica 0 computes the same update, for all
        return super()._replica_ctx_update(var, fn, args, kwargs, group)
