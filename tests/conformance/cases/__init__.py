"""What every strategy is asked; importing this package fills `CASES`."""

from tests.conformance.case import CASES
from tests.conformance.cases import (
    batch_norm,
    callbacks,
    coexistence,
    compilation,
    custom_training,
    double_precision,
    dropout,
    inputs,
    losses,
    metrics,
    misuse,
    models,
    on_batch,
    optimizers,
    precision,
    public_tf,
    saving,
)

__all__ = [
    "CASES",
    "batch_norm",
    "callbacks",
    "coexistence",
    "compilation",
    "custom_training",
    "double_precision",
    "dropout",
    "inputs",
    "losses",
    "metrics",
    "misuse",
    "models",
    "on_batch",
    "optimizers",
    "precision",
    "public_tf",
    "saving",
]
