"""How a variable in parts begins: each part is drawn alone, or cut of the whole value."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.replicas.device_names import hosts_of
from tfparallel.replicas.drawn_values import Drawn, drawn_value, form_of
from tfparallel.sharded.copies import SharesCopies
from tfparallel.sharded.flat_shards import FlatShards
from tfparallel.sharded.options import Sharding
from tfparallel.sharded.sharded_variables import (
    KeptWholeVariable,
    ShardedVariable,
    UpdatedOnHostVariable,
    is_sharded,
)


class CreatesParts(SharesCopies):
    """The first of the five decisions of `ShardedExtended`."""

    _sharding: Sharding
    _new_value: tf.Tensor | Drawn | None = None  # of a variable in parts that is created
    _new_is_slot = False

    def _create_variable(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
        leader = kwargs.get("colocate_with")
        if self._num_shards == 1 or not (kwargs.get("trainable") or is_sharded(leader)):
            return super()._create_variable(next_creator, **kwargs)
        kwargs = self._begin_new(kwargs, leader)
        if self._new_value is not None:
            kwargs.pop("shape", None)
            self._new_is_slot = leader is not None
        try:
            variable = super()._create_variable(next_creator, **kwargs)
            if self._is_new_on_host:
                variable.is_on_host = True
            return variable
        finally:
            self._new_value = None

    def _begin_new(self, kwargs: dict, leader: tf.Variable | None) -> dict:
        """`kwargs` with the initial value, which is `_new_value` if the variable will be in parts.

        What replicas store whole is drawn whole.
        """
        initial_value = kwargs["initial_value"]
        form = form_of(initial_value)
        is_part = self._class_of_new(leader is not None) is not KeptWholeVariable
        if is_part and form is not None and self._is_cut(*form, leader):
            with tf.init_scope():
                drawn = drawn_value(initial_value)
            if drawn is not None:
                agreed = self._begun_alike(drawn.announced(kwargs))["initial_value"]
                self._new_value = drawn.agreed(agreed)
                return {**kwargs, "initial_value": agreed}
        kwargs = self._begun_alike(kwargs)
        whole = _evaluated(kwargs["initial_value"], kwargs.get("dtype"))
        self._new_value = whole if self._is_cut(whole.shape, whole.dtype, leader) else None
        return {**kwargs, "initial_value": whole}

    def _is_cut(self, shape: tf.TensorShape, dtype: tf.DType, leader: tf.Variable | None) -> bool:
        """Whether a variable of this value is kept in parts.

        A scalar is not, though an optimizer (Nadam) may have a trainable one.
        """
        if not dtype.is_floating or not shape.is_fully_defined():
            return False
        if leader is not None:
            return is_sharded(leader) and shape == leader.shape
        smallest = max(self._sharding.min_size, self._num_shards)
        return shape.rank > 0 and shape.num_elements() >= smallest

    def _variable_class(self, owner: object, kwargs: Mapping[str, Any]) -> Any:
        if self._new_value is None:
            return super()._variable_class(owner, kwargs)
        shards = FlatShards(tuple(self._new_value.shape), self._num_shards)
        return functools.partial(self._class_of_new(self._new_is_slot), shards=shards)

    def _class_of_new(self, is_slot: bool) -> type[ShardedVariable]:
        """Of a weight in parts, or of an optimizer's slot for one."""
        if is_slot or self._sharding.weights_on_host:
            return ShardedVariable
        if self._sharding.shard != "parameters":
            return KeptWholeVariable
        return UpdatedOnHostVariable if self._sharding.slots_on_host else ShardedVariable

    def _variable_devices(self, variable_class: Any) -> tuple[str, ...]:
        devices = super()._variable_devices(variable_class)
        return tuple(hosts_of(devices)) if self._is_new_on_host else devices

    @property
    def _is_new_on_host(self) -> bool:
        sharding = self._sharding
        is_there = sharding.slots_on_host if self._new_is_slot else sharding.weights_on_host
        return self._new_value is not None and is_there

    def _initial_value(
        self,
        variable_class: Any,
        i: int,
        device: str,
        copies: Sequence,
        kwargs: Mapping[str, object],
    ) -> object:
        if self._new_value is None:
            return super()._initial_value(variable_class, i, device, copies, kwargs)
        if i == 0:  # replicas of one process start from one value
            self._agree_on_new(device, kwargs)
        value, shards = self._new_value, variable_class.keywords["shards"]
        index = self._shard_of(i)
        if not isinstance(value, Drawn):
            return variable_class.func.stored(shards, value, index)
        with tf.device(self._devices[i]):  # bits may be others on a host, where the part may be
            return value.padded_part(index * shards.length, (index + 1) * shards.length)

    def _agree_on_new(self, device: str, kwargs: Mapping[str, object]) -> None:
        """Replaces `_new_value` by rank 0's."""
        new = self._new_value
        given = new.announced(kwargs) if isinstance(new, Drawn) else kwargs
        agreed = self._agreed_initial_value(0, device, [], given)
        value = tf.convert_to_tensor(agreed() if callable(agreed) else agreed)
        self._new_value = new.agreed(value) if isinstance(new, Drawn) else value


def _evaluated(value: object, dtype: tf.DType | str | None) -> tf.Tensor:
    if callable(value):
        with tf.init_scope():
            value = value()
    value = getattr(value, "wrapped_value", value)  # of a checkpoint being restored
    return tf.convert_to_tensor(value, dtype)
