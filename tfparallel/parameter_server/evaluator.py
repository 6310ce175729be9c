"""The evaluator: a task beside the cluster that evaluates each checkpoint of the chief, once.

    chief                                          evaluator
    on_epoch_end: writes 00000120.weights.h5  -->  load_weights, evaluate
                                                   evaluations.jsonl, TensorBoard summaries
    on_train_end: writes ended                -->  evaluates what is left, and ends

A checkpoint appears under its name when it is complete. What has been evaluated is known from
`evaluations.jsonl`, so an evaluator that is started again repeats nothing.
"""

import json
import os
import time
import warnings
from pathlib import Path

import keras

from tfparallel.coordination.cluster import read_tf_config
from tfparallel.coordination.probe import is_listening
from tfparallel.measure.scalars import ScalarWriter

_SUFFIX = ".weights.h5"
_ENDED = "ended"
_RESULTS = "evaluations.jsonl"
_POLL_S = 0.5
_CHIEF_S = 20.0
_START_S = 60.0
# Before the data is made and the model built, while which a short training may begin and end.
_IMPORTED_S = time.time()


class CheckpointsForEvaluator(keras.callbacks.Callback):
    """Writes the model's weights for the evaluator; a callback of the chief's `fit`.

    Args:
        folder: that chief and evaluator share.
        every_epochs: how often; the end of the training writes too.
        keep: how many checkpoints stay; None keeps all. An evaluator that is slower than the
            training misses those that are gone.
    """

    def __init__(self, folder: str | Path, every_epochs: int = 1, keep: int | None = None):
        super().__init__()
        if every_epochs < 1 or (keep is not None and keep < 1):
            raise ValueError(
                "every_epochs and keep must be integers from 1 (keep: or None). Received: "
                f"every_epochs={every_epochs}, keep={keep}."
            )
        self._folder, self._every_epochs, self._keep = Path(folder), every_epochs, keep

    def on_train_begin(self, logs: object = None) -> None:
        """The folder may be that of an earlier training that this one continues."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / _ENDED).unlink(missing_ok=True)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Writes a checkpoint named after the number of updates."""
        if (epoch + 1) % self._every_epochs == 0:
            self._write()

    def on_train_end(self, logs: object = None) -> None:
        """Writes the last checkpoint, and tells the evaluator that it is the last."""
        self._write()
        (self._folder / _ENDED).touch()

    def _write(self) -> None:
        step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        path = self._folder / f"{step:08d}{_SUFFIX}"
        if path.exists():
            return
        partial = self._folder / f".{path.name}"  # Keras wants the suffix
        self.model.save_weights(partial)
        os.replace(partial, path)
        if self._keep is not None:
            for old in _checkpoints(self._folder)[: -self._keep]:
                old.unlink()


def is_evaluator() -> bool:
    """Whether `TF_CONFIG` makes this process the evaluator."""
    config = read_tf_config()
    return config is not None and config.task_type == "evaluator"


def evaluate_checkpoints(
    model: keras.Model,
    data: object,
    folder: str | Path,
    log_dir: str | Path | None = None,
    **evaluate_options: object,
) -> list[dict]:
    """Evaluates every checkpoint in `folder` once, in order, until the training ends.

    Args:
        model: compiled; gets the weights of one checkpoint after another.
        data: what `model.evaluate` takes as `x`.
        folder: where `CheckpointsForEvaluator` writes.
        log_dir: where TensorBoard summaries and `evaluations.jsonl` go; `folder` by default.
        **evaluate_options: for `model.evaluate`, for example `y` and `batch_size`.

    Returns:
        The lines that were added to `evaluations.jsonl`.

    Raises:
        RuntimeError: when the chief is gone without having ended the training.
    """
    folder = Path(folder)
    log_dir = Path(log_dir) if log_dir is not None else folder
    log_dir.mkdir(parents=True, exist_ok=True)
    known = {line["checkpoint"] for line in _read_results(log_dir)}
    scalars = ScalarWriter(log_dir)
    results: list[dict] = []
    chief = _Chief()
    while True:
        has_ended = chief.has_ended(folder / _ENDED)  # looked up first: nothing follows it
        new = [path for path in _checkpoints(folder) if path.name not in known]
        if not new:
            if has_ended:
                return results
            chief.check()
            time.sleep(_POLL_S)
            continue
        known.add(new[0].name)
        try:
            with warnings.catch_warnings():  # of the optimizer's state, which nobody needs here
                warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                model.load_weights(new[0])
        except FileNotFoundError:
            continue  # `keep` has removed it meanwhile
        values = model.evaluate(data, return_dict=True, verbose=0, **evaluate_options)
        results.append(_publish(new[0], values, log_dir, scalars))


def _publish(path: Path, values: dict, log_dir: Path, scalars: ScalarWriter) -> dict:
    step = int(path.name.removesuffix(_SUFFIX))
    scalars.write({f"evaluation_{name}": value for name, value in values.items()}, step)
    line = {"step": step, "checkpoint": path.name, **{k: float(v) for k, v in values.items()}}
    with (log_dir / _RESULTS).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def _read_results(log_dir: Path) -> list[dict]:
    path = log_dir / _RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if not path.name.startswith("."))


class _Chief:
    """Whether the chief has ended the training, or died."""

    def __init__(self) -> None:
        config = read_tf_config()
        self._address = config.cluster["chief"][0] if config and "chief" in config.cluster else None
        self._start_s = time.monotonic()
        self._closed_since_s: float | None = None  # of a port that has been open

    def has_ended(self, ended: Path) -> bool:
        """Whether the file `ended` is there, and not from an earlier training in this folder."""
        is_open = self._address is not None and is_listening(self._address)
        now_s = time.monotonic()
        if is_open:
            self._closed_since_s = float("inf")
        elif self._closed_since_s == float("inf"):
            self._closed_since_s = now_s
        try:
            if ended.stat().st_mtime >= _IMPORTED_S:
                return True
        except FileNotFoundError:
            return False
        is_gone = self._closed_since_s is not None and not is_open
        return self._address is None or is_gone or now_s - self._start_s > _START_S and not is_open

    def check(self) -> None:
        """Raises an error once a chief that has been there is gone."""
        closed_s = time.monotonic() - (self._closed_since_s or float("inf"))
        if closed_s > _CHIEF_S:
            raise RuntimeError(
                f"Expected the chief ({self._address}) to write checkpoints or to end the "
                f"training. Received: nothing, and its port has been closed for {_CHIEF_S:g} "
                "s: it died. (The evaluator is speaking.)"
            )
