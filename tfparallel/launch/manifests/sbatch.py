"""A script for Slurm's `sbatch`: `srun` starts a launcher in each task, which finds the others."""

import shlex

from tfparallel.launch.manifests.job_spec import JobSpec


def sbatch_script(job: JobSpec, script: list[str]) -> str:
    """The script.

    Args:
        job: a task for each worker; servers, chief and evaluator are in the first task.
        script: what `tfparallel launch` starts, with its arguments.
    """
    command = list(job.command)
    if job.is_cluster:
        command = ["tfparallel", "launch", *_options(job), *script]
    return "\n".join([*_head(job), f"srun --kill-on-bad-exit=1 {shlex.join(command)}", ""])


def _options(job: JobSpec) -> list[str]:
    """What the launcher does not find out by itself; one task alone is no job to meet others in."""
    options = ["--standalone", "--workers", "1"] if job.counts["worker"] == 1 else []
    if servers := job.counts.get("ps"):
        options += ["--ps", str(servers)]
    return [*options, "--evaluator"] if "evaluator" in job.counts else options


def horovod_script(job: JobSpec) -> str:
    """The script of ranks that `horovodrun` starts, from the first node by ssh."""
    ranks = job.counts["worker"]
    return "\n".join(
        [
            *_head(job),
            "hosts=$(srun hostname | sort | uniq -c | awk '{print $2 \":\" $1}' | paste -sd,)",
            f'horovodrun -np {ranks} -H "$hosts" {shlex.join(job.command)}',
            "",
        ]
    )


def _head(job: JobSpec) -> list[str]:
    workers, gpus = job.counts["worker"], job.resources.gpus
    memory = job.resources.memory.removesuffix("i")  # 4Gi is 4G: Slurm counts in 1024
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --ntasks={workers}",
        f"#SBATCH --cpus-per-task={job.resources.cpus}",
        f"#SBATCH --mem-per-cpu={_share(memory, job.resources.cpus)}",
        *([f"#SBATCH --gpus-per-task={gpus}"] if gpus else []),
        f"#SBATCH --signal=TERM@{job.grace_s}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "",
        "# SIGTERM comes before the time is over and at preemption: BackupAndRestore saves then.",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.env.items()),
    ]
    return [*lines, ""]


def _share(memory: str, cpus: int) -> str:
    """A CPU's share of a task's memory, in megabytes as Slurm counts them."""
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    return f"{max(1, round(float(memory[:-1]) * units[memory[-1].upper()] / cpus))}M"
