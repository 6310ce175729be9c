"""A process that all-reduces by torch on Gloo, as told by `allreduce.py`."""

import os

import protocol
import torch


class AllReduce:
    """What `allreduce.py` asks of a process."""

    def __init__(self, *, rank, num_workers, **_):
        store = f"file://{os.environ['TORCH_STORE']}"
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=num_workers
        )

    def timed(self, size: int, steps: int) -> list[float]:
        """Seconds of each of `steps` all-reduces of `size` bytes."""
        x = torch.ones(size // 4)
        return protocol.timed_steps(lambda: torch.distributed.all_reduce(x), steps, 2)["wall_s"]


if __name__ == "__main__":
    protocol.serve(AllReduce)
