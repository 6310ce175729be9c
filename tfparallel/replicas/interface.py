"""What the step that strategies share asks of a strategy: the interface of its `extended`.

`base.py`, `keras_step.py`, `model_hooks.py` and `optimizer_hooks.py` know a strategy by this alone.
`ReplicatedExtended` answers all of it for replicas that compute alike, a method's room overrides
what it decides otherwise. `tests/replicas/test_interfaces.py` looks for each member in every
`extended`: what inherits from TensorFlow, which has no types, is anything to a type checker.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfparallel.internals import BaseOptimizer, TrainerCall
from tfparallel.replicas.axis_of_processes import AxisOfProcesses, Gradient
from tfparallel.replicas.batch import Batch
from tfparallel.replicas.batches_ahead import PlacesAhead
from tfparallel.replicas.local_replicas import LocalReplicas
from tfparallel.replicas.measured_training import MeasuredTraining
from tfparallel.replicas.row_seeds import RowSeeds


class KnownInReplicas(Protocol):
    """What optimizers and layers ask while a replica computes, also on cores of a TPU."""

    _id_in_cluster: int
    _num_workers: int
    _row_seeds: RowSeeds | None
    _seed_device: str | None  # where seeds are stored, if that is not each replica's own device

    @property
    def _stored_stream(self) -> int:
        """The stream that the calling replica's copy of a seed is stored in; 0 is of one device."""

    def _description(self) -> str:
        """What the strategy is made of, for its `repr`."""

    def _weigh_and_reduce(self, gradients: list[Gradient]) -> list[Gradient]:
        """Gradients of all rows, from those of this replica's; called in a replica context."""

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable[..., object]]:
        """Methods of an optimizer, by name, that act otherwise here: `hook(original, *args)`."""

    def _apply_reduced(
        self,
        apply: Callable[..., object],
        gradients: list[Gradient | None],
        variables: Sequence[keras.Variable] | None,
    ) -> object:
        """Updates `variables` by `apply`, a method of an optimizer, with gradients of all rows."""

    def _all_rows(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The rows of all replicas of each tensor `[rows, ...]`; called in a replica context."""

    def _own_rows_of_sum(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """This replica's rows of the sum of all replicas' `rows`; called in a replica context."""


class StepDecisions(LocalReplicas, KnownInReplicas, Protocol):
    """What `KerasStrategy` and the step around Keras's ask of `strategy.extended`."""

    _kept_in_step_of: Callable[[keras.Model], AbstractContextManager[None]]

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that variables are on."""

    @property
    def _replicas_of_users(self) -> int:
        """What `num_replicas_in_sync` says outside of Keras's steps."""

    @property
    def _divides_data(self) -> bool:
        """Whether a device computes a part of the rows, or of the batches, only."""

    @property
    def _gathers_for_layers(self) -> bool:
        """Whether a layer that needs the rows of all replicas gets them."""

    @property
    def _xla_can_predict(self) -> bool:
        """Whether each replica's device has all that XLA compiles there, to predict."""

    def _arguments_of_step(
        self, step_function: Callable[..., object], args: tuple[object, ...]
    ) -> tuple[object, ...]:
        """What a Keras step is run with in the place of `args`, which begin with the batch."""

    def _keras_dataset(self, dataset: tf.data.Dataset, call: TrainerCall) -> Iterable[object]:
        """What Keras iterates over."""

    def _step_of(self, model: keras.Model) -> AbstractContextManager[None]:
        """Around each Keras step of `model`, also where one replica runs it."""

    def _behind(self, part: object) -> AbstractContextManager[None]:
        """Within it, a replica computes its step of `part`, its rows."""

    def _metrics_read_together(
        self, metrics: Sequence[keras.Metric]
    ) -> AbstractContextManager[None]:
        """Within it, the variables of all `metrics` have been read at once."""

    def _mean_statistics(
        self, firsts: list[tf.Tensor], shares: list[tf.Tensor], batch: Batch
    ) -> list[tf.Tensor]:
        """Means over all rows of a batch of what replicas have computed of their own."""

    def _gather_rows(self, rows: object) -> object:
        """The rows of all processes, one process after the other."""


class KerasExtended(StepDecisions, MeasuredTraining, PlacesAhead, Protocol):
    """All that is asked of the `extended` of a `KerasStrategy`, whatever its method."""

    def _join(self, workers: AxisOfProcesses) -> None:
        """Makes this process one place of an axis over several; before variables are created."""

    def _read_ahead(self, num_batches: int | None) -> None:
        """Reads and places so many batches ahead of their steps; None: as suits the devices."""

    def _names_lost_ranks(self) -> AbstractContextManager[None] | None:
        """Within it, errors name a process that has ended; None where nobody would be known."""

    def _check_outside_of_replicas(self, name: str) -> None:
        """Refuses to differentiate variable `name` outside of `run`, of several processes."""


class StepStrategy(Protocol):
    """What the step around Keras's asks of the strategy itself."""

    @property
    def extended(self) -> StepDecisions:
        """Its decisions."""

    def _run_on_replicas(self, fn: Callable[[], object]) -> object:
        """Calls `fn()` on every replica of this process."""

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """What each replica of this process has of `value`."""
