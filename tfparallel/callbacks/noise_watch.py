"""The noise scale of one training, smoothed from epoch to epoch, of all its processes."""

import math

import keras

from tfparallel.callbacks.backup.workers import exchange
from tfparallel.coordination.agreement import Agreement
from tfparallel.measure.noise_scale import NoiseScale, efficiency, noise_rows, suggest
from tfparallel.replicas.measured_training import MeasuredTraining
from tfparallel.replicas.noise_probe import mean_estimate


class NoiseWatch:
    """Has some steps note squares of gradients, from its making to `stop`.

    Those have a function of their own, so that the others are as they would be without.

    Args:
        model: that is trained.
        extended: of its strategy.
        every_steps: how often squares are noted: in the first step, and in each so manyth.
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
        self._every_steps, self._num_steps = every_steps, 0
        self._noise = NoiseScale(decay=0.5)
        self._probe = extended._new_noise_probe()
        self._noting: object = None  # functions of a step; what the model has is one of the two
        self._usual: object = None

    def begin_step(self) -> None:
        """Keras is about to call the model's function of a step."""
        if self._probe is None:
            return
        is_due = self._num_steps % self._every_steps == 0
        self._num_steps += 1
        function = self._model.train_function
        if function is not self._noting and function is not self._usual:
            self._noting, self._usual = None, function  # the first step, or compiled meanwhile
        self._extended._note_noise(self._probe if is_due else None)  # they are traced when called
        if is_due and self._noting is None:
            self._extended._trace_step_anew(self._model)
            self._noting = function = self._model.train_function
        wanted = self._noting if is_due else self._usual
        if wanted is not function:
            self._model.train_function = wanted

    def stop(self) -> None:
        """The next training has steps without squares."""
        self._extended._note_noise(None)
        if self._noting is not None and self._model.train_function is self._noting:
            self._model.train_function = self._usual

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
