"""What schedulers tell, in tables."""

import pytest

from tfparallel.coordination.scheduler import lonely_warning, tasks_told


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "4"}, ("SLURM_NTASKS", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("OMPI_COMM_WORLD_SIZE", 2)),
        ({"WORLD_SIZE": "x"}, None),
        ({"WORLD_SIZE": "8", "PMI_SIZE": "1"}, ("WORLD_SIZE", 8)),
    ],
)
def test_who_tells_of_several_tasks(environ, expected):
    assert tasks_told(environ) == expected


def test_the_warning_names_scheduler_variable_and_strategy():
    text = lonely_warning({"WORLD_SIZE": "8"}, "MirroredStrategy")
    assert text.startswith("torchrun says that this job has 8 tasks (WORLD_SIZE), but Mirrored")
    assert lonely_warning({}, "MirroredStrategy") is None
