"""The decisions of a strategy whose replicas compute alike, from gradients reduced once."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.coordination.cluster import forget_blank_tf_config
from tfparallel.internals import (
    BaseOptimizer,
    MirroredExtended,
    TrainerCall,
    device_util,
    distribute_utils,
    layer_of_late_variable,
    numpy_dataset,
    owner_of_new_variable,
    record,
    with_body,
)
from tfparallel.replicas.batch_norm_hooks import hook_batch_norm
from tfparallel.replicas.convolution_hooks import hook_convolution
from tfparallel.replicas.device_names import short_names
from tfparallel.replicas.gathers_rows import GathersRows
from tfparallel.replicas.measured_replicas import MeasuredReplicas
from tfparallel.replicas.one_place import OnePlace
from tfparallel.replicas.owners import hook_owner
from tfparallel.replicas.row_seeds import RowSeeds
from tfparallel.replicas.seed_hooks import call_with_global_seed
from tfparallel.replicas.signatures import signature_of_all
from tfparallel.replicas.variables import (
    MetricVariable,
    ReplicatedVariable,
    is_new_metric,
    is_statistics,
    mark_owner,
    value_of_copy,
)
from tfparallel.replicas.weighed_gradients import WeighedGradients


class ReplicatedExtended(
    OnePlace, GathersRows, MeasuredReplicas, WeighedGradients, MirroredExtended
):
    """Replicas that compute alike, from gradients reduced once."""

    _row_seeds: RowSeeds | None = None  # where rows draw random numbers, not replicas
    _num_batches_ahead: int | None = None  # of their steps; None: as suits the devices
    _sees_what_a_step_assigns = True  # to a weight, and computes with afterwards
    _seed_device: str | None = None  # where seeds are stored, if not on each replica's own device
    _places_batches = False  # whether a batch may be on the replicas' devices before its step
    _agreed_value: tf.Tensor | None = None  # of the variable that is created last

    def __init__(self, *args: object, **kwargs: object):
        forget_blank_tf_config()
        super().__init__(*args, **kwargs)

    def _description(self) -> str:
        """What the strategy is made of, for its `repr`."""
        described = f"num_replicas={self._num_replicas_in_sync}, "
        if self._num_workers > 1:
            described += f"worker={self._id_in_cluster} of {self._num_workers}, "
        return described + f"devices={short_names(self._devices)}"

    _replicated_class: type = ReplicatedVariable

    @property
    def _xla_can_predict(self) -> bool:
        """Whether each replica's device has all that XLA compiles there, to predict."""
        return set(self.parameter_devices) == set(self.worker_devices)

    # ---- where variables live --------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
        kwargs = self._begun_alike(kwargs)
        owner = owner_of_new_variable()
        hook_owner(owner, self._container_strategy())
        hook_batch_norm(owner or layer_of_late_variable())
        hook_convolution(owner or layer_of_late_variable())
        colocate_with = kwargs.pop("colocate_with", None)
        if isinstance(colocate_with, numpy_dataset.SingleDevice):
            with tf.device(colocate_with.device):
                return next_creator(**kwargs)
        statistics = is_statistics(owner, kwargs)
        variable_class = self._variable_class(owner, kwargs)
        devices = self._variable_devices(variable_class)

        def create_copies(**kwargs: object) -> list[tf.Variable]:
            copies: list = []
            name = kwargs.get("name") or "Variable"
            for i, device in enumerate(devices):
                with tf.device(device), record.stop_recording():
                    value = self._initial_value(variable_class, i, device, copies, kwargs)
                    if i > 0:
                        kwargs["name"] = f"{name}/replica_{i}"
                    copies.append(next_creator(**{**kwargs, "initial_value": value}))
            return copies

        classes: dict = dict.fromkeys(tf.VariableSynchronization, variable_class)
        # For `extended._use_var_policy` of TensorFlow's own tests: our classes need no policy.
        classes["VariableClass"] = variable_class
        policies = dict.fromkeys(tf.VariableSynchronization, lambda aggregation: None)
        variable = distribute_utils.create_mirrored_variable(
            self._container_strategy(), create_copies, classes, policies, **kwargs
        )
        mark_owner(variable, owner, statistics)
        return variable

    def _initial_value(
        self,
        variable_class: Any,
        i: int,
        device: str,
        copies: Sequence,
        kwargs: Mapping[str, object],
    ) -> object:
        """What copy number `i` starts with: the value that all agree on; a metric's rest, 0."""
        del variable_class
        value = self._agreed_initial_value(i, device, copies, kwargs)
        if not is_new_metric(kwargs):
            return value
        return lambda: value_of_copy(
            tf.convert_to_tensor(value() if callable(value) else value), i, self
        )

    def _agreed_initial_value(
        self, i: int, device: str, copies: Sequence, kwargs: Mapping[str, object]
    ) -> object:
        """The whole value, or a function that gives it: rank 0's for copy 0, else a copy of it."""
        primary = copies[0] if copies else None
        return self._get_variable_creator_initial_value(
            replica_id=i, device=device, primary_var=primary, **kwargs
        )

    def _variable_class(self, owner: object, kwargs: Mapping[str, object]) -> Any:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return MetricVariable
        return ReplicatedVariable if is_statistics(owner, kwargs) else self._replicated_class

    def _variable_devices(self, variable_class: Any) -> tuple[str, ...]:
        del variable_class
        return self._devices

    @property
    def _stored_stream(self) -> int:
        """The stream that the calling replica's copy of a seed is stored in; 0 is of one device."""
        return 0

    # ---- how a step runs on replicas -------------------------------------------------------------

    @property
    def _replicas_of_users(self) -> int:
        """What `num_replicas_in_sync` says outside of Keras's steps."""
        return self._num_replicas_in_sync

    def _arguments_of_step(self, step_function: Callable, args: tuple) -> tuple:
        """What a Keras step is run with in the place of `args`, which begin with the batch."""
        del step_function
        return args

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> object:
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            if fn.input_signature is not None:  # which is of positional arguments
                bound = inspect.signature(fn.python_function).bind(*args, **kwargs)
                args, kwargs = bound.args, bound.kwargs
            return self._around_replicas(fn, args)(*args, **kwargs)
        run = super()._call_for_each_replica
        strategy = self._container_strategy()
        return call_with_global_seed(strategy, lambda seeded: run(seeded, args, kwargs), fn)

    def _around_replicas(
        self, function: tf.types.experimental.PolymorphicFunction, args: tuple
    ) -> Callable:
        """`function`, a `tf.function` of one replica, as one of all: they meet in one graph only.

        As TensorFlow does it, which would then run the replicas without our hooks, and refuses an
        `input_signature` where `args` have a value for each replica.
        """
        made = self._functions_around_replicas.setdefault(function, {})
        own = function.input_signature
        signature = None if own is None else signature_of_all(own, args)
        key = None if own is None else tuple(keras.tree.flatten(signature))
        if key not in made:
            body = function.python_function  # not `function`, which is the key

            @functools.wraps(body)
            def all_replicas(*args: object, **kwargs: object) -> object:
                return self.call_for_each_replica(body, args, kwargs)

            made[key] = with_body(function, all_replicas, signature)
        return made[key]

    @functools.cached_property
    def _functions_around_replicas(self) -> weakref.WeakKeyDictionary:
        return weakref.WeakKeyDictionary()

    # ---- around an update ------------------------------------------------------------------------

    def _behind(self, part: object) -> contextlib.AbstractContextManager:
        """Within it, a replica computes its step of `part`, its rows."""
        del part
        return contextlib.nullcontext()

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable]:
        """Methods of an optimizer, by name, that act otherwise here: `hook(original, *args)`."""
        del optimizer
        return {}

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
        """Updates `variables` by `apply`, a method of an optimizer, with gradients of all rows."""
        return apply(gradients, variables)

    # ---- around a step ---------------------------------------------------------------------------

    @property
    def _host_device(self) -> str:
        return device_util.canonicalize("/device:CPU:0", self._devices[0])

    @property
    def _gathers_for_layers(self) -> bool:
        """Whether a layer that needs the rows of all replicas gets them."""
        return True

    @property
    def _divides_data(self) -> bool:
        """Whether a device computes a part of the rows, or of the batches, only."""
        return self._num_replicas_in_sync > 1

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        return dataset if self._workers is None else self._workers._keras_dataset(dataset, call)

    def _read_ahead(self, num_batches: int | None) -> None:
        """Reads and places so many batches ahead of their steps; None: as suits the devices."""
        if num_batches is not None and num_batches < 0:
            raise ValueError(
                f"`prefetch_batches` must be None or at least 0. Received: {num_batches}."
            )
        if num_batches and not self._places_batches:
            raise ValueError(
                "`prefetch_batches` is for replicas that each have one device. Received: "
                f"{num_batches}, for {self._description()}. Leave it out."
            )
        self._num_batches_ahead = num_batches

    def _draw_by_row(self) -> None:
        """Has rows draw random numbers; before anything is built."""
        self._row_seeds = RowSeeds(self._container_strategy)

    def _step_of(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """Around each Keras step of `model`, also where one replica runs it."""
        return contextlib.nullcontext() if self._workers is None else self._workers._step_of(model)

    def _kept_in_step_of(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """Around each Keras step of `model`: what the backward pass finds of the forward pass."""
        del model
        return contextlib.nullcontext()
