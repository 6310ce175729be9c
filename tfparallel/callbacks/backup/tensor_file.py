"""Arrays as one file in the safetensors format: a JSON header, then the raw bytes.

The file holds no code and any tool for safetensors reads it, while writing it costs no copy and no
dependency. Source: https://github.com/huggingface/safetensors#format
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from tfparallel.callbacks.backup.schema import TensorEntry, parse_json

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dump_tensors(tensors: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """The bytes of a file that holds `tensors`, piece by piece.

    Raises:
        TypeError: for a dtype that the format does not know, such as strings.
    """
    header: dict[str, dict] = {}
    offset = 0
    # The largest items first, so that every array lies at a multiple of its item's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in names:
        array = tensors[name]
        if array.dtype.name not in _NAMES:
            raise TypeError(
                f"A backup holds arrays of numbers. Received: {name} of dtype {array.dtype}. "
                "Keep it out of variables and of what get_state returns."
            )
        end = offset + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data


def load_tensors(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of a file, as read-only views of `data`.

    Raises:
        ValueError: if `data` is not such a file.
    """
    if len(data) < 8:
        raise ValueError(f"a file of arrays has at least 8 bytes, not {len(data)}")
    (length,) = struct.unpack_from("<Q", data)
    start = 8 + length
    if start > len(data):
        raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
    header = parse_json(data[8:start])
    if not isinstance(header, dict):
        raise ValueError(f"a header that is no object but {type(header).__name__}")
    header.pop("__metadata__", None)
    return {
        name: _array(name, TensorEntry.model_validate(entry), memoryview(data)[start:])
        for name, entry in header.items()
    }


def _array(name: str, entry: TensorEntry, data: memoryview) -> np.ndarray:
    begin, end = entry.data_offsets
    if entry.dtype not in _DTYPES:
        raise ValueError(f"{name} of the unknown dtype {entry.dtype!r}")
    dtype = _dtype(entry.dtype)
    if end > len(data) or end - begin != math.prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"{name} of {entry.dtype}{entry.shape} at bytes {begin} to {end}")
    return np.frombuffer(data, np.uint8, end - begin, begin).view(dtype).reshape(entry.shape)


def _dtype(name: str) -> np.dtype:
    dtype = _DTYPES[name]
    return np.dtype(getattr(ml_dtypes, dtype, dtype))
