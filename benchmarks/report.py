"""What a benchmark run found, as tables and as verdicts."""

import statistics

import numpy as np
from contestants import ONE_DEVICE, Contestant
from problems import Problem
from rich.console import Console
from rich.table import Table

LOSS_TOLERANCE = 1e-3  # relative; rounding grows from step to step
_OURS = "tfparallel"
# By group: our contestant that others are divided by.
_YARDSTICKS = {
    "1 process, 2 CPU devices": "tfparallel Mirrored, fit",
    "2 processes": "tfparallel MultiWorker, fit",
}
# (ours, theirs, smallest ratio theirs / ours, models): what the project promises.
_TARGETS = [
    ("tfparallel Mirrored, fit", "tf.distribute Mirrored, fit", 1 / 1.02, None),
    ("tfparallel MultiWorker, fit", "tf.distribute MultiWorker, loop", 1 / 1.02, None),
    ("tfparallel MultiWorker, loop", "tf.distribute MultiWorker, loop", 1 / 1.02, None),
    ("tfparallel MultiWorker, fit", "torch DDP Gloo, loop", 1.0, ["mlp10m"]),
]
