"""Two jobs and one folder: real processes, stopped and killed."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.callbacks import jobs
from tests.callbacks.test_storage import save as save_without_lease
from tfparallel.callbacks.backup.held_lease import Lease
from tfparallel.callbacks.backup.storage import InvalidBackupError, LeaseError, Storage

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module")
def s3():
    """The address of an S3 that runs here; the environment leads to it."""
    pytest.importorskip("s3fs", reason="s3:// needs s3fs")
    pytest.importorskip("moto", reason="an S3 that runs here needs moto[server]")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        status = jobs.in_fork(jobs.make_bucket, "runs")
        assert os.waitpid(status, 0)[1] == 0
        yield "s3://runs"
    server.kill()
    server.wait()


@pytest.fixture(params=["path", "file://", "s3://"])
def root(request, tmp_path):
    if request.param == "path":
        return str(tmp_path / "b")
    pytest.importorskip("fsspec", reason="remote folders need fsspec")
    if request.param == "s3://":
        return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return f"file://{tmp_path}/b"


@pytest.fixture
def storage(root):
    return Storage(root)


def taken(storage, **options):
    lease = Lease(storage, jobs.LEASE_S, **options)
    lease.acquire(is_patient=False)
    return lease


def check_all(storage):
    """Every backup that counts is whole, of one job, and newer owners have higher numbers."""
    found = []
    for number in storage.numbers():
        try:
            found.append(jobs.job_of(storage, number))
        except InvalidBackupError:
            assert number not in storage.numbers(), number  # it was deleted while it was read
    fences = [fence for fence, _ in found]
    assert fences == sorted(fences)
    return found


# ---- what the issue found: 404 invalid backups in 12 s -------------------------------------------


def test_every_backup_of_two_jobs_is_whole_and_of_one(root, storage, tmp_path):
    """Each in turn sleeps through its lease, wherever it is, and wakes up as if it still had it."""
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    children = [jobs.in_fork(jobs.keep_saving, root, f"job {i}", logs[i]) for i in (0, 1)]
    draw, rounds = random.Random(0), 4
    with jobs.killed_at_end(*children):
        for _ in range(rounds):
            until = time.monotonic() + draw.uniform(0.05, 0.3)
            while time.monotonic() < until:
                check_all(storage)
            owner = children[int(job_that_saves(storage)[-1])]
            os.kill(owner, signal.SIGSTOP)
            before = newest_job(storage)
            deadline = time.monotonic() + 10 * jobs.LEASE_S
            while newest_job(storage) == before and time.monotonic() < deadline:
                check_all(storage)
                time.sleep(0.02)
            os.kill(owner, signal.SIGCONT)
        for child in children:  # neither has ended with an error but of the lease
            assert os.waitpid(child, os.WNOHANG) == (0, 0), child
    check_all(storage)
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    numbers = [number for _, number in lines if number]
    assert len(numbers) == len(set(numbers)) > 2 * rounds
    assert len({fence for fence, _ in lines if fence}) >= rounds - 1  # it did change hands
    assert len(check_all(storage)) >= 2


def job_that_saves(storage):
    """Waits for one: a busy machine starts them late, and the newest may go while it is read."""
    deadline = time.monotonic() + 60
    while not (job := newest_job(storage)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return job


def newest_job(storage):
    found = check_all(storage)
    return found[-1][1] if found else ""


# ---- who gets it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_the_loser_names_host_process_and_job_of_the_other(root, storage, is_elsewhere):
    child = jobs.in_fork(jobs.hold, root, "the first", is_elsewhere)
    with jobs.killed_at_end(child):
        jobs.until_saved(storage)
        began = time.monotonic()
        with pytest.raises(LeaseError) as raised:
            Lease(storage, jobs.LEASE_S).acquire()
        assert time.monotonic() - began >= jobs.LEASE_S
        for expected in (str(child), socket.gethostname(), "'the first'", str(storage.root)):
            assert expected in str(raised.value)


def test_free_at_once_after_kill_9_of_its_owner_on_this_host(root, storage):
    child = jobs.in_fork(jobs.hold, root, "killed", False)
    jobs.until_saved(storage)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked for it
    lease = taken(storage)
    assert jobs.save(storage, lease, "next") == 2
    os.waitpid(child, 0)
    lease.release()


def test_another_process_with_the_number_of_the_owner_is_not_the_owner(storage, monkeypatch):
    """Numbers are given again."""
    monkeypatch.setattr("tfparallel.callbacks.backup.owner._stat", lambda pid: ("S", "123"))
    child = jobs.in_fork(lambda: jobs.hold(str(storage.root), "x", False))
    with jobs.killed_at_end(child):
        jobs.until_saved(storage)
        monkeypatch.undo()
        taken(storage).release()  # the number is in use, by a process that started at another time


def test_free_within_the_lease_after_the_death_of_its_owner_elsewhere(root, storage):
    child = jobs.in_fork(jobs.hold, root, "killed", True)
    jobs.until_saved(storage)
    jobs.end(child)
    with pytest.raises(LeaseError):
        taken(storage)
    began = time.monotonic()
    lease = Lease(storage, jobs.LEASE_S)
    lease.acquire()
    assert 0.9 * jobs.LEASE_S < time.monotonic() - began < 2 * jobs.LEASE_S
    lease.release()


def test_a_clock_that_jumps_changes_nothing(storage, monkeypatch):
    lease = taken(storage)
    for now in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        jobs.save(storage, lease, "job")
    lease.release()
    assert len(check_all(storage)) == 2


def test_a_released_folder_is_free_and_its_numbers_go_on(storage):
    lease = taken(storage)
    first = jobs.save(storage, lease, "first")
    lost = lease.begin().number
    lease.release()
    second = taken(storage)
    assert second.fence == lease.fence + 1 or second.fence == 2
    assert jobs.save(storage, second, "second") > lost > first
    second.release()


def test_one_of_many_that_want_it_at_once_gets_it(root, storage, tmp_path):
    def want(index):
        jobs.elsewhere(str(index))
        with contextlib.suppress(LeaseError):
            taken(Storage(root))
            (tmp_path / f"owner-{index}").touch()
            time.sleep(2)

    for child in [jobs.in_fork(want, index) for index in range(6)]:
        os.waitpid(child, 0)
    assert len(list(tmp_path.glob("owner-*"))) == 1


# ---- what a loser can still do: nothing ----------------------------------------------------------


def stolen(storage, monkeypatch):
    """Another machine takes the folder; returns its lease."""
    with monkeypatch.context() as patch:
        patch.setattr("tfparallel.callbacks.backup.held_lease._leases", {})
        patch.setattr("tfparallel.callbacks.backup.owner.has_ended", lambda owner: True)
        return taken(storage, job="thief")


def test_an_owner_that_was_fenced_out_before_its_commit_publishes_nothing(storage, monkeypatch):
    lease = taken(storage)
    kept = jobs.save(storage, lease, "old")
    draft = lease.begin()
    records = storage.write(draft, {"shared.json": [b"{}"]})
    thief = stolen(storage, monkeypatch)
    with pytest.raises((LeaseError, OSError)):
        storage.commit(draft, records, {"num_workers": 1}, check=lease.require)
    with pytest.raises(LeaseError, match="'thief'"):
        jobs.save(storage, lease, "old")
    assert storage.numbers() == [kept]
    jobs.save(storage, thief, "new")
    assert [job for _, job in check_all(storage)] == ["old", "new"]
    thief.release()


def test_fenced_out_between_its_last_look_and_the_step_that_counts(storage, monkeypatch):
    lease = taken(storage)
    jobs.save(storage, lease, "old")
    draft = lease.begin()
    records = storage.write(draft, {"shared.json": [b"{}"]})
    thieves = []

    def sleeps_after_its_look():
        lease.require()
        thieves.append(stolen(storage, monkeypatch))

    with contextlib.suppress(OSError):  # a folder was moved away; a store does not notice
        storage.commit(draft, records, {"num_workers": 1}, check=sleeps_after_its_look)
    assert [job for _, job in check_all(storage)] == ["old"]
    thieves[0].release()


def test_who_slept_before_its_sweep_leaves_the_drafts_of_its_successor(root, storage, monkeypatch):
    lease, successor = taken(storage), Storage(root)
    kept = jobs.save(storage, lease, "old")
    sweep, thieves = storage.files.sweep, []

    def sleeps_before(token, fence):
        thief = stolen(successor, monkeypatch)
        thieves.append((thief, draft := thief.begin()))
        thieves.append(jobs.write(successor, draft, "new"))
        return sweep(token, fence)

    with monkeypatch.context() as patch:
        patch.setattr(storage.files, "sweep", sleeps_before)
        with pytest.raises(LeaseError, match="'thief'"):
            lease.begin()  # a store may notice later
            lease.require()
    (thief, draft), records = thieves
    about = jobs.about_of("new", thief)
    successor.commit(draft, records, about, check=thief.require)
    assert [job for _, job in check_all(successor)] == ["old", "new"]
    assert draft.number > kept
    thief.release()


def test_objects_that_arrive_late_do_not_count(tmp_path, monkeypatch):
    """A store has no folder that could be moved away: what was sent before arrives after."""
    pytest.importorskip("fsspec", reason="remote folders need fsspec")
    storage = Storage(f"file://{tmp_path}/b")
    lease = taken(storage)
    jobs.save(storage, lease, "old")
    draft = lease.begin()
    thief = stolen(storage, monkeypatch)
    (tmp_path / "b" / draft.name("backup")).mkdir(exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # stores delete what is not there
        storage.commit(draft, storage.write(draft, {"shared.json": [b"{}"]}), {"num_workers": 1})
    assert [job for _, job in check_all(storage)] == ["old"]
    assert jobs.save(storage, thief, "new") > draft.number
    assert not (tmp_path / "b" / draft.name("backup")).exists()
    assert [job for _, job in check_all(storage)] == ["old", "new"]
    thief.release()


def test_a_loser_deletes_nothing(storage, monkeypatch):
    lease = taken(storage)
    numbers = [jobs.save(storage, lease, "old") for _ in range(2)]
    stolen(storage, monkeypatch).release()
    with pytest.raises(LeaseError):
        storage.delete_all(check=lease.require)
    assert storage.numbers() == numbers


def test_a_heartbeat_notices_the_loss(storage, monkeypatch):
    lease = taken(storage)
    thief = stolen(storage, monkeypatch)
    deadline = time.monotonic() + 5
    with pytest.raises(LeaseError, match="'thief'"):
        while time.monotonic() < deadline:
            lease.raise_if_lost()
            time.sleep(0.05)
    thief.release()


def test_who_slept_until_the_folder_was_taken_anew_changes_nothing_of_it(tmp_path):
    storage = Storage(tmp_path / "b")
    first = taken(storage)
    of_the_first = storage.files.read_claim(1)
    first.release(forget=True)
    second = taken(storage)
    assert second.fence == 1  # numbers begin anew with the folder
    with pytest.raises(FileNotFoundError):
        storage.files.rewrite_claim(1, of_the_first)
    second.require()
    second.release()


def test_a_lease_ends_with_its_training(storage):
    runs = [True]
    lease = taken(storage, is_needed=lambda: runs[0])
    time.sleep(2 * jobs.LEASE_S / 6)
    assert lease.fence == 1
    runs.clear()
    runs.append(False)
    deadline = time.monotonic() + 5
    while lease.fence and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lease.fence == 0
    taken(storage).release()


# ---- disks ---------------------------------------------------------------------------------------


def test_a_full_disk_stops_no_heartbeat(small_disk):
    storage = Storage(small_disk / "backups")
    lease = taken(storage)
    free = os.statvfs(small_disk)
    with open(small_disk / "filler", "wb") as file:
        file.write(bytes(free.f_bavail * free.f_bsize))
    before = storage.files.read_claim(1)
    time.sleep(3 * jobs.LEASE_S / 6)
    assert storage.files.read_claim(1) != before
    lease.release()


def test_a_full_disk_gives_nobody_a_claim(small_disk):
    storage = Storage(small_disk / "backups")
    free = os.statvfs(small_disk)
    with open(small_disk / "filler", "wb") as file:
        file.write(bytes(free.f_bavail * free.f_bsize))
    with pytest.raises(OSError):
        taken(storage)
    (small_disk / "filler").unlink()
    taken(storage).release()


def test_without_hard_links_a_claim_is_made_all_the_same(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    storage = Storage(tmp_path / "b")
    assert storage.files.create_claim(1, b"one")
    assert not storage.files.create_claim(1, b"two")
    assert storage.files.read_claim(1) == b"one"


CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir", "listdir", "link")


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_killed_before_any_call_of_a_takeover_and_a_save(tmp_path, every):
    storage = Storage(tmp_path / "b")
    first = taken(storage)
    jobs.save(storage, first, "first")
    first.begin()  # and a leftover
    first.release()

    def take_and_save(num_calls):
        calls = iter(range(num_calls))

        def counted(original):
            def call(*args, **kwargs):
                if next(calls, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        jobs.save(storage, taken(storage), "next")

    numbers = storage.numbers()
    for num_calls in range(0, 200, every):
        child = jobs.in_fork(take_and_save, num_calls)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        check_all(storage)
        assert storage.numbers()[-1] >= numbers[-1]
        numbers = storage.numbers()
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert 30 < num_calls < 200


def test_backups_of_earlier_versions_are_taken_over(storage):
    """They have no lease, and no token in their names."""
    old = save_without_lease(storage, b"old")
    lease = taken(storage)
    assert storage.numbers() == [old]
    assert set(storage.read(old).values()) == {b"old"}
    assert jobs.save(storage, lease, "new") == old + 1
    lease.release()
