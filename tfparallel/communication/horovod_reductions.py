"""Which ways of meeting Horovod offers to gradients, by how it was built and how it was started.

Asked for one that it lacks, Horovod reduces otherwise without a word ("hierarchical"), or fails in
the first step ("adasum"). Decided here, in plain Python, before anything is reduced.
"""

from dataclasses import dataclass

REDUCTIONS = ("ring", "hierarchical", "adasum")
_BUILD = "python -m tfparallel.build_horovod"


@dataclass(frozen=True)
class Facts:
    """What decides it.

    Attributes:
        mpi_built, nccl_built: what this Horovod was built with.
        mpi_started: whether MPI started the ranks (`horovodrun --mpi`, `mpirun`), and not Gloo.
        on_gpu: whether gradients are on a GPU.
        num_ranks: of the whole job.
        num_hosts: they run on.
        all_ranks: whether all of them train together, and not a process set.
    """

    mpi_built: bool
    nccl_built: bool
    mpi_started: bool
    on_gpu: bool
    num_ranks: int
    num_hosts: int
    all_ranks: bool


def why_not(reduction: str, facts: Facts) -> str | None:
    """What `reduction` lacks, with what was received and the way out; None where it is offered."""
    if reduction == "ring":
        return None
    of_hierarchical = reduction == "hierarchical"
    if not facts.mpi_built or (of_hierarchical and not facts.nccl_built):
        needed = "NCCL and MPI" if of_hierarchical else "MPI"
        built = [n for n, b in (("NCCL", facts.nccl_built), ("MPI", facts.mpi_built)) if b]
        gpu = "HOROVOD_GPU_OPERATIONS=NCCL " if of_hierarchical else ""
        return (
            f"a Horovod built with {needed}. Received: one built with {built or ['Gloo']}. Rebuild "
            f"it: {gpu}HOROVOD_WITH_MPI=1 {_BUILD}."
        )
    if not facts.mpi_started:
        return (
            "ranks that MPI has started. Received: ranks of Gloo. Start them with `horovodrun "
            "--mpi`, or with mpirun."
        )
    if of_hierarchical:
        if not facts.on_gpu:
            return "GPUs: NCCL reduces on them. Received: ranks on CPUs. Take 'ring'."
        return None
    if not facts.all_ranks:
        return "all ranks. Received: a process set. Take 'ring' in process sets."
    # With NCCL, the ranks of a host add up first, and hosts meet by Adasum.
    by_host = facts.on_gpu and facts.nccl_built
    number = facts.num_hosts if by_host else facts.num_ranks
    if number & (number - 1):
        return (
            f"a power of two {'hosts' if by_host else 'ranks'}, which meet in pairs. Received: "
            f"{number}. Start another number, or take 'ring'."
        )
    return None
