"""Backups with right hashes that no program of ours wrote: each is refused, none is half used."""

import contextlib
import hashlib
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.callbacks.backup.part import BackupPart, read_part
from tfparallel.callbacks.backup.storage import InvalidBackupError, Storage
from tfparallel.callbacks.backup.tensor_file import load_tensors


def parts() -> dict[str, BackupPart]:
    """The parts of a small backup."""
    internal = random.Random(0).getstate()
    host = {
        "python": [internal[0], np.array(internal[1], np.uint32), None],
        "numpy": np.random.RandomState(0).get_state(legacy=False),
    }
    shared, worker = BackupPart(), BackupPart()
    shared["num_workers"] = 1
    shared["progress"] = {"epoch": 1, "batch": 2, "logs": {"loss": 0.5}}
    shared["stop_training"] = False
    shared["model"] = {"paths": ["dense/kernel"], "arrays": [np.zeros((2, 3), "float32")]}
    shared["callbacks"] = {"EarlyStopping-0": {"best": np.float64(0.5)}}
    worker["metrics"] = [[np.zeros(())]]
    worker["compression"] = {}
    worker["random"] = {"host": host, "tensorflow": None, "keras": None}
    worker["input"] = {
        "taken": [3, 2],
        "goes_on": True,
        "steps_seen": 2,
        "num_batches": np.int64(3),
        "random": host,
        "has_checkpoint": True,
        "checkpoint": [np.zeros(4, np.uint8)],
        "is_of_numbers": False,
        "generator": None,
    }
    return {"shared": shared, "worker-0": worker}


def save(storage: Storage, about: Any = None, change: Callable = lambda name, content: content):
    """A backup whose hashes are right, of files that `change` may have changed."""
    draft = storage.begin()
    files = {
        name: [change(name, b"".join(chunks))]
        for part_name, part in parts().items()
        for name, chunks in part.files(part_name).items()
    }
    storage.commit(draft, storage.write(draft, files), about or {"num_workers": 1})
    return draft.number


def read(storage: Storage, number: int) -> dict[str, BackupPart]:
    num_workers = storage.manifest(number).about["num_workers"]
    names = ["shared", *(f"worker-{rank}" for rank in range(num_workers))]
    return {name: read_part(storage, number, name) for name in names}


@pytest.fixture
def storage(tmp_path):
    return Storage(tmp_path)


def test_what_we_write_is_read(storage):
    restored = read(storage, save(storage))
    assert restored["shared"]["progress"] == {"epoch": 1, "batch": 2, "logs": {"loss": 0.5}}
    assert restored["worker-0"]["input"]["taken"] == [3, 2]


@pytest.mark.parametrize(
    "about",
    [
        {"epoch": 1},
        {"num_workers": -1},
        {"num_workers": 0},
        {"num_workers": True},
        {"num_workers": "1"},
        {"num_workers": 1.5},
        {"num_workers": 10**12},
        {"num_workers": 1, "epoch": -1},
        {"num_workers": 1, "strategy": ["Mirrored"]},
        [1],
        "text",
    ],
)
def test_refuses_what_a_writer_never_says_of_a_backup(storage, about):
    number = save(storage, about)
    with pytest.raises(InvalidBackupError, match=r"manifest\.json is damaged"):
        storage.manifest(number)


def replaced(**changes: Any) -> Callable[[dict], dict]:
    return lambda content: {**content, **changes}


@pytest.mark.parametrize(
    "change",
    [
        replaced(files=[]),
        replaced(files={"shared.json": None}),
        replaced(files={"shared.json": {"size_bytes": -1, "sha256": "0" * 64}}),
        replaced(files={"shared.json": {"size_bytes": 2**70, "sha256": "0" * 64}}),
        replaced(files={"shared.json": {"size_bytes": 1, "sha256": "z"}}),
        replaced(files={"shared.json": {"size_bytes": "1", "sha256": "0" * 64}}),
        replaced(about=None),
        replaced(format=None),
        replaced(format="1", about=7),
        lambda content: [content],
        lambda content: None,
    ],
)
def test_refuses_manifests_of_other_shapes(storage, change):
    number = save(storage)
    path = storage.path(number) / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    content = change(content)
    if isinstance(content, dict):
        text = json.dumps(content, sort_keys=True).encode()
        content["sha256"] = hashlib.sha256(text).hexdigest()
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidBackupError):
        storage.manifest(number)


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"", b"NaN"],
    ids=["lists", "objects", "no text", "nothing", "NaN"],
)
@pytest.mark.parametrize("name", ["manifest.json", "shared.json", "worker-0.json"])
def test_refuses_json_that_is_none_or_too_deep(storage, text, name):
    number = save(storage, change=lambda own, content: text if own == name else content)
    if name == "manifest.json":
        (storage.path(number) / name).write_bytes(text)
    with pytest.raises(InvalidBackupError, match=name.partition(".")[0]):
        read(storage, number)


