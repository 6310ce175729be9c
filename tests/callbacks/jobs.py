"""Processes that save into one folder, over and over, as trainings do but without TensorFlow."""

import contextlib
import importlib
import json
import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tfparallel.callbacks.backup import owner
from tfparallel.callbacks.backup.backup_names import Draft
from tfparallel.callbacks.backup.commit import write_backup
from tfparallel.callbacks.backup.held_lease import Lease
from tfparallel.callbacks.backup.part import BackupPart
from tfparallel.callbacks.backup.storage import LeaseError, Storage

LEASE_S = 1.0


def in_fork(function: Callable, *arguments) -> int:
    """Calls it in a process of its own; returns its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def end(child: int, number: int = signal.SIGKILL) -> None:
    os.kill(child, number)
    os.waitpid(child, 0)


def save(storage: Storage, lease: Lease, job: str, keep: int = 2) -> int:
    """A backup of two parts that both name the job."""
    about = about_of(job, lease)
    return write_backup(storage, None, 0, parts_of(job), about, keep, lease)


def parts_of(job: str) -> dict[str, BackupPart]:
    parts = {name: BackupPart() for name in ("shared", "worker-0")}
    for part in parts.values():
        part["job"], part["noise"] = job, np.frombuffer(secrets.token_bytes(2000), np.uint8)
    return parts


def about_of(job: str, lease: Lease) -> dict:
    return {"num_workers": 1, "job": job, "fence": lease.fence}


def write(storage: Storage, draft: Draft, job: str) -> dict:
    """Both parts, of a backup that was begun; what `Storage.commit` wants to know of them."""
    records: dict = {}
    for name, part in parts_of(job).items():
        records |= storage.write(draft, part.files(name))
    return records


def job_of(storage: Storage, number: int) -> tuple[int, str]:
    """The fencing number and the job of a backup, every byte of which is checked."""
    about, contents = storage.manifest(number).about, storage.read(number)
    jobs = {BackupPart.from_files(name, contents)["job"] for name in ("shared", "worker-0")}
    assert jobs == {about["job"]}
    return about["fence"], about["job"]


def elsewhere(job: str) -> None:
    """Makes this process one of a machine that no other job is on."""
    owner._machine = lambda: f"machine of {job}"


def keep_saving(root: str, job: str, log: Path) -> None:
    """Wants the folder for ever; saves while it has it; logs what it has published."""
    elsewhere(job)
    storage = Storage(root)
    with open(log, "a", buffering=1) as lines:
        while True:
            lease = Lease(storage, LEASE_S, job=job)
            try:
                lease.acquire()
                while True:
                    lines.write(json.dumps([lease.fence, save(storage, lease, job)]) + "\n")
            except LeaseError:
                lines.write(json.dumps([0, 0]) + "\n")
                lease.release()


def hold(root: str, job: str, is_elsewhere: bool) -> None:
    """Has the folder until it is killed."""
    if is_elsewhere:
        elsewhere(job)
    storage = Storage(root)
    lease = Lease(storage, LEASE_S, job=job)
    lease.acquire()
    save(storage, lease, job)
    time.sleep(60)


def make_bucket(name: str) -> None:
    """Makes a bucket in the S3 that the environment leads to."""
    s3fs = importlib.import_module("s3fs")
    s3fs.S3FileSystem().mkdir(name)


def until_saved(storage: Storage, count: int = 1) -> None:
    deadline = time.monotonic() + 20
    while len(storage.numbers()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def killed_at_end(*children: int):
    try:
        yield
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGCONT)
                end(child)
