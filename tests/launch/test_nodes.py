import pytest

from tfparallel.launch.nodes import Place, first_host, place_of_options, place_of_slurm


def test_options_give_the_place():
    assert place_of_options(2, 1, "[::1]:29400") == Place(2, 1, "::1", 29400)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((2, None, "a:1"), "--nnodes 2 expects --node-rank, from 0 to 1"),
        ((2, 2, "a:1"), "Received: 2"),
        ((2, 0, None), "expects --rendezvous HOST:PORT"),
        ((2, 0, "a"), "Received: 'a'"),
        ((2, 0, "a:70000"), "Received: 'a:70000'"),
    ],
)
def test_what_is_missing_is_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        place_of_options(*arguments)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("rack1-n[12]-ib,x", "rack1-n12-ib"),
    ],
)
def test_the_first_host_of_slurms_list(nodelist, host):
    assert first_host(nodelist) == host


STEP = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[1-4]",
}


def test_a_task_of_srun_knows_its_place():
    assert place_of_slurm(STEP) == Place(4, 3, "n1", 20_000 + 64 * 17 + 2)
    assert place_of_slurm({**STEP, "SLURM_STEP_ID": "3"}).port != place_of_slurm(STEP).port


def test_outside_of_srun_slurm_gives_no_place():
    assert place_of_slurm({}) is None
    assert place_of_slurm({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    assert place_of_slurm({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None
