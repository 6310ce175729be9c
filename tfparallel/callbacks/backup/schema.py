"""What a backup must look like before anything in it is used.

Its hashes find damage. What was written on purpose, by another program or by an attacker, has right
hashes: so all that is read has to be of the types below.
"""

import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf
from pydantic import model_validator as validates_model

from tfparallel.callbacks.backup.tensor_file import dtype_of

LARGEST_MANIFEST_BYTES = 1 << 26
_MOST_WORKERS = 1_000_000

State = TypeVar("State")


def _as_python(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _accepted_by(set_state: Callable) -> Callable:
    """What lets a state through that `set_state`, of a generator of its own, takes."""

    def check(state: State) -> State:
        try:
            set_state(state)
        except Exception as error:  # of whatever type a generator has for a state that is none
            raise ValueError(f"no state of a random generator: {error!r}") from error
        return state

    return check


def _set_python(state: list) -> None:
    version, internal, next_gauss = state
    random.Random().setstate((version, tuple(internal.tolist()), next_gauss))


Count = Annotated[int, BeforeValidator(_as_python), Field(ge=0, lt=1 << 63)]
NumWorkers = Annotated[int, Field(ge=1, le=_MOST_WORKERS)]
Array = InstanceOf[np.ndarray]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class FileRecord(_Checked):
    """What the manifest says of a file."""

    size_bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class About(_Checked):
    """What the writer of a backup says of it; what it says beyond this is kept, too."""

    model_config = ConfigDict(extra="allow")

    num_workers: NumWorkers
    epoch: Count = 0
    batch: Count = 0
    time: str = ""
    strategy: str = ""
    tfparallel: str = ""
    tensorflow: str = ""
    keras: str = ""


class Owner(_Checked):
    """A process that has, or had, a folder of backups to itself.

    Attributes:
        host, pid, job, since: for messages; since when it runs the training.
        machine: the boot of the machine and the namespace of process numbers; empty if unknown.
        started: when the process did, as the kernel counts.
    """

    host: Annotated[str, Field(max_length=1000)]
    pid: Annotated[int, Field(ge=1, lt=1 << 31)]
    job: Annotated[str, Field(max_length=1000)]
    since: Annotated[str, Field(max_length=1000)]
    machine: Annotated[str, Field(max_length=1000)]
    started: Annotated[str, Field(max_length=1000)]

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, job {self.job!r}, since {self.since}"


class ClaimContent(_Checked):
    """The file of a claim; see `lease.py`."""

    token: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    owner: Owner
    beat: Count
    last_number: Count
    is_released: bool
    accepted: list[Annotated[list, Field(min_length=2, max_length=2)]] | None


class ManifestContent(_Checked):
    """The manifest, without its own hash."""

    format: int
    about: About
    files: dict[str, FileRecord]


class _Progress(_Checked):
    epoch: Count
    batch: Count
    logs: dict[str, Any]


def _known_dtype(name: str) -> str:
    dtype_of(name)
    return name


class CutVariable(_Checked):
    """A variable that several workers hold in shards; its numbers are in their own parts.

    Attributes:
        shape, dtype: of the whole.
        bounds: where in the flat whole that of each worker begins, and the end; of several copies
            that workers share, of those that share the first.
    """

    shape: list[Count]
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    bounds: Annotated[list[Count], Field(min_length=2)]

    @validates_model(mode="after")
    def _is_cut_into_all_of_it(self) -> "CutVariable":
        rises = all(begin <= end for begin, end in itertools.pairwise(self.bounds))
        if not rises or self.bounds[0] != 0 or self.bounds[-1] != math.prod(self.shape):
            raise ValueError(f"shards {self.bounds} of shape {self.shape}")
        return self


class _Plain(_Checked):
    paths: list[str]
    arrays: list[Array]

    @validates_model(mode="after")
    def _has_a_path_for_each_array(self) -> "_Plain":
        if len(self.paths) != len(self.arrays):
            raise ValueError(f"{len(self.paths)} paths for {len(self.arrays)} arrays")
        return self


class _Model(_Checked):
    paths: list[str]
    arrays: list[Array | None]
    plain: _Plain | None = None  # variables in attributes; None before they were saved
    cut: dict[str, CutVariable] = {}  # by its position

    @validates_model(mode="after")
    def _has_a_path_for_each_array(self) -> "_Model":
        if len(self.paths) != len(self.arrays):
            raise ValueError(f"{len(self.paths)} paths for {len(self.arrays)} arrays")
        missing = {str(k) for k, array in enumerate(self.arrays) if array is None}
        if missing != set(self.cut):
            raise ValueError(f"shards of {sorted(self.cut)} for {sorted(missing)}")
        return self


class SharedPart(_Checked):
    """The part that the chief writes; see `snapshot.py`."""

    num_workers: NumWorkers
    progress: _Progress
    stop_training: bool
    model: _Model
    callbacks: dict[str, Any]

    @validates_model(mode="after")
    def _has_a_shard_of_each_worker(self) -> "SharedPart":
        counts = {len(each.bounds) - 1 for each in self.model.cut.values()}
        if len(counts) > 1 or any(self.num_workers % count for count in counts):
            raise ValueError(f"{sorted(counts)} shards do not fit {self.num_workers} workers")
        return self


class ShardsPart(_Checked):
    """The part of a worker that holds shards: its numbers of each variable, by position."""

    numbers: dict[str, Array]


class _Host(_Checked):
    python: Annotated[list, AfterValidator(_accepted_by(_set_python))]
    numpy: Annotated[
        dict[str, Any], AfterValidator(_accepted_by(np.random.RandomState().set_state))
    ]


class _Random(_Checked):
    host: _Host
    tensorflow: Annotated[list, AfterValidator(_accepted_by(_set_python))] | None
    keras: Array | None


class _Input(_Checked):
    taken: list[Count]
    goes_on: bool
    steps_seen: Count
    num_batches: Count | None
    has_checkpoint: bool | None
    checkpoint: list[Array] | None
    not_taken: list[list[Array]] | None = None
    num_to_drop: Count = 0
    next_batches: list[str] | None = None
    reads_all_again: bool = False
    random: dict[str, Any]  # empty before the first iterator

    @validates_model(mode="after")
    def _says_where_it_goes_on(self) -> "_Input":
        if self.goes_on:
            if not self.taken:
                raise ValueError("an iterator that goes on, and none that was made")
            _Host.model_validate(self.random)
        return self


class WorkerPart(_Checked):
    """The part that each worker writes; see `snapshot.py`."""

    metrics: list[list[Array]]
    compression: dict[str, Array | InstanceOf[np.generic]]
    random: _Random
    input: _Input


def parse_json(data: bytes) -> Any:
    """The value that `data` spells.

    Raises:
        ValueError: if it is no JSON, or nested too deeply to be ours.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("lists and dicts that are too deep in one another") from None
