"""Records in a folder: a line of JSON for each epoch, and scalars for TensorBoard."""

import json
import os
from pathlib import Path

from tfparallel.measure.reading import FILE
from tfparallel.measure.record import Record
from tfparallel.measure.scalars import ScalarWriter
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
        self._scalars = ScalarWriter(folder) if rank == 0 else None

    def write(self, record: Record, verdict: Verdict) -> None:
        """One epoch, or the whole training."""
        line = {**record.as_dict(), "cause": verdict.cause, "verdict": verdict.text}
        with self._path.open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if self._scalars is not None and record.epoch is not None:
            self._write_scalars(self._scalars, record, record.epoch)

    def _write_scalars(self, scalars: ScalarWriter, record: Record, epoch: int) -> None:
        values = {f"measure/share/{name}": share for name, share in record.shares.items()}
        values["measure/step_ms/median"] = record.step.median * 1e3
        values["measure/step_ms/p95"] = record.step.p95 * 1e3
        if record.rows_per_s is not None:
            values["measure/samples_per_s"] = record.rows_per_s
        scalars.write(values, epoch)
