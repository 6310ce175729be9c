"""Variables in parts, as a layout says: how they are made and updated, whatever a replica is."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.internals import (
    BaseOptimizer,
    distribute_lib,
    distribute_utils,
    is_keras_step,
    is_predict_step,
    layer_of_late_variable,
    model_of_predict_step,
    owner_of_new_variable,
)
from tfparallel.internals.distribute import keep_number
from tfparallel.internals.keras_layers import behind, trained_by
from tfparallel.internals.keras_state import (
    enclosing_layers,
    shape_of_new,
    variable_under_creation,
)
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.replicas.drawn_values import Drawn, drawn_value
from tfparallel.replicas.elementwise import is_elementwise
from tfparallel.replicas.extended import ReplicatedExtended
from tfparallel.replicas.optimizer_hooks import gradient_source
from tfparallel.tensor_parallel.blocks import blocks_of
from tfparallel.tensor_parallel.drawn_pieces import NewPieces
from tfparallel.tensor_parallel.found_layouts import FoundLayouts, lay_out
from tfparallel.tensor_parallel.gradient_in_parts import GradientInParts, for_optimizer
from tfparallel.tensor_parallel.layer_rules import (
    hook_layer,
    name_layers_without_rule,
)
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.logits import logits_in_parts
from tfparallel.tensor_parallel.numbers_of_update import numbers_sent_once, update_on
from tfparallel.tensor_parallel.optimizer_parts import optimizer_hooks
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.split_variable import SplitVariable, in_part, split_of


class HoldsParts(ReplicatedExtended):
    """Mixed into an extended whose copies of some variables are in parts.

    Attributes:
        layouts: which, and how.
    """

    layouts: Layouts
    _split_class: type[SplitVariable] = SplitVariable

    @functools.cached_property
    def _thread(self) -> threading.local:
        return threading.local()

    def is_own_context(self) -> bool:
        """Whether the caller is a replica of this strategy, or outside of all replicas."""
        context = distribute_lib.get_replica_context()
        if context is None or context.strategy is self._container_strategy():
            return True
        return not tf.distribute.has_strategy()

    # ---- where variables live --------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
        rows = self._rows(kwargs)
        if rows is None:
            return super()._create_variable(next_creator, **kwargs)
        leader = kwargs.get("colocate_with")
        shards = self._shards_of(rows, leader)
        value, kwargs = self._value_of_new(kwargs)
        self._thread.new = (rows, shards, self._new_pieces(value, rows.cut(shards), leader))
        try:
            return super()._create_variable(next_creator, **kwargs)
        finally:
            self._thread.new = None

    def _value_of_new(self, kwargs: dict) -> tuple[tf.Tensor | Drawn, dict]:
        """What a variable begins with, and what its creator gets, of what workers agree on."""
        with tf.init_scope():
            drawn = drawn_value(kwargs["initial_value"])
        if drawn is not None:
            agreed = self._begun_alike(drawn.announced(kwargs))["initial_value"]
            return drawn.agreed(agreed), {**kwargs, "initial_value": agreed}
        kwargs = self._begun_alike(kwargs)
        value = kwargs["initial_value"]
        value = value() if callable(value) else value
        value = tf.convert_to_tensor(getattr(value, "wrapped_value", value), kwargs.get("dtype"))
        return value, {**kwargs, "initial_value": value}

    def _new_pieces(self, value: tf.Tensor | Drawn, stored: Rows, leader: object) -> NewPieces:
        """What is stored of a variable that is created."""
        del leader
        return NewPieces(value, stored)

    def _shards_of(self, rows: Rows, leader: object) -> int:
        """How many replicas store a copy of the variable together that is created."""
        del rows
        return leader.shards if isinstance(leader, SplitVariable) else 1

    def _rows(self, kwargs: Mapping[str, object]) -> Rows | None:
        """How the variable that is created will be in parts."""
        asked = getattr(self._thread, "asked", None)
        if asked is not None:
            return asked
        leader, keras_variable = kwargs.get("colocate_with"), variable_under_creation()
        if isinstance(leader, SplitVariable):  # of an optimizer, beside the weight that it is for
            same = keras_variable is None or shape_of_new(keras_variable) == tuple(leader.shape)
            return leader.rows if same else None
        self._note_slot(leader, keras_variable)
        layer = owner_of_new_variable() or layer_of_late_variable()
        if keras_variable is None or not isinstance(layer, keras.Layer):
            return None
        on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        trainable = bool(kwargs.get("trainable", True)) and not on_read
        path = keras_variable.path
        shape = shape_of_new(keras_variable)
        if shape is None:  # of a value that is there, such as the state of an RNN
            return None
        placement = self.layouts.place(path, shape, trainable, blocks_of(layer))
        is_cut = placement.rows is not None and placement.rows.is_cut
        if is_cut or self.layouts.of_output(layer) is not None:
            for each in (layer, *enclosing_layers()):  # an RNN computes what its cell has
                hook_layer(each, self)
        if is_cut:
            name_layers_without_rule(layer, path)
        return placement.rows

    def in_parts(
        self, variable: keras.Variable, rows: Rows, leader: tf.Variable | None = None
    ) -> tf.Variable:
        """What keeps the value of `variable` in parts; called outside of replicas.

        Args:
            variable: a weight, or an optimizer's slot.
            rows: its parts.
            leader: the weight that a slot is for.
        """
        old = behind(variable)
        self._thread.asked = rows
        try:
            with self._container_strategy().scope():
                beside = (
                    contextlib.nullcontext() if leader is None else self.colocate_vars_with(leader)
                )
                with beside:
                    name = old.name.split(":")[0]
                    new = tf.Variable(old.read_value(), trainable=old.trainable, name=name)
        finally:
            self._thread.asked = None
        keep_number(new, old)
        return new

    def _note_slot(self, leader: object, keras_variable: keras.Variable | None) -> None:
        """Has a slot be put in parts with its weight, if that is to come."""
        if not isinstance(self.layouts, FoundLayouts) or keras_variable is None:
            return
        if isinstance(leader, tf.Variable) and shape_of_new(keras_variable) == tuple(leader.shape):
            self.layouts.add_slot(leader, keras_variable)

    @property
    def _new(self) -> tuple[Rows, int, NewPieces] | None:
        return getattr(self._thread, "new", None)

    def _variable_class(self, owner: object, kwargs: Mapping[str, object]) -> Any:
        if self._new is None:
            return super()._variable_class(owner, kwargs)
        rows, shards, _ = self._new
        return functools.partial(self._split_class, rows=rows, shards=shards)

    def _variable_devices(self, variable_class: type | functools.partial) -> tuple[str, ...]:
        if self._new is None:
            return super()._variable_devices(variable_class)
        rows, shards, _ = self._new
        return self._devices_of_parts(rows, shards)

    def _devices_of_parts(self, rows: Rows, shards: int) -> tuple[str, ...]:
        """Where a new variable's parts of each copy are, in `shards` pieces each."""
        raise NotImplementedError

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: tf.Variable | None, **kwargs: object
    ) -> object:
        if self._new is None:
            return super()._get_variable_creator_initial_value(
                replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
            )
        *_, pieces = self._new
        return pieces.piece(replica_id, device)

    # ---- how a step runs on replicas -------------------------------------------------------------

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        with super()._step_of(model), logits_in_parts(model, self):
            yield

    def _arguments_of_step(self, step_function: Any, args: tuple) -> tuple:
        self.prepare(step_function.__self__, args)
        return super()._arguments_of_step(step_function, args)

    def prepare(self, model: keras.Model, args: tuple) -> None:
        """Before a step of `model`: finds its layout, or checks the one that was given."""
        if isinstance(self.layouts, FoundLayouts):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(args[0])
            lay_out(self._container_strategy(), model, x)
        elif model.built:  # else the step that begins makes its variables
            self.layouts.check_patterns(model)
            self.layouts.hook(model, self)

    def prepare_for(self, fn: Callable, args: tuple) -> None:
        """Before `run(fn, args)`, of what is no step of Keras that trains or evaluates."""
        if is_predict_step(fn):
            self.prepare(model_of_predict_step(fn), args)
        elif not is_keras_step(fn) and isinstance(self.layouts, FoundLayouts):
            self.layouts.warn_of_custom_step()

    # ---- gradients of parts ----------------------------------------------------------------------

    def _variables_of(self, gradients: Sequence) -> list:
        """What the caller reduces gradients of, TensorFlow's; None where that is not known."""
        source = gradient_source()
        if source is None:
            return [None] * len(gradients)
        return [behind(variable) for variable in source.variables]

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable]:
        return optimizer_hooks(optimizer)

    # ---- how a variable is updated ---------------------------------------------------------------

    def _updates_parts(self, optimizer: BaseOptimizer, variables: Sequence[keras.Variable]) -> bool:
        """Whether each part of `variables` is updated alone; else the whole is, as on one device.

        Args:
            variables: that have a gradient.
        """
        del variables
        return is_elementwise(optimizer)

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        optimizer: Any = apply.__self__  # type: ignore[attr-defined]
        trained = list(variables or trained_by(optimizer))
        present = [v for g, v in zip(gradients, trained, strict=False) if g is not None]
        self._thread.updates_parts = self._updates_parts(optimizer, present)
        if self._thread.updates_parts and len(trained) == len(gradients):  # else Keras refuses
            pairs = zip(gradients, trained, strict=True)
            gradients = [for_optimizer(gradient, variable) for gradient, variable in pairs]
        try:
            with numbers_sent_once():
                return super()._apply_reduced(apply, gradients, variables)
        finally:
            self._thread.updates_parts = False

    def _replica_ctx_update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        if not isinstance(var, SplitVariable):
            return super()._replica_ctx_update(var, fn, args, kwargs, group)
        if not getattr(self._thread, "updates_parts", False):
            is_here = var.is_assigned_here()
            return fn(var, *args, **kwargs) if is_here else None  # as one device, from wholes
        if not var.is_assigned_here():
            return None
        pieces = [_pieces(var, arg) for arg in args]
        for i, part in enumerate(var.own_parts()):
            with in_part(i), update_on(part.device):
                fn(part, *(each[i] for each in pieces), **kwargs)
        return None

    def _update(
        self, var: tf.Variable, fn: Callable, args: tuple, kwargs: dict, group: bool
    ) -> object:
        if not isinstance(var, SplitVariable):
            return super()._update(var, fn, args, kwargs, group)
        updates = []
        for i, (first, *_) in enumerate(var.updated_copies()):
            with tf.device(first.device), distribute_lib.UpdateContext(i):
                own = [_of_replica(i, arg) for arg in args]
                named = {name: _of_replica(i, arg) for name, arg in kwargs.items()}
                updates.append(fn(var, *own, **named))
        return distribute_utils.update_regroup(self, updates, group)


def _pieces(
    var: SplitVariable, arg: Gradient | GradientInParts | tf.Variable | keras.Variable
) -> list:
    """An argument of an update, for each part: of the same shape in parts, all else as it is."""
    if isinstance(arg, GradientInParts):
        return arg.pieces()
    if split_of(arg) is not None:
        return [arg] * len(var.stored.sizes)  # which in `in_part` is that part
    is_tensor = tf.is_tensor(arg) and not isinstance(arg, (tf.Variable, tf.IndexedSlices))
    is_dense = is_tensor and arg.shape.rank != 0 and arg.shape.is_compatible_with(var.shape)
    if is_dense or isinstance(arg, tf.IndexedSlices):
        return var.pieces(arg)
    return [arg] * len(var.stored.sizes)


def _of_replica(replica: int, arg: object) -> object:
    return arg if isinstance(arg, SplitVariable) else distribute_utils.select_replica(replica, arg)
