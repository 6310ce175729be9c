"""What `tfparallel selftest` asks of trainings that lose a process."""

import pytest

from tfparallel.selftest import recovery_checks, recovery_tasks
from tfparallel.selftest.machine_devices import Bench
from tfparallel.selftest.recovery_checks import (
    NUM_BATCHES,
    ProcessPlace,
    check_goes_on,
    judge_places,
    judge_weights,
    read_places,
    write_place,
)
from tfparallel.selftest.verdicts import CheckFailedError

GPUS = ("GPU-a", "GPU-b")
BEGAN = [ProcessPlace(0, 2, 0, "GPU:0 GPU-a"), ProcessPlace(0, 2, 1, "GPU:0 GPU-b")]
AGAIN = [ProcessPlace(1, 2, 0, "GPU:0 GPU-a"), ProcessPlace(1, 2, 1, "GPU:0 GPU-b")]
ALONE = [ProcessPlace(1, 1, 0, "GPU:0 GPU-a")]


def test_places_are_those_that_were_written(tmp_path):
    bench = Bench((), str(tmp_path))
    for place in BEGAN:
        write_place(bench, "workers", place)
    write_place(bench, "elastic", ALONE[0])
    assert sorted(read_places(bench, "workers")) == BEGAN


def test_who_goes_on_is_where_it_was():
    assert judge_places(BEGAN + AGAIN, 2, GPUS) == (
        "went on where they were: 0 on GPU:0 GPU-a, 1 on GPU:0 GPU-b"
    )
    assert judge_places(BEGAN + ALONE, 1, GPUS)


@pytest.mark.parametrize(
    ("places", "processes", "message"),
    [
        (BEGAN, 2, "expected a start again with 2"),
        (BEGAN + ALONE, 2, "expected a start again with 2"),
        ([*BEGAN, ProcessPlace(1, 1, 0, "CPU:0")], 1, "went on on another: .*rank 0 on CPU:0"),
        ([*BEGAN, ProcessPlace(1, 1, 0, "GPU:0 GPU-b")], 1, "went on on another"),
        ([x._replace(device="CPU:0") for x in BEGAN + AGAIN], 2, "expected a GPU for each"),
        ([x._replace(device="GPU:0 GPU-a") for x in BEGAN + AGAIN], 2, "expected a GPU for each"),
    ],
)
def test_who_goes_on_elsewhere_fails(places, processes, message):
    with pytest.raises(CheckFailedError, match=message):
        judge_places(places, processes, GPUS)


def test_other_weights_fail():
    assert judge_weights([1e-6, 0.0], "text").figures == {"difference": 1e-6}
    for wrong in ([1e-6, 1e-3], [float("nan")], []):
        with pytest.raises(CheckFailedError, match="weights differ"):
            judge_weights(wrong, "text")


def test_who_begins_from_the_start_fails():
    def trained(batches):
        return {"figures": {"batches": batches}}

    check_goes_on([trained(NUM_BATCHES - 4), trained(NUM_BATCHES - 1)])
    with pytest.raises(CheckFailedError, match="trained all 12 batches again"):
        check_goes_on([trained(NUM_BATCHES - 4), trained(NUM_BATCHES)])


def test_a_training_that_is_left_alone_has_so_many_batches():
    counted = recovery_tasks._KillAt(0)
    recovery_tasks._fit(recovery_tasks._model(), [counted])
    assert counted.num_batches == NUM_BATCHES


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_of_workers_is_started_again(tmp_path):
    found = recovery_checks.restart_job(Bench((), str(tmp_path)))
    assert "0 on CPU:0, 1 on CPU:0" in found.text
    assert len(read_places(Bench((), str(tmp_path)), recovery_checks.WORKERS)) == 4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_elastic_job_goes_on_with_one_rank(tmp_path):
    pytest.importorskip("horovod", reason="built by `python -m tfparallel.build_horovod`")
    found = recovery_checks.shrink(Bench((), str(tmp_path)))
    assert "went on where they were" in found.text
    assert len(read_places(Bench((), str(tmp_path)), recovery_checks.ELASTIC)) == 3
