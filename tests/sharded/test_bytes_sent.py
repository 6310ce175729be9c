"""What a step sends, by the rings' own count, over what an all-reduce of the weights sends."""

import pytest

from tests.multi_process.pool import WorkerPool, cluster_environments, horovod_environments
from tfparallel.logical_devices import LOGICAL_CPUS_VARIABLE

CASES = {
    "optimizer": ({"shard": "optimizer"}, 1.0),
    "parameters": ({}, 1.5),
    "kept": ({"reshard_after_forward": False}, 1.0),
    "gathered in half the bits": ({"gather_dtype": "bfloat16"}, 1.0),
    "kept, in half the bits": ({"gather_dtype": "bfloat16", "reshard_after_forward": False}, 0.75),
}
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def trained(num_workers: int, options: dict, environment: dict | None = None) -> list[dict]:
    """What each of fresh workers tells of a training."""
    of = horovod_environments if options.get("transport") == "horovod" else cluster_environments

    def environments() -> list[dict[str, str]]:
        return [{**own, **(environment or {})} for own in of(num_workers)]

    pool = WorkerPool(["-m", "tests.sharded.counted_worker"], environments)
    try:
        return pool.ask({"options": options}, timeout_s=250)
    finally:
        pool.close()


@pytest.mark.parametrize(("options", "expected"), CASES.values(), ids=CASES)
def test_a_step_sends_what_the_papers_count(options, expected):
    for own in trained(2, options):
        (sent,) = own["sent"]
        assert sent == pytest.approx(expected * own["weights"], rel=0.02)  # (N - 1) / N is a half


@pytest.mark.parametrize(
    ("host", "places"),
    [
        (None, ["CPU:1", "CPU:1"]),
        ("optimizer", ["CPU:1", "CPU:0"]),
        ("parameters", ["CPU:0", "CPU:0"]),
    ],
)
def test_parts_of_a_worker_are_in_the_memory_of_its_host(host, places):
    """Of two CPUs of each worker the second stands for a GPU."""
    for own in trained(2, {"host": host}, {LOGICAL_CPUS_VARIABLE: "2"}):
        assert own["places"] == places


def test_only_sums_of_parts_cross_copies():
    """Of two hosts with two workers each: weights are gathered within a host."""
    for own in trained(4, {"replicas": 2}):
        of_all, of_copy, across = own["sent"]
        assert of_all < 0.02 * own["weights"]  # small weights, and metrics
        assert of_copy == pytest.approx(1.5 * own["weights"], rel=0.02)
        assert across == pytest.approx(0.5 * own["weights"], rel=0.02)  # a half, all-reduced
