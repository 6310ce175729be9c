"""What the scheduler that started this process says of the job: how many tasks, and which is this.

Reads the environment that is passed in, and nothing else.
"""

from collections.abc import Mapping

# Who sets it, and the variable with the number of tasks of the job.
NUM_TASKS_VARIABLES = {
    "SLURM_NTASKS": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPI",
    "WORLD_SIZE": "torchrun",
}


def tasks_told(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable that says the job has several tasks, and how many; None if none does."""
    for variable in NUM_TASKS_VARIABLES:
        text = environ.get(variable, "")
        if text.isascii() and text.isdigit() and int(text) > 1:
            return variable, int(text)
    return None


def lonely_warning(environ: Mapping[str, str], described: str) -> str | None:
    """What to say where a scheduler tells of several tasks, and a strategy has one process.

    Args:
        environ: of this process.
        described: the strategy.
    """
    told = tasks_told(environ)
    if told is None:
        return None
    variable, count = told
    return (
        f"{NUM_TASKS_VARIABLES[variable]} says that this job has {count} tasks ({variable}), but "
        f"{described} trains in this process alone: started as often, each task trains the whole "
        "model by itself. For one model, start the tasks with `srun tfparallel launch train.py` "
        "or `tfparallel launch`, and use MultiWorkerMirroredStrategy."
    )