def header(length: int, **entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length < 0 else length) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        header(2**62),
        header(10**6),
        struct.pack("<Q", 4) + b"[{}]",
        header(-1, a=None),
        header(-1, a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),  # no bytes follow
        header(-1, a={"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}) + bytes(4),
        header(-1, a={"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}) + bytes(4),
        header(-1, a={"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}) + bytes(4),
        header(-1, a={"dtype": "F32", "shape": [1], "data_offsets": [0]}) + bytes(4),
        header(-1, a={"dtype": "object", "shape": [1], "data_offsets": [0, 4]}) + bytes(4),
        header(-1, a={"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}) + bytes(4),
    ],
)
def test_refuses_files_of_arrays_that_are_none(storage, data):
    with pytest.raises(ValueError):
        load_tensors(data)
    change = lambda name, content: data if name == "shared.safetensors" else content  # noqa: E731
    number = save(storage, change=change)
    with pytest.raises(InvalidBackupError, match="shared in"):
        read(storage, number)


def with_value(part: str, path: str, value: Any) -> Callable[[str, bytes], bytes]:
    """What changes one value in a part's JSON."""

    def change(name: str, content: bytes) -> bytes:
        if name != f"{part}.json":
            return content
        values = json.loads(content)
        *parents, last = path.split("/")
        owner = values
        for parent in parents:
            owner = owner[parent]
        owner[last] = value
        return json.dumps(values).encode()

    return change


@pytest.mark.parametrize(
    "part, path, value",
    [
        ("shared", "num_workers", -1),
        ("shared", "progress", None),
        ("shared", "progress/epoch", -1),
        ("shared", "progress/batch", "2"),
        ("shared", "stop_training", 1),
        ("shared", "model/paths", []),
        ("shared", "model/arrays", [1.0]),
        ("shared", "model/arrays", [{"__array__": "nothing", "is_scalar": False}]),
        ("shared", "callbacks", [1]),
        ("shared", "callbacks/x", {"__tuple__": 5}),
        ("shared", "callbacks/x", {"__float__": "high"}),
        ("shared", "callbacks/x", {"__array__": ["a"], "is_scalar": False}),
        ("worker-0", "metrics", {}),
        ("worker-0", "metrics", [[1]]),
        ("worker-0", "random/host/python", [3, None, None]),
        ("worker-0", "random/host/numpy", {"bit_generator": "PCG64"}),
        ("worker-0", "random/tensorflow", []),
        ("worker-0", "input/taken", [-1]),
        ("worker-0", "input/taken", []),
        ("worker-0", "input/steps_seen", 1e300),
        ("worker-0", "input/random", {}),
        ("worker-0", "input/checkpoint", ["x"]),
    ],
)
def test_refuses_parts_with_values_of_other_types(storage, part, path, value):
    number = save(storage, change=with_value(part, path, value))
    with pytest.raises(InvalidBackupError, match=f"{part} in .* cannot be restored"):
        read(storage, number)


def test_a_file_larger_than_its_manifest_says_is_not_read(storage, monkeypatch):
    number = save(storage)
    with open(storage.path(number) / "shared.safetensors", "r+b") as file:
        file.truncate(3 << 30)  # of holes
    with pytest.raises(InvalidBackupError, match="3221225472 bytes, of .* at the most"):
        read(storage, number)


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_any_json_in_place_of_a_value_is_read_or_refused(tmp_path_factory, data):
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda nested: (
            st.lists(nested, max_size=3)
            | st.dictionaries(
                st.sampled_from(["__array__", "__tuple__", "__float__", "is_scalar", "taken"]),
                nested,
                max_size=3,
            )
        ),
        max_leaves=6,
    )
    part = data.draw(st.sampled_from(["shared", "worker-0"]))
    name = data.draw(st.sampled_from(sorted(parts()[part].keys())))
    storage = Storage(tmp_path_factory.mktemp("backups"))
    number = save(storage, change=with_value(part, name, data.draw(json_values)))
    with contextlib.suppress(InvalidBackupError):
        read(storage, number)
