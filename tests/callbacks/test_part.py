import math

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tfparallel.callbacks.backup.part import BackupPart
from tfparallel.callbacks.backup.tensor_file import dump_tensors, load_tensors


def through_files(part: BackupPart) -> BackupPart:
    contents = {name: b"".join(chunks) for name, chunks in part.files("shared").items()}
    return BackupPart.from_files("shared", contents)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint32", "int64", "float16", "float64", ml_dtypes.bfloat16]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_arrays_come_back_equal(dtype, shape):
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    data = b"".join(dump_tensors({"a": array, "b": np.ones(3, "bool")}))
    loaded = load_tensors(data)["a"]
    assert loaded.dtype == array.dtype and loaded.shape == shape
    np.testing.assert_array_equal(loaded, array)


def test_the_reference_reader_of_the_format_agrees():
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(7), "c": np.ones(3, "bool")}
    loaded = safetensors.numpy.load(b"".join(dump_tensors(arrays)))
    assert sorted(loaded) == sorted(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    data = safetensors.numpy.save({name: array for name, array in arrays.items() if array.ndim})
    np.testing.assert_array_equal(load_tensors(data)["a"], arrays["a"])


def test_arrays_that_are_not_contiguous_come_back_equal():
    array = np.arange(12.0).reshape(3, 4).T
    loaded = load_tensors(b"".join(dump_tensors({"a": array})))
    np.testing.assert_array_equal(loaded["a"], array)


def test_nested_values_come_back_equal():
    part = BackupPart()
    part["value"] = {"a": [1, 2.5, None, True, "x"], "b": (math.inf, -0.0), "c": {}}
    part["best"] = np.float32(0.1)
    restored = through_files(part)
    assert restored["value"] == part["value"]
    assert isinstance(restored["best"], np.float32) and restored["best"] == np.float32(0.1)
    assert "value" in restored and "other" not in restored


def test_nan_comes_back():
    part = BackupPart()
    part["loss"] = [math.nan]
    assert math.isnan(through_files(part)["loss"][0])


def test_refuses_what_would_have_to_be_unpickled():
    with pytest.raises(TypeError, match="Received: set at callbacks/seen"):
        BackupPart()["callbacks"] = {"seen": {1, 2}}


def test_refuses_arrays_of_text():
    part = BackupPart()
    part["names"] = np.array(["a"])
    with pytest.raises(TypeError, match="arrays of numbers"):
        through_files(part)
