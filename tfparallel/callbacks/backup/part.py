"""A part of a backup in memory: nested values that become one file of arrays and one of JSON."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel

from tfparallel.callbacks.backup.schema import ShardsPart, SharedPart, WorkerPart, parse_json
from tfparallel.callbacks.backup.storage import InvalidBackupError, Storage
from tfparallel.callbacks.backup.tensor_file import dump_tensors, load_tensors

_SCHEMAS: dict[str, type[BaseModel]] = {  # by the kind of part
    "shared": SharedPart,
    "worker": WorkerPart,
    "shards": ShardsPart,
}


class BackupPart:
    """Named values; each is a nest of dicts, lists, tuples, numbers, text, None and arrays.

    Keys of dicts are text. Arrays must not change any more: they are written later.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._tensors: dict[str, np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def keys(self) -> Iterable[str]:
        """The names of the values."""
        return self._values.keys()

    def __setitem__(self, name: str, value: object) -> None:
        self._values[name] = _encode(value, name, self._tensors)

    def __getitem__(self, name: str) -> Any:
        return _decode(self._values[name], self._tensors)

    def files(self, name: str) -> dict[str, Iterable[bytes | memoryview]]:
        """The content of each file, by file name, with `name` as its stem.

        Raises:
            TypeError: for values that cannot be written.
        """
        text = json.dumps(self._values, indent=1, allow_nan=False).encode()
        return {f"{name}.json": [text], f"{name}.safetensors": dump_tensors(self._tensors)}

    @classmethod
    def from_files(cls, name: str, contents: Mapping[str, bytes]) -> "BackupPart":
        """The part that `files(name)` wrote.

        Raises:
            ValueError: if these are no such files.
        """
        part = cls()
        part._values = parse_json(contents[f"{name}.json"])
        part._tensors = load_tensors(contents[f"{name}.safetensors"])
        try:
            dict(part)
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{name} is nothing that a backup writes: {error!r}") from error
        return part


def read_part(storage: Storage, number: int, name: str) -> BackupPart:
    """A part of a backup, every byte and value of it checked.

    Raises:
        InvalidBackupError: naming what is missing, damaged, or nothing that we write.
    """
    contents = storage.read(number, [f"{name}.json", f"{name}.safetensors"])
    schema = _SCHEMAS[name.partition("-")[0]]
    try:
        part = BackupPart.from_files(name, contents)
        schema.model_validate(dict(part))
    except ValueError as error:  # pydantic's too
        path = storage.path(number)
        raise InvalidBackupError(f"{name} in {path} cannot be restored: {error}.") from error
    return part


def _encode(value: object, path: str, tensors: dict[str, np.ndarray]) -> object:
    """`value` as JSON, its arrays moved to `tensors`; what JSON lacks as {"__kind__": ...}."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"__float__": repr(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        tensors[path] = np.asarray(value)
        return {"__array__": path, "is_scalar": isinstance(value, np.generic)}
    if isinstance(value, tuple):
        return {"__tuple__": _encode(list(value), path, tensors)}
    if isinstance(value, list):
        return [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    raise TypeError(
        "A backup holds None, numbers, text, NumPy arrays, and lists, tuples and dicts (with text "
        f"as keys) of them: nothing that has to be unpickled. Received: {type(value).__name__} "
        f"at {path}."
    )


def _decode(value: object, tensors: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__array__" in value:
        array = tensors[value["__array__"]]
        return array[()] if value["is_scalar"] else array
    if "__tuple__" in value:
        return tuple(_decode(value["__tuple__"], tensors))
    if "__float__" in value:
        return float(value["__float__"])
    return {key: _decode(item, tensors) for key, item in value.items()}
