"""Mutants of what splits, reduces and updates: does the conformance suite notice them?

cosmic-ray makes them, in an environment of its own; a process that has imported TensorFlow, and
not started it, forks one for each mutant, which imports the mutated package and asks it the
conformance cases that ran the mutated line when nothing was mutated. The first difference from one
device ends it. From the repository's root:

    python3 -m venv /tmp/cosmic && /tmp/cosmic/bin/pip install cosmic-ray
    /tmp/cosmic/bin/python tools/mutants.py draw mutants --number 240 --seed 17
    .venv/bin/python tools/mutants.py known mutants     # one device; which case runs which line
    .venv/bin/python tools/mutants.py judge mutants     # a few seconds of cases for each
    .venv/bin/python tools/mutants.py judge mutants --again --budget 60 --rows 9    # survivors
    .venv/bin/python tools/mutants.py report mutants

`mutants` is a folder that keeps what is done: `known` and `judge` go on where they ended, and end
by themselves after `--minutes`.
"""

import argparse
import collections
import contextlib
import difflib
import faulthandler
import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

FILES = [  # by their rooms
    f"{room}/{name}.py"
    for room, names in {
        "replicas": """
            base batch extended local local_copies keras_step model_hooks optimizer_hooks
            weighed_gradients weighted_losses replica_step variables seed_hooks row_seeds
            step_gradients step_losses step_outputs own_step clipping graph_collectives
            one_place all_rows coupled_losses assigned_weights sums_of_processes sums_on_devices
            placed_batch central layer_losses added_losses row_arguments metric_states
            batch_norm_hooks one_piece local_replicas batches_ahead
        """,
        "data_parallel": "mirrored",
        "central_storage": "extended",
        "pipeline": """
            gradient_sums divided batch_on_hosts extended executor stage_calls staged_graph
            placed stage_variables stages parts masks deferred_batch_norm stage_functions passes
            row_seeds_of_stages staged_losses
        """,
        "sharded": """
            backward copies creation extended flat_shards in_one_process part_of_copy
            part_updates shard_view sharded_variables unit_gathers units update
        """,
        "hybrid": """
            groups_as_stages split_stage_variable shards meets_in_copies accumulated_norms
            gathered_weights sharded_groups kept_wholes
        """,
        "tensor_parallel": """
            split_variable gradients gradient_in_parts group exchanges computing_groups
            optimizer_parts rows blocks cuts halos holds_parts logits extended layer_calls
            drawn_pieces clipping_parts numbers_of_update
        """,
    }.items()
    for name in names.split()
]
ROWS = ["mirrored_2", "sharded_3", "pipeline_2", "tensor_2x2", "multi_worker_2x1", "horovod_2"]
ONE_DEVICE = "reference"
# `X | None` of an annotation is not worth a mutant; the others want names to be given.
NOT_DRAWN = ("BitOr", "VariableReplacer", "VariableInserter", "ExceptionReplacer")
SURVIVORS = ("survived", "not reached")
SLOW_S = 12.0  # a case that takes longer is not asked
SLOWER = 10  # times that a mutant may take what the original took, and
GRACE_S = 40.0  # what it may take in addition, before it counts as hanging


# ---- draw: in cosmic-ray's environment -----------------------------------------------------------


def draw(folder: Path, number: int, seed: int) -> None:
    """Write `number` mutants to `folder`, of as many places as there are."""
    mutants = [m for file in FILES if (ROOT / "tfparallel" / file).exists() for m in _of_file(file)]
    by_place = collections.defaultdict(list)
    for mutant in mutants:
        by_place[(mutant["file"], *mutant["start"])].append(mutant)
    chance = random.Random(seed)
    places = chance.sample(sorted(by_place), min(number, len(by_place)))
    folder.mkdir(exist_ok=True, parents=True)
    for place in places:
        mutant = chance.choice(by_place[place])
        name = hashlib.sha1(json.dumps(mutant, sort_keys=True).encode()).hexdigest()[:8]
        (folder / f"{name}.mutant").write_text(json.dumps(_with_source(mutant)))
    print(f"{len(places)} of {len(by_place)} places, where {len(mutants)} mutants are.")


def _of_file(file: str) -> list[dict]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast((ROOT / "tfparallel" / file).read_text())))
    mutants = []
    for name in operator_names():
        if any(word in name for word in NOT_DRAWN):
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                place = {"file": file, "start": list(start)}
                mutants.append({**place, "operator": name, "occurrence": occurrence})
                occurrence += 1
    return mutants


