"""Arrays as one file in the safetensors format: a JSON header, then the raw bytes.

The file holds no code and any tool for safetensors reads it. It is read by the safetensors
package, and written here, piece by piece: the package would copy everything first, while a model
trains.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import struct
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize

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
    """The arrays of a file.

    Raises:
        ValueError: if `data` is not such a file.
    """
    try:
        entries = deserialize(data)
    except SafetensorError as error:
        raise ValueError(f"no file of arrays: {error}") from None
    return {name: _array(name, **entry) for name, entry in entries}


def _array(name: str, dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    if dtype not in _DTYPES:
        raise ValueError(f"{name} of the unknown dtype {dtype!r}")
    return np.frombuffer(data, dtype_of(_DTYPES[dtype])).reshape(shape)


def dtype_of(name: str) -> np.dtype:
    """The dtype that is called `name` in NumPy or TensorFlow.

    Raises:
        ValueError: for one that files do not hold.
    """
    if name not in _NAMES:
        raise ValueError(f"the unknown dtype {name!r}")
    return np.dtype(getattr(ml_dtypes, name, name))
