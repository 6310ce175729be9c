"""Records in a folder: a line of JSON for each epoch, and scalars for TensorBoard."""

import json
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfparallel.measure.reading import FILE
from tfparallel.measure.record import Record
from tfparallel.measure.verdict import Verdict


class RecordWriter:
    """Writes what is measured as it comes; a process that is killed leaves whole lines.

    Args:
        folder: created if it is missing.
        rank: of this process; those behind the first have a file of their own.
    """

    def __init__(self, folder: Path, rank: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".rank{rank}" if rank else ""
        self._path = folder / f"{FILE}{suffix}"
        self._scalars: Any = None
        if rank == 0:
            self._scalars = tf.summary.create_file_writer(str(folder))

    def write(self, record: Record, verdict: Verdict) -> None:
        """One epoch, or the whole training."""
        line = {**record.as_dict(), "cause": verdict.cause, "verdict": verdict.text}
        with self._path.open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if self._scalars is not None and record.epoch is not None:
            self._write_scalars(record, record.epoch)

    def _write_scalars(self, record: Record, epoch: int) -> None:
        with self._scalars.as_default(), tf.device("CPU:0"):
            for category, share in record.shares.items():
                tf.summary.scalar(f"measure/share/{category}", share, epoch)
            tf.summary.scalar("measure/step_ms/median", record.step.median * 1e3, epoch)
            tf.summary.scalar("measure/step_ms/p95", record.step.p95 * 1e3, epoch)
            if record.rows_per_s is not None:
                tf.summary.scalar("measure/samples_per_s", record.rows_per_s, epoch)
        self._scalars.flush()
