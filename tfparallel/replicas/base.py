"""What every strategy shares: how Keras's calls become the five decisions of a strategy.

The decisions, and the method that takes each:

1. where variables live          `ReplicatedExtended._create_variable`
2. how a batch is split          `batch.Batch`
3. how a step runs on replicas   `KerasStrategy.run` and `keras_step.run_keras_step`
4. how gradients meet            `ReplicatedExtended._reduce_gradients`
5. how a variable is updated     `ReplicatedExtended._replica_ctx_update`, `variables.py`
"""

import collections
import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfparallel.internals import (
    BaseOptimizer,
    DistributedValues,
    MirroredExtended,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    TrainerCall,
    calling_trainer,
    device_util,
    distribute_lib,
    distribute_utils,
    is_called_by_trainer,
    is_keras_step,
    is_loss_scaling,
    is_predict_step,
    is_symbolic_build,
    layer_of_late_variable,
    model_of_predict_step,
    numpy_dataset,
    owner_of_new_variable,
    record,
    with_body,
)
from tfparallel.logical_devices import open_logical_cpus
from tfparallel.replicas import checks
from tfparallel.replicas.all_rows import all_rows
from tfparallel.replicas.batch import concat_rows
from tfparallel.replicas.batch_norm_hooks import hook_batch_norm
from tfparallel.replicas.keras_step import run_keras_step, run_predict_step
from tfparallel.replicas.model_hooks import build_from_step, build_without_reading
from tfparallel.replicas.optimizer_hooks import hook_optimizer
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.seed_hooks import call_with_global_seed, hook_seed_generator
from tfparallel.replicas.variables import (
    MetricVariable,
    ReplicatedVariable,
    is_statistics,
    mark_owner,
    mark_statistics,
)

if TYPE_CHECKING:
    from tfparallel.replicas.checking.report import StepCheck

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfparallel distributes Keras on its TensorFlow backend: set KERAS_BACKEND=tensorflow. "
        f"Received: the {keras.backend.backend()} backend."
    )
open_logical_cpus()  # before TensorFlow starts, which any use of a strategy does

_KEYS_PER_STRATEGY = 100_000
_strategy_numbers: dict[type, itertools.count] = collections.defaultdict(itertools.count)


