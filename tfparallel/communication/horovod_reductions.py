"""Which ways of meeting Horovod offers to gradients, by how it was built and how it was started.

Asked for one that it lacks, Horovod reduces otherwise without a word ("hierarchical"), or fails in
the first step ("adasum"). Decided here, in plain Python, before anything is reduced. Both functions
say what is lacking, what was received and the way out; None where nothing is lacking.
"""

from dataclasses import dataclass

REDUCTIONS = ("ring", "hierarchical", "adasum")


def lack_of_build(reduction: str, mpi_built: bool, nccl_built: bool) -> str | None:
    """What this Horovod was built without."""
    wants_nccl = reduction == "hierarchical"
    if reduction == "ring" or (mpi_built and (nccl_built or not wants_nccl)):
        return None
    built = [name for name, has in (("NCCL", nccl_built), ("MPI", mpi_built)) if has]
    return (
        f"a Horovod built with {'NCCL and MPI' if wants_nccl else 'MPI'}. Received: one built with "
        f"{' and '.join(built) or 'Gloo'}. Rebuild it: "
        f"{'HOROVOD_GPU_OPERATIONS=NCCL ' if wants_nccl else ''}HOROVOD_WITH_MPI=1 python -m "
        "tfparallel.build_horovod."
    )


@dataclass(frozen=True)
class Job:
    """How Horovod runs.

    Attributes:
        mpi_started: whether MPI started the ranks (`horovodrun --mpi`, `mpirun`), and not Gloo.
        nccl_built: whether NCCL reduces what is on GPUs.
        on_gpu: whether gradients are on a GPU.
        num_ranks: of the whole job.
        num_hosts: they run on.
        all_ranks: whether all of them train together, and not a process set.
    """

    mpi_started: bool
    nccl_built: bool
    on_gpu: bool
    num_ranks: int
    num_hosts: int
    all_ranks: bool


def slow_on_gpus(job: Job) -> str | None:
    """What is slow about this Horovod on GPUs; None where nothing is."""
    if not job.on_gpu or job.nccl_built or job.num_ranks == 1:
        return None
    return (
        "Gradients are on GPUs, and this Horovod has no NCCL: each is copied to the host, "
        "reduced there over TCP, and copied back, which is several times slower. Build it with "
        "NCCL: HOROVOD_GPU_OPERATIONS=NCCL python -m tfparallel.build_horovod --rebuild "
        "(BUILD.md says what that needs)."
    )


def lack_of_job(reduction: str, job: Job) -> str | None:
    """What this job lacks, under a Horovod that is built for `reduction`."""
    if reduction == "ring":
        return None
    if not job.mpi_started:
        return (
            "ranks that MPI has started. Received: ranks of Gloo. Start them with `horovodrun "
            "--mpi`, or with mpirun."
        )
    if reduction == "hierarchical":
        if not job.on_gpu:
            return "GPUs: NCCL reduces on them. Received: ranks on CPUs. Take 'ring'."
        return None
    if not job.all_ranks:
        return "all ranks. Received: a process set. Take 'ring' in process sets."
    # With NCCL, the ranks of a host add up first, and hosts meet by Adasum.
    by_host = job.on_gpu and job.nccl_built
    number = job.num_hosts if by_host else job.num_ranks
    if number & (number - 1):
        return (
            f"a power of two {'hosts' if by_host else 'ranks'}, which meet in pairs. Received: "
            f"{number}. Start another number, or take 'ring'."
        )
    return None
