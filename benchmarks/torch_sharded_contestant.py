"""One rank of torch's FSDP2 (`fully_shard`) on Gloo, for benchmarks/sharded.py: the same model.

Each layer is a unit, and the model around them. It begins with the weights of a file, from Keras,
and trains its share of the rows.
"""

import argparse
import resource
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Dense(nn.Module):
    """`keras.layers.Dense`, with a hyperbolic tangent behind it or without."""

    def __init__(self, width_in: int, width: int, has_tanh: bool):
        super().__init__()
        self.linear, self.has_tanh = nn.Linear(width_in, width), has_tanh

    def forward(self, x):
        """`[rows, width_in]` to `[rows, width]`."""
        return torch.tanh(self.linear(x)) if self.has_tanh else self.linear(x)


def run_rank(
    options: argparse.Namespace,
    rank: int,
    data: tuple[np.ndarray, np.ndarray],
    measured: Callable,
) -> dict:
    """Trains as one rank.

    Args:
        options: of benchmarks/sharded.py.
        rank: of this process.
        data: all rows.
        measured: trains by a function that trains a step, and returns what it has measured.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model, num_bytes = _model(options)
    if options.contestant == "torch ddp":
        torch.distributed.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (options.ranks,))
        kept = {"reshard_after_forward": options.contestant != "torch kept"}
        for layer in model:
            fully_shard(layer, mesh=mesh, **kept)
        trained = fully_shard(model, mesh=mesh, **kept)
    optimizer = torch.optim.Adam(trained.parameters(), 1e-3, eps=1e-12)
    rows = len(data[0]) // options.ranks
    x, y = (torch.from_numpy(each[rank * rows : (rank + 1) * rows]) for each in data)

    def step():
        loss = nn.functional.mse_loss(trained(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    found = measured(step)
    torch.distributed.all_reduce(found["loss"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        **found,
        "loss": float(found["loss"]) / options.ranks,
        "held": _held(model, optimizer),
        "all_reduce": 2 * num_bytes * (options.ranks - 1) / options.ranks,
        "peak": peak - before,
    }


def _model(options: argparse.Namespace) -> tuple[nn.Sequential, int]:
    """The model with the weights of the file, and how many bytes they are."""
    widths = [options.width] * 8
    layers = [Dense(options.width, width, True) for width in widths]
    model = nn.Sequential(*layers, Dense(options.width, 8, False))
    arrays = np.load(options.weights)
    with torch.no_grad():
        for layer, k in zip(model, range(0, len(arrays.files), 2), strict=True):
            kernel, bias = (arrays[f"arr_{i}"] for i in (k, k + 1))
            layer.linear.weight.copy_(torch.from_numpy(kernel.T))
            layer.linear.bias.copy_(torch.from_numpy(bias))
    return model, sum(arrays[name].nbytes for name in arrays.files)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights and slots that this rank stores."""
    slots = [each for state in optimizer.state.values() for each in state.values()]
    tensors = [*model.parameters(), *(each for each in slots if each.dim())]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)
