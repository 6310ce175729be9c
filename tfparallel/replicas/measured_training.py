"""What `callbacks.Measure` asks of the training that a strategy runs."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Protocol

import keras

from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import LinkTimes
from tfparallel.measure.shares import Plan
from tfparallel.replicas.noise_probe import NoiseProbe
from tfparallel.replicas.training import Training


class MeasuredTraining(Training, Protocol):
    """A training that says what its links and its schedule cost; `extended` of ours but on TPUs."""

    _id_in_cluster: int
    _num_workers: int

    def _tell_stages_apart(self, model: keras.Model) -> None:
        """Lets `_plan_of` know what each stage takes; nothing where there are none."""

    def _plan_of(self, model: keras.Model) -> Plan:
        """What of a step's time is idle by the strategy's own schedule."""

    def _link_times(self) -> LinkTimes:
        """What collectives of this process have taken so far, where the transport is our own."""

    def _link_journal(self) -> AbstractContextManager[LinkJournal]:
        """Within it, what that transport sends and receives is noted."""

    def _steps_at_once(
        self, model: keras.Model, batch: object
    ) -> Callable[[], Collection[object]] | None:
        """Runs a step of `batch` for each worker, which share none, and tells who took one.

        None where all devices take part in each step.
        """

    def _new_noise_probe(self) -> NoiseProbe | None:
        """For squares of the replicas' gradients; None where they cannot be compared."""

    def _note_noise(self, probe: NoiseProbe | None) -> None:
        """Steps that are traced from now on note squares of gradients; None: no more."""

    def _trace_step_anew(self, model: keras.Model) -> None:
        """Within `fit`: the next training step is traced as the strategy is now."""
