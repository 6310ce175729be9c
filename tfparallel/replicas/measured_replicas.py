"""What a training of replicas costs, where nobody knows better: `measured_training.py`."""

import contextlib
from collections.abc import Callable, Collection

import keras
import tensorflow as tf

from tfparallel.communication.link_journal import LinkJournal
from tfparallel.communication.link_times import NO_LINKS, LinkTimes
from tfparallel.measure.shares import NO_PLAN, Plan
from tfparallel.replicas.axis_of_processes import AxisOfProcesses
from tfparallel.replicas.noise_probe import NoiseProbe


class MeasuredReplicas(tf.distribute.StrategyExtended):
    """Mixin: links are those of the processes around, and no schedule leaves a device idle."""

    _workers: AxisOfProcesses | None

    def _link_times(self) -> LinkTimes:
        """What collectives of this process have taken so far, where the transport is our own."""
        return NO_LINKS if self._workers is None else self._workers._link_times()

    def _link_journal(self) -> contextlib.AbstractContextManager[LinkJournal]:
        """Within it, what that transport sends and receives is noted."""
        if self._workers is None:
            return contextlib.nullcontext(LinkJournal())
        return self._workers._link_journal()

    def _steps_at_once(
        self, model: keras.Model, batch: object
    ) -> Callable[[], Collection[object]] | None:
        """None, as all replicas take part in each step."""
        del model, batch
        return None

    _noise_probe: NoiseProbe | None = None

    def _new_noise_probe(self) -> NoiseProbe | None:
        """For squares of the replicas' gradients; None where there is nothing to compare."""
        count = self._num_replicas_in_sync
        return NoiseProbe(count) if count > 1 else None

    def _note_noise(self, probe: NoiseProbe | None) -> None:
        """Steps that are traced from now on note squares of gradients; None: no more."""
        self._noise_probe = probe

    def _trace_step_anew(self, model: keras.Model) -> None:
        """Within `fit`: the next training step is traced as the strategy is now."""
        model.make_train_function(force=True)

    def _tell_stages_apart(self, model: keras.Model) -> None:
        """`_plan_of` shall know what each stage takes; without stages there is nothing to know."""

    def _plan_of(self, model: keras.Model) -> Plan:
        """What of a step's time is idle by the strategy's own schedule."""
        del model
        return NO_PLAN
