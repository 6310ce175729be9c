"""Does the simulator find things? Undoes real fixes, one at a time, and asks it.

    python -m tests.simulation.mutants [--only NAME ...]

Each mutant is a copy of the package in which one fix of the project's history is undone. It is
found if a schedule fails within `--schedules`; the script ends with 1 unless all are. A name ends
with the commit that made the fix:

    014e945 lease: what the other owner was quicker to remove is no failure of the disk
    0aae1cf backup: a lease on the folder, so that two jobs cannot save into one
    9acc234 simulate: backups, leases, rings and parameter servers in worlds that fail, on the
            package's own code
    9e69456 coordination: nobody waits without a word, without a limit or without a name
    261c18f simulate: the launcher of a host and backups in object stores; what comes late to a
            store never counts
    9146083 Session 6: squares of repeated rows, the pipeline's end of data, reads that are
            asked again, next batch's hash everywhere, and what versions 3.10 to 3.14 need
    3dfbdab strategies: TPU, seeds by hook, batches with fewer rows than replicas
    aa35fb9 ParameterServerStrategy: asynchronous mode, whose steps hand their changes in
    af2bd3a parameter servers: an update is applied and no more under way at once; simulated
            workers and servers are hit all the time
    8630276 parameter server: sync training waits for a lost worker and repeats the steps since
            its copies
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """A fix that is undone.

    Attributes:
        name: of the fix.
        scenario: in which it is missed.
        file: of the package.
        fixed, broken: code as it is, and as it was.
    """

    name: str
    scenario: str
    file: str
    fixed: str
    broken: str


LEASE, LOCAL = "callbacks/backup/held_lease.py", "callbacks/backup/local_files.py"
MUTANTS = [
    Mutant(
        "what the other owner was quicker to delete is no failure (014e945)",
        "backups",
        LOCAL,
        "with contextlib.suppress(FileNotFoundError):  # another owner of the folder was quicker",
        "with contextlib.nullcontext():",
    ),
    Mutant(
        "a claim that the next owner has removed is an error of the lease (014e945)",
        "backups",
        LEASE,
        "                self.require()  # the next owner has removed it, which is an error of the",
        "                pass  # the next owner has removed it, which is an error of the",
    ),
    Mutant(
        "two jobs in one folder publish no mixed backups: drafts are swept away (0aae1cf)",
        "backups",
        LOCAL,
        'self._move(self._root / draft.name("writing"), self._root / draft.name("deleting"))',
        "pass",
    ),
    Mutant(
        "who takes a folder is the next owner, and looks again (0aae1cf)",
        "backups",
        LEASE,
        "if not owns(self._token, newest):",
        "if False:",
    ),
    Mutant(
        "a power failure does not take the folder of all backups (9acc234)",
        "backups",
        LOCAL,
        "                self._disk.sync_folder(folder)\n            except",
        "                pass\n            except",
    ),
    Mutant(
        "a deleted backup has its other name before its files go (9acc234)",
        "backups",
        LOCAL,
        "            self._disk.sync_folder(self._root)  # before its files go",
        "            pass  # before its files go",
    ),
    Mutant(
        "a folder that the next owner has removed is an error of the lease, at a begin (9acc234)",
        "backups",
        LEASE,
        "            self.require()  # the next owner may have removed the folder: say so",
        "            pass  # the next owner may have removed the folder: say so",
    ),
    Mutant(
        "a folder that the next owner has emptied is an error of the lease, at a search (9acc234)",
        "backups",
        "callbacks/backup/callback.py",
        "                self._lease.require()  # who has lost the folder finds its files gone",
        "                pass  # who has lost the folder finds its files gone",
    ),
    Mutant(
        "the ring listens to liveness (9e69456)",
        "rings",
        "communication/neighbours.py",
        "if self._liveness is not None and (lost := self._liveness.lost()):",
        "if self._liveness is not None and (lost := []):",
    ),
    Mutant(
        "in a store the last claim stays, so that nothing late counts (261c18f)",
        "stores",
        LEASE,
        "if forget and self._files.accepted() is None:",
        "if forget:",
    ),
    Mutant(
        "what was removed from a store keeps its mark until a claim says what counts (261c18f)",
        "stores",
        "callbacks/backup/remote_files.py",
        "keeps_mark=may_count",
        "keeps_mark=False",
    ),
    Mutant(
        "what a store did not answer is asked again, and no backup taken for damaged (9146083)",
        "stores",
        "callbacks/backup/remote_files.py",
        "_ATTEMPTS = 5",
        "_ATTEMPTS = 1",
    ),
    Mutant(
        "a signal that comes twice, or after another, hurries nobody (3dfbdab)",
        "launcher",
        "launch/job_life.py",
        "if event == Signalled(signal.SIGINT) and self._now_s() > start_s + _IMPATIENCE_S:",
        "if isinstance(event, Signalled):",
    ),
    Mutant(
        "a step that was given to another worker is not applied twice (aa35fb9)",
        "servers",
        "parameter_server/worker_pool.py",
        "            if not self._owns(lane, step, attempt):\n                return",
        "            if not self._owns(lane, step, attempt):\n                pass",
    ),
    Mutant(
        "nobody sees an update that is applied and still under way (af2bd3a)",
        "servers",
        "parameter_server/worker_pool.py",
        "                if is_applied:\n"
        "                    self._note_applied(lane, step, outputs)\n"
        "                self._changed.notify_all()\n",
        "                self._changed.notify_all()\n"
        "        with self._changed:\n"
        "            self._note_applied(lane, step, outputs)\n",
    ),
    Mutant(
        "who waits for workers in a later training waits anew (af2bd3a)",
        "servers",
        "parameter_server/worker_pool.py",
        "self._error, for_anyone = error, None",
        "self._error = error",
    ),
    Mutant(
        "what was given up cannot change a variable any more (8630276)",
        "servers",
        "parameter_server/repeated_steps.py",
        "                        self._fence.raise_generation()\n",
        "",
    ),
]


def is_found(mutant: Mutant, schedules: int) -> bool:
    """Whether the simulator finds it; prints how."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tfparallel", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, Path(folder, name), ignore=ignored)
        path = Path(folder, "tfparallel", mutant.file)
        text = path.read_text()
        assert text.count(mutant.fixed) == 1, (
            f"{mutant.name}: its place is in {mutant.file} no more"
        )
        path.write_text(text.replace(mutant.fixed, mutant.broken))
        command = [sys.executable, "-m", "tests.simulation", "--scenario", mutant.scenario]
        done = subprocess.run(
            [*command, "--schedules", str(schedules)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    found = [line for line in done.stdout.splitlines() if line.startswith(mutant.scenario)]
    print(
        f"{'found' if found else 'MISSED'}: {mutant.name}\n    {''.join(found)[:200]}", flush=True
    )
    if done.returncode not in (0, 1) or (done.returncode == 1 and not found):
        print(done.stdout[-2000:], done.stderr[-2000:])
    return bool(found)


def main() -> int:
    """Asks for every mutant; 1 unless all are found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names")
    parser.add_argument("--schedules", type=int, default=20_000)
    arguments = parser.parse_args()
    asked = [m for m in MUTANTS if any(part in m.name for part in arguments.only)]
    results = [is_found(mutant, arguments.schedules) for mutant in asked]
    print(f"{sum(results)} of {len(results)} mutants found")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
