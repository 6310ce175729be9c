"""The five decisions under tensor parallelism where each rank traces its own part.

A rank is one replica, of one device, as it knows: it gets the whole batch of that, and computes the
same step as all others of it. What makes it one of several is in `ranks.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from tfparallel.communication.collectives import LeftOutIfUnread
from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.coordination.agreement import Agreement
from tfparallel.internals import CollectiveAllReduceExtended, TrainerCall, numpy_dataset
from tfparallel.internals.keras_layers import behind
from tfparallel.replicas.axis_of_processes import AxisOfProcesses, value_of_rank_zero
from tfparallel.replicas.weights_check import WeightsCheck
from tfparallel.tensor_parallel.extended import TensorParallelExtended
from tfparallel.tensor_parallel.gradients import sum_parts
from tfparallel.tensor_parallel.layouts import Layouts
from tfparallel.tensor_parallel.ranks import ModelRanks, is_in_step
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.variable_of_ranks import VariableOfRanks


class TensorParallelOverRanks(TensorParallelExtended):
    """A rank of several, each of which stores its part of every variable that is in parts.

    Args:
        container_strategy: the strategy.
        layouts: of one group, of this rank's device as often as there are ranks.
        job: the processes.
        ranks: those of this one's replica, as those who exchange in a step.
        replicas: the ranks that have this one's part of other replicas; None for one replica.
    """

    _split_class = VariableOfRanks
    _takes_workers = False
    _xla_can_predict = False  # an exchange is Python
    _compare_weights: Callable | None = None  # of a model, of all ranks
    _model_of_step: keras.Model | None = None
    _own_sums: list[tf.Tensor]  # of metrics, of this rank's replica, in the step that is traced

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        layouts: Layouts,
        job: AxisOfProcesses,
        ranks: ModelRanks,
        replicas: AxisOfProcesses | None = None,
    ):
        super().__init__(container_strategy, layouts)
        self._job, self.ranks = job, ranks
        self._default_device = job._default_device
        if replicas is not None:
            self._join(replicas)

    def _description(self) -> str:
        own, count = self._job._id_in_cluster, self._job._num_workers
        return f"rank={own} of {count}, {super()._description()}"

    # ---- what the processes of a job agree on ----------------------------------------------------

    def agreement(self) -> Agreement | None:
        """That of the ranks."""
        return self._job._agreement

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        return self._job._keras_dataset(dataset, call)

    def _link_times(self) -> LinkTimes:
        return self._job._link_times()

    def _link_journal(self) -> AbstractContextManager[LinkJournal]:
        return self._job._link_journal()

    def _begun_alike(self, kwargs: dict) -> dict:
        is_local = isinstance(kwargs.get("colocate_with"), numpy_dataset.SingleDevice)
        if is_local or kwargs["initial_value"] is self._agreed_value:
            return kwargs
        self._agreed_value = value_of_rank_zero(self._job, kwargs)
        return {**kwargs, "initial_value": self._agreed_value}

    # ---- what a custom loop reads ----------------------------------------------------------------

    _make_input_context = CollectiveAllReduceExtended._make_input_context

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: object) -> object:
        """Of each batch a replica's rows, which are those of all of its ranks."""
        return CollectiveAllReduceExtended._experimental_distribute_dataset(self, dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: object, options: object) -> object:
        return CollectiveAllReduceExtended._distribute_datasets_from_function(
            self, dataset_fn, options
        )

    # ---- whether copies are alike ----------------------------------------------------------------

    def _check_weights(self, every_steps: int, collectives: LeftOutIfUnread) -> None:
        """Compares copies of weights from now on; called when the strategy is built.

        What is whole all ranks hold, and a part those that have it of other replicas.

        Args:
            every_steps: how often.
            collectives: between all ranks.
        """
        count, parts = self._job._num_workers, self.ranks.size
        holders = [[range(count)]]
        if count > parts:
            holders.append([range(part, count, parts) for part in range(parts)])
        check = WeightsCheck(self._job._id_in_cluster, count, every_steps, holders)
        add_up = functools.partial(self.ranks.meet, collectives.sum_of, what="compare weights")

        def compare(model: keras.Model) -> None:
            groups: list[list[tf.Tensor]] = [[], []]
            for weight in map(behind, model.trainable_variables):
                is_split = isinstance(weight, VariableOfRanks)
                own = weight.own_parts() if is_split else weight.values
                groups[is_split].append(own[0].read_value())
            check.compare(groups[: len(holders)], self._own_sums, add_up)

        self._compare_weights = compare

    @contextlib.contextmanager
    def _step_of(self, model: keras.Model) -> Iterator[None]:
        self._model_of_step, self._own_sums = model, []
        try:
            with super()._step_of(model):
                yield
        finally:
            self._model_of_step, self._own_sums = None, []

    def _sum_and_check_weights(self, tensors: list) -> list:
        self._own_sums = tensors
        return super()._sum_and_check_weights(tensors)

    def _then_compared(self, function: Callable) -> Callable:
        """`function`, of a replica; after a step of a model its weights are compared."""
        model, compare = self._model_of_step, self._compare_weights
        if model is None or compare is None:
            return function

        @functools.wraps(function)
        def compared(*args: object, **kwargs: object) -> object:
            result = function(*args, **kwargs)
            compare(model)
            return result

        return compared

    # ---- where variables live --------------------------------------------------------------------

    def _devices_of_parts(self, rows: Rows, shards: int) -> tuple[str, ...]:
        del rows, shards
        return self._devices

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: tf.Variable | None, **kwargs: object
    ) -> object:
        if self._new is None:
            return super()._get_variable_creator_initial_value(
                replica_id=replica_id, device=device, primary_var=primary_var, **kwargs
            )
        *_, pieces = self._new
        return pieces.piece(self.ranks.index, device)

    # ---- how gradients meet ----------------------------------------------------------------------

    def _sum_parts(self, parts: list[list[tf.Tensor]], variables: list) -> list[list[tf.Tensor]]:
        """As the base's, of this rank's parts; of others there are only stand-ins."""
        del variables
        index, device = self.ranks.index, self._groups[0][:1]
        own = [[of_variable[index]] for of_variable in parts]
        sums = sum_parts(own, [0] * len(own), [device], self._over_workers())
        return [
            [*of_variable[:index], total, *of_variable[index + 1 :]]
            for of_variable, (total,) in zip(parts, sums, strict=True)
        ]

    # ---- how a step runs -------------------------------------------------------------------------

    def is_own_context(self) -> bool:
        """Whether the caller traces a step of this strategy: only there do ranks have parts."""
        return super().is_own_context() and is_in_step()

    def prepare(self, model: keras.Model, args: tuple) -> None:
        """Before a step of `model`, which XLA cannot compile."""
        if model.jit_compile:
            raise ValueError(
                "jit_compile=True needs a step without Python, by which ranks exchange. Received: "
                f"model '{model.name}' on {self.ranks.size} ranks. Compile it with "
                "jit_compile=False."
            )
        super().prepare(model, args)

    def _call_for_each_replica(self, fn: Callable, args: tuple, kwargs: dict) -> object:
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return super()._call_for_each_replica(fn, args, kwargs)
        return super()._call_for_each_replica(
            self.ranks.step(self._then_compared(fn)), args, kwargs
        )
