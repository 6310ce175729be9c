"""What every strategy shares: how Keras's calls become the five decisions of a strategy.

The decisions, and the method that takes each:

1. where variables live          `extended.ReplicatedExtended._create_variable`
2. how a batch is split          `batch.Batch`
3. how a step runs on replicas   `KerasStrategy.run` and `keras_step.run_keras_step`
4. how gradients meet            `extended.ReplicatedExtended._reduce_gradients`
5. how a variable is updated     `extended.ReplicatedExtended._replica_ctx_update`, `variables.py`
"""

import collections
import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import tensorflow as tf

from tfparallel.internals import (
    calling_trainer,
    distribute_lib,
    is_called_by_trainer,
    is_compiled_step,
    is_keras_step,
    is_loss_scaling,
    is_predict_step,
    is_symbolic_build,
    model_of_predict_step,
    trainer_that_builds,
)
from tfparallel.internals.distribute import num_replicas
from tfparallel.internals.keras_epochs import let_iterators_go_beside
from tfparallel.internals.keras_integers import integers_stay
from tfparallel.internals.loop_numbers import loops_keep_numbers_on_hosts
from tfparallel.logical_devices import open_logical_cpus
from tfparallel.replicas import checks, first_words
from tfparallel.replicas.all_rows import all_rows
from tfparallel.replicas.batches_ahead import with_batches_ahead
from tfparallel.replicas.described_strategy import DescribedStrategy
from tfparallel.replicas.interface import KerasExtended
from tfparallel.replicas.keras_step import run_keras_step, run_predict_step
from tfparallel.replicas.known_layers import layers_known_to
from tfparallel.replicas.layers_without_rows import layers_never_without_rows, never_without_rows
from tfparallel.replicas.long_starts import spoken_of
from tfparallel.replicas.model_hooks import build_from_step, build_without_reading
from tfparallel.replicas.placed_batch import of_the_only_replica
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.row_seeds import drawn_by_row
from tfparallel.replicas.sizes_on_hosts import sizes_on_hosts
from tfparallel.replicas.variables import (
    mark_statistics,
)

if TYPE_CHECKING:
    from tfparallel.measure.lanes import DrawnStep
    from tfparallel.replicas.checking.report import StepCheck

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfparallel distributes Keras on its TensorFlow backend: set KERAS_BACKEND=tensorflow. "
        f"Received: the {keras.backend.backend()} backend."
    )
open_logical_cpus()  # before TensorFlow starts, which any use of a strategy does

_KEYS_PER_STRATEGY = 100_000
_KEYS_PER_CLASS = 1_000  # of a strategy's keys, those that another class's strategies leave alone
_strategy_numbers: dict[type, itertools.count] = collections.defaultdict(itertools.count)

Nest = TypeVar("Nest")