def _with_source(mutant: dict) -> dict:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / "tfparallel" / mutant["file"]).read_text()
    operator = get_operator(mutant["operator"])()
    mutated = mutate_code(source, operator, mutant["occurrence"])
    difference = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0))[3:]
    return {**mutant, "source": mutated, "difference": difference}


# ---- one process: cases of a row, of the package as it is or mutated -----------------------------


class Mutation(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module of the package from another source."""

    def __init__(self, file: str, source: str):
        self.path, self.source = ROOT / "tfparallel" / file, source
        self.name = "tfparallel." + file.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname, path, target=None):
        del path, target
        if fullname == self.name:
            return importlib.util.spec_from_file_location(fullname, self.path, loader=self)
        return None

    def exec_module(self, module) -> None:
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


class Lines:
    """Which lines of the package run, on all threads."""

    def __init__(self):
        self.seen: set[tuple[str, int]] = set()
        self._package = str(ROOT / "tfparallel") + "/"

    def __enter__(self):
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        threading.settrace(None)

    def _call(self, frame, event, argument):
        del event, argument
        return self._line if frame.f_code.co_filename.startswith(self._package) else None

    def _line(self, frame, event, argument):
        del argument
        if event == "line":
            file = frame.f_code.co_filename.removeprefix(self._package)
            self.seen.add((file, frame.f_lineno))
        return self._line


def _ask(row, rank: int, cases: list[tuple[str, float]], folder: Path, answer) -> None:
    """Ask each of `cases` in turn; `answer(name, seconds, results)` judges or notes."""
    import keras

    from tests.conformance.case import Run
    from tests.conformance.cases import CASES
    from tests.helpers import open_logical_cpus

    open_logical_cpus(row.devices_per_worker)
    faulthandler.dump_traceback_later(2 * GRACE_S, exit=True)
    strategy = row.make()
    for name, limit_s in cases:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        (folder / f"asked{rank}").write_text(name)
        own = folder / name
        own.mkdir(exist_ok=True)
        keras.utils.set_random_seed(0)  # whatever was asked before
        before = time.monotonic()
        results = CASES[name].function(Run(row, strategy, own, rank))
        answer(CASES[name], time.monotonic() - before, results)
        keras.config.set_dtype_policy("float32")
        keras.backend.clear_session()
    faulthandler.cancel_dump_traceback_later()


def _fork(row, folder: Path, work) -> list[int]:
    """`work(rank)` in one process for each worker of `row`: their exit statuses; 0 is good."""
    children: list[int] = []
    for rank, environment in enumerate(row.environments(row.num_workers)):
        children.append(os.fork())
        if children[-1] == 0:
            os.setpgid(0, 0)
            os.environ.update(environment)
            _in_child(folder, rank, work)
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        child, status = os.waitpid(-1, 0)
        statuses[child] = os.waitstatus_to_exitcode(status)
        if statuses[child]:  # the others would wait for it
            for other in set(children) - set(statuses):
                os.kill(other, signal.SIGKILL)
    for child in children:  # and servers that it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return [statuses[child] for child in children]


def _in_child(folder: Path, rank: int, work) -> None:
    status = 1
    try:
        log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(rank)
        status = 0
    except BaseException as error:
        (folder / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


# ---- known: what one device gives, and which case runs which line --------------------------------


def know(folder: Path, deadline: float) -> None:
    """Run every case as the package is: its results on one device, its lines under each row."""
    from tests.conformance.strategies import ROWS as ALL_ROWS

    for row_name in [ONE_DEVICE, *ROWS]:
        row, known = ALL_ROWS[row_name], folder / row_name
        known.mkdir(exist_ok=True)
        missing = [name for name in _names(row) if not (known / f"{name}.json").exists()]
        while missing and time.monotonic() < deadline:
            some, missing = missing[:10], missing[10:]
            _know_some(row, known, some, folder / ONE_DEVICE)
        print(row_name, len(list(known.glob("*.json"))), "cases known,", len(missing), "to do")


def _names(row) -> list[str]:
    """The cases that `make test` asks a row; those of one device are asked by any row."""
    from tests.conformance.cases import CASES

    asked = [case.name for case in CASES.values() if row.is_asked(case, everything=False)]
    return [name for name in asked if not name.startswith(("coexistence.", "callbacks."))]


def _know_some(row, known: Path, names: list[str], reference: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def work(rank: int) -> None:
            lines = Lines()

            def note(case, seconds: float, results) -> None:
                lines.__exit__()
                _assert_same(case, results, reference if row.name != ONE_DEVICE else None)
                if row.name == ONE_DEVICE:
                    _save(reference, case, results)
                seen = sorted(lines.seen)
                file = known / f"{case.name}.json"
                if rank == 0:
                    file.write_text(json.dumps({"seconds": seconds, "lines": seen}))
                lines.seen.clear()
                if row.name != ONE_DEVICE:
                    lines.__enter__()

            if row.name != ONE_DEVICE:
                import tfparallel  # noqa: F401 (lines that an import runs are no case's)

                lines.__enter__()
            _ask(row, rank, [(name, 8 * GRACE_S) for name in names], Path(folder), note)

        statuses = _fork(row, Path(folder), work)
        if any(statuses):
            asked = (Path(folder) / "asked0").read_text()
            error = [file.read_text()[:300] for file in Path(folder).glob("error*")]
            print(f"{row.name} {asked} fails as it is: {error}")
            (known / f"{asked}.json").write_text(json.dumps({"seconds": 1e9, "lines": []}))
            rest = names[names.index(asked) + 1 :]
            if rest:
                _know_some(row, known, rest, reference)


def _save(folder: Path, case, results) -> None:
    import numpy as np

    if not case.claims:
        np.savez(folder / f"{case.name}.npz", **results)


def _assert_same(case, results, reference: Path | None) -> None:
    import numpy as np

    from tests.helpers import assert_same_training

    if reference is not None and not case.claims:
        expected = dict(np.load(reference / f"{case.name}.npz"))
        received = {name: np.asarray(value) for name, value in results.items()}
        assert_same_training(expected, received, case.atol)


# ---- judge ---------------------------------------------------------------------------------------


def judge(folder: Path, deadline: float, budget_s: float, num_rows: int, again: bool) -> None:
    """Ask every mutant that is not judged yet (by so many seconds), until time is up."""
    known = {row: _known(folder / row) for row in ROWS}

    def first_row(file: Path) -> int:
        mutant = json.loads(file.read_text())
        rows = [i for i, row in enumerate(ROWS) if _cases_of(mutant, known[row], budget_s)]
        return min(rows, default=len(ROWS))

    for file in sorted(sorted(folder.glob("*.mutant")), key=first_row):  # one process is quick
        if time.monotonic() > deadline:
            break
        verdict = file.with_suffix(".verdict")
        before = json.loads(verdict.read_text()) if verdict.exists() else {}
        lives = before.get("verdict") in SURVIVORS and before["budget"] < budget_s
        if not before or (again and lives):
            said = _judge_one(json.loads(file.read_text()), known, folder, budget_s, num_rows)
            verdict.write_text(json.dumps(said))
            print(file.stem, said["verdict"], said.get("by", ""), flush=True)


def _known(folder: Path) -> dict[str, dict]:
    known = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    for each in known.values():
        each["lines"] = {tuple(line) for line in each["lines"]}
    return {name: each for name, each in known.items() if each["seconds"] < SLOW_S}


def _judge_one(mutant: dict, known: dict, folder: Path, budget_s: float, num_rows: int) -> dict:
    asked, rows_left = 0, num_rows
    for row_name in ROWS:
        cases = _cases_of(mutant, known[row_name], budget_s)
        while by := cases and _killed_by(mutant, row_name, cases, folder / ONE_DEVICE):
            culprit = by.split(":")[0].removeprefix(f"{row_name}-")
            if _is_reliable(row_name, culprit, cases, folder / ONE_DEVICE):
                return {"verdict": "killed", "by": by}
            known[row_name].pop(culprit)
            cases = [case for case in cases if case[0] != culprit]
        asked, rows_left = asked + len(cases), rows_left - bool(cases)
        if not rows_left:
            break
    if rows_left and _unit_test(mutant["file"]) and (by := _killed_by_unit_test(mutant)):
        return {"verdict": "killed by a unit test", "by": by}
    return {"verdict": SURVIVORS[not asked], "asked": asked, "budget": budget_s}


def _is_reliable(row_name: str, culprit: str, cases: list, reference: Path) -> bool:
    """Whether the case passes, asked after the same others, when nothing is mutated."""
    names = [name for name, _ in cases]
    passed = reference.parent / row_name / f"{culprit}.reliable"
    if culprit in names and not passed.exists():
        upto = cases[: names.index(culprit) + 1]
        if _killed_by(None, row_name, upto, reference):
            print(f"{row_name}-{culprit} fails as it is, and is not asked any more.", flush=True)
            return False
        passed.touch()
    return True


def _cases_of(mutant: dict, known: dict, budget_s: float) -> list[tuple[str, float]]:
    """Cases that run the mutated line, with the time that each may take."""
    first = mutant["start"][0]
    lines = {(mutant["file"], line) for line in (first - 1, first, first + 1)}
    file_runs = any(mutant["file"] == file for each in known.values() for file, _ in each["lines"])
    at_import = file_runs and not any(lines & each["lines"] for each in known.values())
    chosen, total_s = [], 0.0
    of_file: collections.Counter = collections.Counter()
    ranked = []
    for name, each in sorted(known.items(), key=lambda item: item[1]["seconds"]):
        if at_import or lines & each["lines"]:
            ranked.append((of_file[name.split(".")[0]], each["seconds"], name))
            of_file[name.split(".")[0]] += 1
    for _, seconds, name in sorted(ranked):  # first the quickest of each file: they differ most
        if total_s < budget_s:
            chosen.append((name, SLOWER * seconds + GRACE_S))
            total_s += seconds
    return chosen


def _killed_by(mutant: dict | None, row_name: str, cases: list, reference: Path) -> str | None:
    from tests.conformance.strategies import ROWS as ALL_ROWS

    row = ALL_ROWS[row_name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def work(rank: int) -> None:
            if mutant:
                sys.meta_path.insert(0, Mutation(mutant["file"], mutant["source"]))
            judged = lambda case, _, results: _assert_same(case, results, reference)  # noqa: E731
            _ask(row, rank, cases, folder, judged)

        if not any(_fork(row, folder, work)):
            return None
        asked = [file.read_text() for file in folder.glob("asked*")] or ["import"]
        errors = [file.read_text()[:200] for file in folder.glob("error*")] or ["hung or died"]
        return f"{row_name}-{asked[0]}: {errors[0]}"


def _unit_test(file: str) -> Path | None:
    folder, name = file.rsplit("/", 1)
    test = ROOT / "tests" / folder / f"test_{name}"
    return test if test.exists() else None


def _killed_by_unit_test(mutant: dict) -> str | None:
    from tests.conformance.strategies import ROWS as ALL_ROWS

    test = _unit_test(mutant["file"])
    with tempfile.TemporaryDirectory() as name:

        def work(rank: int) -> None:
            import pytest

            del rank
            sys.meta_path.insert(0, Mutation(mutant["file"], mutant["source"]))
            faulthandler.dump_traceback_later(180, exit=True)
            assert pytest.main(["-n", "0", "-x", "-q", str(test)]) == 0

        killed = any(_fork(ALL_ROWS[ONE_DEVICE], Path(name), work))
    return str(test.relative_to(ROOT)) if killed else None


# ---- report --------------------------------------------------------------------------------------


def report(folder: Path) -> None:
    """Print how many of how many were killed, and what is left."""
    verdicts = {f.stem: json.loads(f.read_text()) for f in folder.glob("*.verdict")}
    mutants = {f.stem: json.loads(f.read_text()) for f in folder.glob("*.mutant")}
    print(collections.Counter(v["verdict"] for v in verdicts.values()), "of", len(mutants))
    by_file = collections.Counter((mutants[n]["file"], v["verdict"]) for n, v in verdicts.items())
    for (file, verdict), count in sorted(by_file.items()):
        print(f"{file:40} {verdict:22} {count}")
    for name, verdict in sorted(verdicts.items(), key=lambda item: mutants[item[0]]["file"]):
        if verdict["verdict"] in SURVIVORS:
            mutant = mutants[name]
            print(f"\n{name} {mutant['file']}:{mutant['start'][0]} {mutant['operator']}", verdict)
            print("\n".join(line for line in mutant["difference"] if line[:1] in "+-"))


def main() -> None:
    """Do one of the four steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["draw", "known", "judge", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, default=240, help="of mutants to draw")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--minutes", type=float, default=1e6, help="end after so long")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds of cases in each row")
    parser.add_argument("--rows", type=int, default=1, help="asked of those that run the line")
    parser.add_argument("--again", action="store_true", help="ask those that survived")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.command == "draw":
        draw(arguments.folder, arguments.number, arguments.seed)
        return
    if arguments.command == "report":
        report(arguments.folder)
        return
    importlib.import_module("tests.conformance.cases")  # TensorFlow too, and not the package
    assert "tfparallel" not in sys.modules
    if arguments.command == "known":
        know(arguments.folder, deadline)
    else:
        options = arguments.budget, arguments.rows, arguments.again
        judge(arguments.folder, deadline, *options)


if __name__ == "__main__":
    main()
