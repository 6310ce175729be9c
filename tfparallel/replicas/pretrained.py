"""Pretrained weights, read tensor by tensor: a process has its shards, and one tensor at a time."""

import contextlib
import os
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from safetensors import SafetensorError, safe_open

from tfparallel.internals.keras_trainer import strategy_of

_WEIGHTS_IN_KERAS_FILE = "model.weights.h5"
_MOST_LISTED = 5


def load_model(path: str | os.PathLike, **options: Any) -> keras.Model:
    """`keras.saving.load_model`, which of a `.keras` file has one tensor at a time in memory.

    Keras's own reads the whole file into memory first, weights and slots, where it takes that to
    be large enough, in each process. This unpacks it where temporary files are (`TMPDIR`). In a
    strategy's scope the model is the strategy's. Over several processes all call it, each reads the
    file, and nothing is sent.

    Args:
        path: a `.keras` file; what is none is left to Keras.
        **options: as Keras has them: `custom_objects`, `compile`, `safe_mode`.
    """
    if not zipfile.is_zipfile(path):
        return keras.saving.load_model(path, **options)
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        archive.extractall(folder)
        return keras.saving.load_model(folder, **options)


def load_weights(
    model: keras.Model,
    path: str | os.PathLike,
    names: Callable[[keras.Variable], str | None] | None = None,
    transform: Callable[[keras.Variable, np.ndarray], np.ndarray] | None = None,
) -> list[str]:
    """Reads weights from a file into a model, under any strategy, or none.

    Over several processes all call it, each reads the file, and nothing is sent. Keras's
    `model.load_weights` takes twice the whole of a `.keras` file, and no safetensors.

    Args:
        model: built.
        path: `.weights.h5`, `.keras` or `.safetensors`, or a folder of the last.
        names: of the tensor that is for a weight, for safetensors; None leaves the weight as it is.
            By default a weight's own `path`.
        transform: makes of a tensor of safetensors what the weight takes, such as a transposed one;
            called with the weight and the tensor, as the file has it.

    Returns:
        The names of the tensors that no weight has asked for; nothing for Keras's files, which
        Keras checks.

    Raises:
        ValueError: for a model that is not built, another kind of file, and listing weights without
            a tensor, or with one of another shape, before any is changed.

    Source: https://github.com/huggingface/safetensors#format
    """
    if not model.built:
        raise ValueError(
            f"Weights are read into variables. Received: '{model.name}', which is not built. Call "
            "it on a batch, or `build` it."
        )
    path, strategy = Path(path), strategy_of(model)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        if path.is_dir() or path.suffix == ".safetensors":
            return _load_safetensors(model, path, names or _own_path, transform)
        if names is not None or transform is not None:
            raise ValueError(
                "`names` and `transform` are for safetensors: Keras's files say what is for which "
                f"layer. Received: {path}."
            )
        if path.suffix == ".keras":
            _load_keras_file(model, path)
        elif path.name.endswith(".weights.h5"):
            model.load_weights(path)
        else:
            raise ValueError(
                "Weights are read from `.weights.h5`, `.keras`, `.safetensors`, or a folder of "
                f"such. Received: {path}."
            )
    return []


def _load_keras_file(model: keras.Model, path: Path) -> None:
    """Through a file beside: Keras would unpack it in memory, twice."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / _WEIGHTS_IN_KERAS_FILE
        with archive.open(_WEIGHTS_IN_KERAS_FILE) as packed, open(unpacked, "wb") as file:
            shutil.copyfileobj(packed, file)
        model.load_weights(unpacked)


def _own_path(variable: keras.Variable) -> str:
    return variable.path


def _load_safetensors(
    model: keras.Model, path: Path, names: Callable, transform: Callable | None
) -> list[str]:
    with _opened(path) as tensors:
        wanted = [(weight, names(weight)) for weight in model.weights]
        wanted = [(weight, name) for weight, name in wanted if name is not None]
        _check(wanted, tensors, path, names is _own_path, transform is None)
        for weight, name in wanted:
            array = tensors[name].get_tensor(name)
            if transform is not None:
                array = transform(weight, array)
                _check_shape(weight, name, array)
            weight.assign(np.asarray(array, tf.as_dtype(weight.dtype).as_numpy_dtype))
        return sorted(set(tensors) - {name for _, name in wanted})


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[dict[str, Any]]:
    """The file that has it, of each tensor, by name."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"A folder with files `*.safetensors` is expected. Received: {path}.")
    with contextlib.ExitStack() as stack:
        tensors = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="np"))
            except SafetensorError as error:
                raise ValueError(
                    f"A file in the format of safetensors is expected. Received: {file} ({error})."
                ) from error
            tensors.update(dict.fromkeys(opened.keys(), opened))
        yield tensors


def _check(
    wanted: list, tensors: dict[str, Any], path: Path, by_path: bool, has_final_shapes: bool
) -> None:
    problems = [f"no tensor {name!r}" for _, name in wanted if name not in tensors]
    if by_path:
        counts = Counter(name for _, name in wanted)
        problems += [f"{n} weights of path {name!r}" for name, n in counts.items() if n > 1]
    if has_final_shapes:
        for weight, name in wanted:
            shape = tensors[name].get_slice(name).get_shape() if name in tensors else None
            if shape is not None and list(shape) != list(weight.shape):
                problems.append(f"{name!r} of shape {shape} for {list(weight.shape)}")
    if problems:
        more = f", and {len(problems) - _MOST_LISTED} more" if len(problems) > _MOST_LISTED else ""
        has = ", ".join(map(repr, sorted(tensors)[:_MOST_LISTED]))
        raise ValueError(
            "There must be a tensor for each weight, of its shape. Received: "
            f"{'; '.join(problems[:_MOST_LISTED])}{more}. {path} has {len(tensors)} tensors: {has}"
            f"{', ...' if len(tensors) > _MOST_LISTED else ''}. Say by `names` which is for which "
            "weight, and by `transform` what to make of it."
        )


def _check_shape(weight: keras.Variable, name: str, array: np.ndarray) -> None:
    if tuple(array.shape) != tuple(weight.shape):
        raise ValueError(
            f"`transform` must return what '{weight.path}' takes, shape {list(weight.shape)}. "
            f"Received: {list(array.shape)}, of the tensor {name!r}. Weights before it are changed."
        )