class KerasStrategy(DescribedStrategy):
    """A `tf.distribute.Strategy` that trains an unmodified Keras 3 model as one device would.

    Calls that Keras makes (`fit`, `evaluate`, `predict`, `*_on_batch`) get the whole global batch,
    which is split here. Every other call keeps the contract of `tf.distribute`.
    """

    extended: KerasExtended

    def __init__(self, extended: KerasExtended, kept_in_step_of: Callable | None = None):
        # Not `super()`: a drop-in also inherits the strategy that it replaces, whose constructor
        # takes other arguments and builds an `extended` of its own.
        if kept_in_step_of is not None:
            extended._kept_in_step_of = kept_in_step_of
        tf.distribute.Strategy.__init__(self, extended)
        first_words.say_of(self)

    @functools.cached_property
    def _collective_key_base(self) -> int:
        """Where the keys of this strategy's collectives start: no two in a process share keys.

        Numbered by class, so that a strategy that only some workers create shifts no one's keys.
        """
        number = next(_strategy_numbers[type(self)]) + 1
        of_class = zlib.crc32(type(self).__name__.encode()) % 97  # the same on all workers
        return _KEYS_PER_STRATEGY * number + _KEYS_PER_CLASS * of_class

    def scope(self) -> contextlib.AbstractContextManager:
        """`tf.distribute.Strategy.scope`; entered by Keras to build a model, it helps with that."""
        build_from_step(trainer_that_builds())
        return super().scope()

    def run(
        self,
        fn: Any,
        args: tuple = (),
        kwargs: dict | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """`tf.distribute.Strategy.run`; a Keras step returns what it would on one device."""
        checks.check_is_keras_3(fn)
        first_words.is_used(self)
        is_step = is_keras_step(fn)
        if is_step:
            checks.check_model(self, fn.__self__)
            checks.check_jit_compile(self, fn.__self__)
            mark_statistics(fn.__self__)
            args = self.extended._arguments_of_step(fn, args)
        elif is_predict_step(fn):
            checks.check_jit_compile_of_predict(self, model_of_predict_step(fn))
        elif is_compiled_step(fn) or is_called_by_trainer():
            checks.check_is_method(fn)
        integers = integers_stay(self.extended.worker_devices)
        if not is_step and not is_predict_step(fn):
            has_rows = layers_never_without_rows(layers_known_to(fn), self.extended)
            with spoken_of(self, fn), has_rows, integers:
                return super().run(fn, args, kwargs, options)
        model = fn.__self__ if is_step else model_of_predict_step(fn)
        step = fn if is_step else model.predict_step
        if self.extended._divides_data:
            checks.check_states_of_rows(self, model)
        extended = self.extended
        draws, told = drawn_by_row(extended._row_seeds, model), spoken_of(self, step)
        own_layers, kept = never_without_rows(model, extended), extended._kept_in_step_of(model)
        sizes = sizes_on_hosts(extended.worker_devices)
        loops = loops_keep_numbers_on_hosts(extended.worker_devices)
        with told, own_layers, integers, sizes, loops, draws, extended._step_of(model), kept:
            if num_replicas(self) == 1:
                return super().run(fn, of_the_only_replica(args), kwargs, options)
            if is_step:
                return run_keras_step(self, fn, *args)
            return run_predict_step(self, fn, args[0], model)

    def _run_on_replicas(self, fn: Callable) -> object:
        """Calls `fn()` on every local replica, as `run` does for custom loops."""
        return super().run(fn)

    def all_rows(self, tensors: Nest) -> Nest:
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
            RuntimeError: outside of a step that runs on replicas, and in a function within one.
            ValueError: for a tensor without rows.
        """
        return all_rows(self, tensors)

    def profile(self, model: keras.Model, batch: object) -> "DrawnStep":
        """Measures when devices and links do what in a training step.

        `print` the result, or `save_png` or `save_trace` it. Two steps run, of which the second is
        measured; then weights, optimizer, metrics and seeds are put back. In a job of several
        processes all call it, with the same batch, and all get the lanes of all, on one clock.

        Args:
            model: built and compiled under this strategy.
            batch: what `train_step` takes: `(x, y)` or `(x, y, sample_weight)` of arrays.

        Raises:
            ValueError: inside of a scope, and for a model that is not this strategy's.
        """
        from tfparallel.replicas.step_profile import profile_step  # loads the profiler's format

        return profile_step(self, model, batch)

    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: object, axis: int | None
    ) -> Any:
        """`tf.distribute.Strategy.reduce`, also over nests, and of scalars with `axis=0`."""
        if is_symbolic_build():  # Keras only wants the shapes of one replica
            return tf.nest.map_structure(lambda v: self.experimental_local_results(v)[0], value)
        return tf.nest.map_structure(lambda leaf: self._reduce_leaf(reduce_op, leaf, axis), value)

    def _reduce_leaf(
        self, reduce_op: tf.distribute.ReduceOp | str, value: object, axis: int | None
    ) -> object:
        local = self.experimental_local_results(value)[0]
        if axis == 0 and getattr(local, "shape", tf.TensorShape(None)).rank == 0:
            axis = None
        return super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Iterable:
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
        let_iterators_go_beside(call.epoch_iterator)
        return with_batches_ahead(self.extended, self.extended._keras_dataset(dataset, call), call)

    def check(
        self,
        model: keras.Model,
        batch: object,
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
        outside = distribute_lib.in_cross_replica_context() and is_loss_scaling()
        return 1 if outside or current_replica_step() else self.extended._replicas_of_users
