"""Model FLOPs utilisation of one training: what the model needs, over what its devices could do."""

import warnings
from collections.abc import Sequence
from typing import Literal

import keras

from tfparallel.callbacks.backup.workers import exchange
from tfparallel.callbacks.fit_batches import batch_spec
from tfparallel.coordination.agreement import Agreement
from tfparallel.internals.keras_trainer import Fit
from tfparallel.measure.model_flops import flops_of_step
from tfparallel.measure.peak import measured_flops_per_s

Peak = float | Literal["measure"]


class ModelUse:
    """Counts the operations of a row, once; all processes of a job make it.

    Args:
        model: that is trained.
        fit: the call.
        peak: operations a second of all devices of the job together, or "measure".
        devices: of this process.
        agreement: with the other processes.
    """

    def __init__(
        self,
        model: keras.Model,
        fit: Fit,
        peak: Peak,
        devices: Sequence[str],
        agreement: Agreement | None,
    ):
        self._model, self._fit = model, fit
        self._flops_per_row: float | None = None
        if peak == "measure":
            own = measured_flops_per_s(devices, model.compute_dtype)
            peak = sum(exchange(agreement, "measure the peak", own))
        self._peak = float(peak)
        if model.built:  # before the training: what is traced for it is no share of an epoch
            self._flops_per_row = self._counted()

    def figures(self) -> dict[str, float] | None:
        """`flops_per_row` of the model, `peak_flops_per_s` of the job; None if not known."""
        if self._flops_per_row is None:
            self._flops_per_row = self._counted()
        if not self._flops_per_row:
            return None
        return {"flops_per_row": self._flops_per_row, "peak_flops_per_s": self._peak}

    def _counted(self) -> float:
        """Of one row; 0 where it cannot be known, which is told once."""
        try:
            spec, rows = batch_spec(self._fit)
            inputs = keras.utils.unpack_x_y_sample_weight(spec)[0]
            return flops_of_step(self._model, inputs) / rows
        except Exception as error:  # whatever a user's `call` makes of tensors without values
            warnings.warn(
                f"MFU is not told: the operations of model '{self._model.name}' cannot be counted "
                f"from its graph: {error}",
                stacklevel=2,
            )
            return 0.0
