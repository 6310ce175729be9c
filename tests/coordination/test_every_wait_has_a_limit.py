"""Finds what waits in the package, by reading it: each wait has a limit, or stands here with why.

A wait is a call that blocks until another thread or process does something. Calls of TensorFlow are
not found so; `watch.py` and `guard.py` end those.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import tfparallel
from tfparallel.coordination.timeouts import Timeouts, WorkerTimeouts

PACKAGE = Path(tfparallel.__path__[0])
DOCS = PACKAGE.parent / "docs" / "timeouts.md"

# How many arguments each takes before the one that limits it; keywords that limit it.
WAITS = {
    "wait": 0,
    "wait_for": 1,
    "join": 0,
    "acquire": 1,
    "get": 0,
    "select": 0,
    "accept": 99,
    "recv": 99,
    "recv_into": 99,
    "readline": 99,
    "result": 0,
    "communicate": 1,
}
LIMITS = {"timeout", "timeout_s", "blocking"}

_OF_LAUNCHER = "the launcher lives as long as its workers, and ends them at a signal"
_LIMITED = "its socket has a limit"
WITHOUT_LIMIT = {
    "callbacks/backup/step_agreement.py": "a thread of this process, which asks for 1 s at a time "
    "and ends with the training; what it waits for the agreement limits",
    "callbacks/backup/callback.py": "`Lease.acquire`, which gives up after 1.25 times `lease_s`",
    "callbacks/backup/held_lease.py": "`Lease.acquire` itself, of this file",
    "coordination/writer.py": "a thread of this process that writes; its waits for others are "
    "the agreement's, its disk is the system's",
    "communication/neighbours.py": "receiving returns every second, to look",
    "communication/partners.py": "receiving returns every second, to look",
    "communication/ring_opening.py": _LIMITED,
    "communication/sender.py": "the sender's thread waits for work of this process",
    "coordination/cluster.py": "a `ContextVar`, which does not wait",
    "coordination/proof.py": "recv, whose socket has a limit; its caller's `look` ends the wait",
    "coordination/meeting.py": "the thread waits for guests until it is closed; " + _LIMITED,
    "coordination/listening.py": "only when there is something to accept, as select has said",
    "coordination/probe.py": "threads that each ask for two seconds at most; " + _LIMITED,
    "coordination/tcp_store.py": "rank 0's threads serve who is there; the others' " + _LIMITED,
    "internals/datasets.py": "a thread of this process, whose work it is to wait",
    "launch/leftovers.py": _OF_LAUNCHER,
    "launch/output.py": _OF_LAUNCHER,
    "machine/link.py": _LIMITED,
    "launch/processes.py": _OF_LAUNCHER,
    "parameter_server/keras_functions.py": "`WorkerPool.wait` and `join`: its watch ends them",
    "parameter_server/async_extended.py": "`WorkerPool.join`, which the pool's watch ends",
    "parameter_server/remote_calls.py": "an executor of TensorFlow, whose waits the watch cuts",
    "parameter_server/worker_pool.py": "threads that wait for steps of this process, and executors "
    "of TensorFlow, whose waits the watch cuts",
    "replicas/batches_ahead.py": "a thread of this process that reads the data, for which the step "
    "itself would wait",
    "replicas/convolution_hooks.py": "a `ContextVar`, which does not wait",
    "replicas/seed_hooks.py": "a thread of this process that makes a variable",
    "selftest/children.py": "for the reference, a check that has its limit",
    "selftest/forks.py": "until a process of a job ends, which its check ends at its limit; who "
    "serves, until its starter ends",
    "selftest/job_checks.py": "a process of a check, which is ended with it at the check's limit",
}


def waits_without_limit(tree: ast.AST) -> Iterator[int]:
    """Lines of calls that may wait for ever."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        if name == "settimeout" and _is_none(node.args[0]):
            yield node.lineno
        if name not in WAITS or _is_other_thing(node):
            continue
        limit = node.args[WAITS[name] :]
        if name == "select" and len(node.args) >= 3:  # `select.select`, not a selector's
            limit = node.args[3:]
        limits = [*limit, *(k.value for k in node.keywords if k.arg in LIMITS)]
        if not limits or all(_is_none(each) for each in limits):
            yield node.lineno


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_other_thing(call: ast.Call) -> bool:
    """`"".join(texts)`, `dictionary.get(key)`, `os.path.join(...)`."""
    return call.func.attr in {"join", "get"} and bool(call.args)  # type: ignore[attr-defined]


def test_every_wait_has_a_limit_or_a_reason():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if lines := list(waits_without_limit(ast.parse(path.read_text()))):
            found[path.relative_to(PACKAGE).as_posix()] = lines
    assert {k: v for k, v in found.items() if k not in WITHOUT_LIMIT} == {}
    assert sorted(set(WITHOUT_LIMIT) - set(found)) == [], "nothing waits there any more"


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("event.wait()", True),
        ("event.wait(2.0)", False),
        ("queue.get()", True),
        ("queue.get(timeout=3)", False),
        ("queue.get(timeout=None)", True),
        ("names.get(key)", False),
        ("thread.join()", True),
        ("','.join(names)", False),
        ("changed.wait_for(done)", True),
        ("changed.wait_for(done, 1.0)", False),
        ("connection.recv(8)", True),
        ("connection.settimeout(None)", True),
        ("select.select([end], [], [])", True),
        ("select.select([end], [], [], 1.0)", False),
    ],
)
def test_it_knows_a_wait_without_a_limit(code, waits):
    assert bool(list(waits_without_limit(ast.parse(code)))) == waits


def test_the_table_of_waits_has_the_limit_of_horovod():
    pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")
    from tfparallel.strategies.horovod import HorovodStrategy

    for name in ("stall_timeout_s", "start_timeout_s"):
        default = inspect.signature(HorovodStrategy).parameters[name].default
        assert f"| `HorovodStrategy.{name}` | {default:g} s |" in DOCS.read_text()


@pytest.mark.parametrize("options", [WorkerTimeouts, Timeouts])
def test_the_table_of_waits_has_every_limit_with_its_default_and_none_is_endless(options):
    table = re.findall(r"^\|.*?\| `([\w.]+)` \| ([\d,.]+) s \|$", DOCS.read_text(), re.MULTILINE)
    documented = {(name, float(limit.replace(",", ""))) for name, limit in table}
    for each in fields(options):
        assert each.default is not None and each.default is not MISSING
        assert (f"{options.__name__}.{each.name}", float(each.default)) in documented