class KerasStrategy(tf.distribute.Strategy):
    """A `tf.distribute.Strategy` that trains an unmodified Keras 3 model as one device would.

    Calls that Keras makes (`fit`, `evaluate`, `predict`, `*_on_batch`) get the whole global batch,
    which is split here. Every other call keeps the contract of `tf.distribute`.
    """

    def __init__(self, extended: Any):
        # Not `super()`: a drop-in also inherits the strategy that it replaces, whose constructor
        # takes other arguments and builds an `extended` of its own.
        tf.distribute.Strategy.__init__(self, extended)

    @functools.cached_property
    def _collective_key_base(self) -> int:
        """Where the keys of this strategy's collectives start: no two in a process share keys.

        Numbered by class, so that a strategy that only some workers create shifts no one's keys.
        """
        return _KEYS_PER_STRATEGY * (next(_strategy_numbers[type(self)]) + 1)

    def scope(self) -> contextlib.AbstractContextManager:
        """`tf.distribute.Strategy.scope`; entered by Keras to build a model, it helps with that."""
        build_from_step(sys._getframe(1))
        return super().scope()

    def run(
        self, fn: Any, args: tuple = (), kwargs: dict | None = None, options: Any = None
    ) -> Any:
        """`tf.distribute.Strategy.run`; a Keras step returns what it would on one device."""
        is_step = is_keras_step(fn)
        if is_step:
            checks.check_model(self, fn.__self__)
            checks.check_jit_compile(self, fn.__self__)
            mark_statistics(fn.__self__)
            args = self._arguments_of_step(fn, args)
        elif is_predict_step(fn):
            checks.check_jit_compile_of_predict(self, model_of_predict_step(fn))
        elif is_called_by_trainer(sys._getframe(1)):
            checks.check_is_not_compiled(fn)
        if not is_step and not is_predict_step(fn):
            return super().run(fn, args, kwargs, options)
        model = fn.__self__ if is_step else model_of_predict_step(fn)
        if self.extended._divides_data:
            checks.check_states_of_rows(self, model)
        with self.extended._step_of(model):
            if self.extended._num_replicas_in_sync == 1:
                return super().run(fn, args, kwargs, options)
            return (run_keras_step if is_step else run_predict_step)(self, fn, *args)

    def _arguments_of_step(self, step_function: Any, args: tuple) -> tuple:
        """What a Keras step is run with in the place of `args`, which begin with the batch."""
        del step_function
        return args

    def _run_on_replicas(self, fn: Callable) -> Any:
        """Calls `fn()` on every local replica, as `run` does for custom loops."""
        return super().run(fn)

    def all_rows(self, tensors: Any) -> Any:
        """The rows that all replicas have, one after the other; each replica gets them all.

        For what depends on all rows of a batch, in a `train_step`, `compute_loss` or layer, or in a
        function given to `run`. It is differentiable: the gradient of a replica's rows is that of
        the sum of all replicas' losses, each weighted as the step does. The numbers of rows may
        differ. On one replica, and while Keras computes shapes, it gives what it is given.

        Args:
            tensors: a tensor `[rows, ...]`, or a nest of them, of as many rows each.

        Returns:
            The same nest of tensors `[rows of all replicas, ...]`.

        Raises:
            RuntimeError: outside of a step that runs on replicas, and in a layer of a pipeline.
            ValueError: for a tensor without rows.
        """
        return all_rows(self, tensors)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """`tf.distribute.Strategy.reduce`, also over nests, and of scalars with `axis=0`."""
        if is_symbolic_build(sys._getframe(1)):  # Keras only wants the shapes of one replica
            return tf.nest.map_structure(lambda v: self.experimental_local_results(v)[0], value)
        return tf.nest.map_structure(lambda leaf: self._reduce_leaf(reduce_op, leaf, axis), value)

    def _reduce_leaf(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        local = self.experimental_local_results(value)[0]
        if axis == 0 and getattr(local, "shape", tf.TensorShape(None)).rank == 0:
            axis = None
        return super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> Any:
        """`tf.distribute.Strategy.experimental_distribute_dataset`.

        Keras's own input path gets the dataset as it is: its batches are split inside the step, so
        any dataset works, of any batch size, known length or not.
        """
        call = calling_trainer()
        if call is None:
            return super().experimental_distribute_dataset(dataset, options)
        checks.check_model(self, call.model)
        if self.extended._divides_data:
            checks.check_states_of_rows(self, call.model)
        build_without_reading(call, dataset.element_spec)
        return self.extended._keras_dataset(dataset, call)

    def check(
        self,
        model: keras.Model,
        batch: Any,
        *,
        float64: bool = False,
        build: Callable[[], keras.Model] | None = None,
    ) -> "StepCheck":
        """One step of `model` here and on one device: what differs, by weight, and why.

        Weights, optimizer, metrics and seeds are as before when it returns. In a job of several
        processes all call it, with the same batch. It needs memory for a second model, and with
        `float64` for two more.

        Args:
            model: built and compiled under this strategy.
            batch: what `train_step` takes: `(x, y)` or `(x, y, sample_weight)` of arrays.
            float64: also compares two models with numbers of 64 bits, in which rounding is small.
            build: makes the model, compiled, for models that Keras cannot make of their
                configuration.

        Returns:
            A `StepCheck`; `print` it.

        Raises:
            ValueError: inside of a scope, for a model that is not this strategy's, and for one that
                cannot be made a second time.
        """
        from tfparallel.replicas.checking.check import check_step  # loads rich, for its report

        return check_step(self, model, batch, float64, build)

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas that train together; 1 inside a Keras step, which is written for one device.

        A Keras loss outside of `run` is not divided either: one device computes it, of all rows.
        """
        outside = distribute_lib.in_cross_replica_context() and is_loss_scaling(sys._getframe(1))
        return 1 if outside or current_replica_step() else super().num_replicas_in_sync


class ReplicatedExtended(MirroredExtended):
    """Replicas that compute alike, from gradients reduced once."""

    _replicated_class: type = ReplicatedVariable

    @property
    def _xla_can_predict(self) -> bool:
        """Whether each replica's device has all that XLA compiles there, to predict."""
        return set(self.parameter_devices) == set(self.worker_devices)

    def _xla_compiles_collectives(self, device: str) -> bool:
        """Whether XLA can compile what crosses processes, for a `device`."""
        del device
        return False

    # ---- where variables live --------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        owner = owner_of_new_variable()
        hook_owner(owner, self._container_strategy())
        hook_batch_norm(owner or layer_of_late_variable())
        colocate_with = kwargs.pop("colocate_with", None)
        if isinstance(colocate_with, numpy_dataset.SingleDevice):
            with tf.device(colocate_with.device):
                return next_creator(**kwargs)
        statistics = is_statistics(owner, kwargs)
        variable_class = self._variable_class(owner, kwargs)
        devices = self._variable_devices(variable_class)

        def create_copies(**kwargs: Any) -> list[tf.Variable]:
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
        self, variable_class: Any, i: int, device: str, copies: Sequence, kwargs: Mapping[str, Any]
    ) -> Any:
        """What copy number `i` starts with: the value that all agree on, whatever its class."""
        del variable_class
        return self._agreed_initial_value(i, device, copies, kwargs)

    def _agreed_initial_value(
        self, i: int, device: str, copies: Sequence, kwargs: Mapping[str, Any]
    ) -> Any:
        """The whole value, or a function that gives it: rank 0's for copy 0, else a copy of it."""
        primary = copies[0] if copies else None
        return self._get_variable_creator_initial_value(
            replica_id=i, device=device, primary_var=primary, **kwargs
        )

    def _variable_class(self, owner: object, kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return MetricVariable
        return ReplicatedVariable if is_statistics(owner, kwargs) else self._replicated_class

    def _variable_devices(self, variable_class: Any) -> tuple[str, ...]:
        del variable_class
        return self._devices

    # ---- how a step runs on replicas -------------------------------------------------------------

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return self._around_replicas(fn)(*args, **kwargs)
        run = super()._call_for_each_replica
        strategy = self._container_strategy()
        return call_with_global_seed(strategy, lambda seeded: run(seeded, args, kwargs), fn)

    def _around_replicas(self, function: Any) -> Callable:
        """`function`, a `tf.function` of one replica, as one of all: they meet in one graph only.

        As TensorFlow does it, which would then run the replicas without our hooks.
        """
        if function not in self._functions_around_replicas:
            body = function.python_function  # not `function`, which is the key

            @functools.wraps(body)
            def all_replicas(*args: Any, **kwargs: Any) -> Any:
                return self.call_for_each_replica(body, args, kwargs)

            self._functions_around_replicas[function] = with_body(function, all_replicas)
        return self._functions_around_replicas[function]

    @functools.cached_property
    def _functions_around_replicas(self) -> weakref.WeakKeyDictionary:
        return weakref.WeakKeyDictionary()

    # ---- how gradients meet ----------------------------------------------------------------------

    def _use_merge_call(self) -> bool:
        """False: every replica updates its own copies, so optimizers may branch (`ops.cond`)."""
        return False

    def _replica_ctx_all_reduce(self, reduce_op: ReduceOp, value: Any, options: Any = None) -> Any:
        context = distribute_lib.get_replica_context()

        def merge(_: tf.distribute.Strategy, *tensors: Any) -> list:
            return self.batch_reduce_to(reduce_op, [(t, t) for t in tensors], options)

        if self._num_replicas_in_sync == 1:
            return value
        # An argument of a `tf.function` is on no device yet, and a result goes where its value is.
        flat = [
            tf.identity(t) if isinstance(t, tf.Tensor) and not t.device else t
            for t in tf.nest.flatten(value)
        ]
        reduced = context.merge_call(merge, args=flat)
        # `ReplicaContext.all_reduce` calls this in a `tf.custom_gradient`, which goes through the
        # graph backwards from what it gets to what it gave, and through that of the other replicas
        # to its beginning: each all-reduce again, unless no gradient leads further than this.
        if not any(isinstance(t, tf.IndexedSlices) for t in flat):
            reduced = [tf.stop_gradient(t) for t in reduced]
        return tf.nest.pack_sequence_as(value, reduced)

    def _weigh_and_reduce(self, gradients: list) -> list:
        """Gradients of all rows, from those of this replica's; called in a replica context."""
        step = current_replica_step()
        if step is not None:
            gradients = [step.weigh_gradient(gradient) for gradient in gradients]
        return self._reduce_gradients(gradients)

    def _reduce_gradients(self, gradients: list) -> list:
        """Sum over replicas of tensors or IndexedSlices; called in a replica context."""
        step = current_replica_step()
        if step is not None:
            gradients = step.zero_without_rows(gradients)
        return self._sum_gradients(gradients) if gradients else []

    def _sum_gradients(self, gradients: list) -> list:
        return self._replica_ctx_all_reduce(ReduceOp.SUM, gradients)

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable]:
        """Methods of an optimizer, by name, that act otherwise here: `hook(original, *args)`."""
        del optimizer
        return {}

    def _apply_reduced(self, apply: Callable, gradients: list, variables: Any) -> Any:
        """Updates `variables` by `apply`, a method of an optimizer, with gradients of all rows."""
        return apply(gradients, variables)

    # ---- across workers: this worker is all there is ---------------------------------------------

    def _check_outside_of_replicas(self, name: str) -> None:
        """Whether variable `name` may be differentiated outside of `run`."""

    @property
    def _host_device(self) -> str:
        return device_util.canonicalize("/device:CPU:0", self._devices[0])

    @property
    def _divides_data(self) -> bool:
        """Whether a device computes a part of the rows, or of the batches, only."""
        return self._num_replicas_in_sync > 1

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Any:
        del call
        return dataset

    def _step_of(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """Around each Keras step of `model`, also where one replica runs it."""
        del model
        return contextlib.nullcontext()

    def _sum_across_workers(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor

    def _sum_list_across_workers(self, tensors: list) -> list:
        return tensors

    def _gather_rows(self, rows: Any) -> Any:
        return rows

    def _all_rows(self, tensors: list) -> list:
        """The rows of all replicas of each tensor `[rows, ...]`; called in a replica context."""

        def merge(_: tf.distribute.Strategy, *tensors: Any) -> list:
            parts = [self._local_results(tensor) for tensor in tensors]
            with tf.device(self._host_device):
                rows = [self._gather_rows(concat_rows(each)) for each in parts]
            return rows

        return distribute_lib.get_replica_context().merge_call(merge, args=tensors)

    def _metrics_read_together(self, metrics: Sequence) -> contextlib.AbstractContextManager:
        del metrics
        return contextlib.nullcontext()


class LocalExtended(ReplicatedExtended):
    """Replicas on devices of one process: reduction is a sum in the graph, no collective to match.

    Collectives (NCCL) are kept for several physical GPUs, and wherever the user passed
    `cross_device_ops`.
    """

    _user_cross_device_ops: tf.distribute.CrossDeviceOps | None = None

    def _local_reduction(self) -> tf.distribute.CrossDeviceOps:
        if self._user_cross_device_ops is not None:
            return self._user_cross_device_ops
        if all("gpu" in device.lower() for device in self._devices) and not _has_virtual_gpus():
            return self._collective_ops
        return ReductionToOneDevice()

    def _all_rows(self, tensors: list) -> list:
        """As the base's, gathered on each device from each."""

        def merge(_: tf.distribute.Strategy, *tensors: Any) -> list:
            return [self._copies_of_rows(self._local_results(tensor)) for tensor in tensors]

        return distribute_lib.get_replica_context().merge_call(merge, args=tensors)

    def _copies_of_rows(self, parts: Sequence) -> PerReplica:
        copies = {}
        for device in dict.fromkeys(self._devices):
            with tf.device(device):
                copies[device] = concat_rows(parts)
        return PerReplica([copies[device] for device in self._devices])

    def _reduce_to(self, reduce_op: ReduceOp, value: Any, destinations: Any, options: Any) -> Any:
        if isinstance(value, DistributedValues) and not distribute_utils.is_mirrored(value):
            return ReductionToOneDevice().reduce(reduce_op, value, destinations)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        if not isinstance(value, DistributedValues):
            return value
        return self._local_reduction()._gather(value, destinations, axis, options)

    def _batch_reduce_to(
        self, reduce_op: ReduceOp, value_destination_pairs: list, options: Any
    ) -> list:
        return self._local_reduction().batch_reduce(reduce_op, value_destination_pairs, options)


def hook_owner(owner: object, strategy: tf.distribute.Strategy) -> None:
    """Hooks the optimizer or seed generator that creates a variable under `strategy`."""
    if isinstance(owner, BaseOptimizer):
        hook_optimizer(owner, strategy)
    elif isinstance(owner, keras.random.SeedGenerator):
        hook_seed_generator(owner, strategy)


def _has_virtual_gpus() -> bool:
    return len(tf.config.list_logical_devices("GPU")) > len(tf.config.list_physical_devices("GPU"))
