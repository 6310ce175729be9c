"""The noise scale of one training, smoothed from epoch to epoch, of all its processes."""

import math

import keras

from tfparallel.callbacks.backup.workers import exchange
from tfparallel.coordination.agreement import Agreement
from tfparallel.measure.noise_scale import NoiseScale, efficiency, noise_rows, suggest
from tfparallel.replicas.measured_training import MeasuredTraining
from tfparallel.replicas.noise_probe import mean_estimate


class NoiseWatch:
    """Has steps note squares of gradients, from its making to `stop`.

    Args:
        model: its step is traced anew, here and at the end.
        extended: of its strategy.
        every_steps: how often squares are noted.
        agreement: with the other processes.
    """

    def __init__(
        self,
        model: keras.Model,
        extended: MeasuredTraining,
        every_steps: int,
        agreement: Agreement | None,
    ):
        self._model, self._extended, self._agreement = model, extended, agreement
        self._noise = NoiseScale(decay=0.5)
        self._probe = extended._probe_noise(every_steps)
        extended._trace_step_anew(model)

    def stop(self) -> None:
        """The next training has a step without squares."""
        self._extended._probe_noise(None)
        self._model.train_function = None

    def end_epoch(self, batch_size: int | None) -> dict[str, object] | None:
        """The noise scale after another epoch; None where it is not known."""
        if self._probe is None:
            return None
        found = mean_estimate(exchange(self._agreement, "noise", self._probe.sums()))
        if found is not None:
            self._noise.add(found)
        smoothed = self._noise.smoothed
        if smoothed is None:
            return None
        rows = noise_rows(smoothed)
        is_known = math.isfinite(rows)
        suggested = None if batch_size is None else suggest(rows, batch_size)
        return {
            "squared_gradient": smoothed.squared_gradient,
            "variance": smoothed.variance,
            "rows": rows if is_known else None,
            "efficiency": efficiency(rows, 1, batch_size) if is_known and batch_size else None,
            "suggestion": None if suggested is None else suggested._asdict(),
        }
