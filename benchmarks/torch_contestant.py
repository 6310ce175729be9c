"""A process that trains one model under torch's DistributedDataParallel on Gloo.

Its options are the defaults, or one of torch's communication hooks. Its input is the cheapest there
is: tensors made beforehand.
"""

import itertools
import os

import numpy as np
import protocol
import torch
from problems import LEARNING_RATE, MOMENTUM, NUM_CLASSES, PROBLEMS, Problem, rows_of_worker
from torch import nn


class Mlp(nn.Module):
    """The MLP of `tensorflow_contestant.build_model`."""

    def __init__(self, problem: Problem):
        super().__init__()
        widths = [*problem.input_shape, *problem.dense_widths]
        for i, (width_in, width_out) in enumerate(itertools.pairwise(widths)):
            self.add_module(f"dense_{i}", nn.Linear(width_in, width_out))
        self.logits = nn.Linear(widths[-1], NUM_CLASSES)

    def forward(self, x):
        """`[rows, features]` to `[rows, NUM_CLASSES]`."""
        for name, layer in self.named_children():
            x = layer(x) if name == "logits" else torch.relu(layer(x))
        return x


class ResNet(nn.Module):
    """The ResNet of `tensorflow_contestant.build_model`; channels first."""

    def __init__(self, problem: Problem):
        super().__init__()
        self._blocks = []
        filters = problem.block_filters[0]
        self._add_conv("stem", problem.input_shape[-1], filters, 3, 1)
        for i, width in enumerate(problem.block_filters):
            halves = width != filters
            if halves:
                self._add_conv(f"block_{i}_project", filters, width, 1, 2)
            self._add_conv(f"block_{i}_first", filters, width, 3, 2 if halves else 1)
            self._add_conv(f"block_{i}_second", width, width, 3, 1)
            self._blocks.append((f"block_{i}", halves))
            filters = width
        self.logits = nn.Linear(filters, NUM_CLASSES)

    def _add_conv(self, name: str, filters_in: int, filters: int, size: int, stride: int):
        conv = nn.Conv2d(filters_in, filters, size, stride, size // 2, bias=False)
        self.add_module(name, conv)
        self.add_module(f"{name}_norm", nn.BatchNorm2d(filters, eps=1e-5))

    def _conv(self, name: str, x):
        return getattr(self, f"{name}_norm")(getattr(self, name)(x))

    def forward(self, x):
        """`[rows, channels, height, width]` to `[rows, NUM_CLASSES]`."""
        x = torch.relu(self._conv("stem", x))
        for name, halves in self._blocks:
            shortcut = self._conv(f"{name}_project", x) if halves else x
            x_first = torch.relu(self._conv(f"{name}_first", x))
            x = torch.relu(self._conv(f"{name}_second", x_first) + shortcut)
        return self.logits(x.mean((2, 3)))


def make_optimizer(name: str, parameters) -> torch.optim.Optimizer:
    """The optimizer under its command line name."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr=LEARNING_RATE / 10, eps=1e-8)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


class TorchContestant:
    """What `contestants.py` asks of a process."""

    def __init__(self, *, problem, optimizer, threads, rank, num_workers, hook=None):
        torch.set_num_threads(threads)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['TORCH_STORE']}",
            rank=rank,
            world_size=num_workers,
        )
        problem = PROBLEMS[problem]
        self.model = (Mlp if problem.dense_widths else ResNet)(problem)
        self._replica = replicated(self.model, hook)
        self._optimizer = make_optimizer(optimizer, self.model.parameters())
        self._batches = itertools.cycle(
            [
                tuple(_as_tensor(rows_of_worker(part, rank, num_workers)) for part in batch)
                for batch in problem.batches()
            ]
        )

    def load_weights(self, path: str) -> None:
        """Reads what `save_weights` of the TensorFlow contestant wrote."""
        weights = np.load(path)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                layer, kind = name.split(".")
                parameter.copy_(torch.from_numpy(_keras_weight(weights, layer, kind)))

    def losses(self, steps: int) -> list[float]:
        """Trains; returns the loss of every step, over all rows."""
        losses = torch.stack([self._step() for _ in range(steps)])
        torch.distributed.all_reduce(losses)
        return (losses / torch.distributed.get_world_size()).tolist()

    def timed_steps(self, steps: int, warmup: int) -> dict:
        """Trains `warmup + steps` steps; see `protocol.timed_steps`."""
        return protocol.timed_steps(self._step, steps, warmup)

    def _step(self):
        x, y = next(self._batches)
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._replica(x), y)
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def replicated(model: nn.Module, hook: str | None) -> nn.Module:
    """The model on all ranks, its gradients summed by one of torch's hooks."""
    options = {}
    if (hook or "").startswith("power_sgd"):
        # With several buckets its collectives go out in another order on each rank, and Gloo
        # mixes them up: one bucket.
        options["bucket_cap_mb"] = 1024
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
    replica = nn.parallel.DistributedDataParallel(model, **options)
    if hook is not None:
        replica.register_comm_hook(*_hook(hook))
    return replica


def _hook(name: str) -> tuple:
    """State and hook: "fp16", or "power_sgd:RANK", from the first step it can begin in."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "fp16":
        return torch.distributed.group.WORLD, default_hooks.fp16_compress_hook
    rank = int(name.removeprefix("power_sgd:"))
    options = {"matrix_approximation_rank": rank, "start_powerSGD_iter": 2}
    return powerSGD_hook.PowerSGDState(None, **options), powerSGD_hook.powerSGD_hook


def _as_tensor(rows: np.ndarray):
    if rows.dtype == np.int32:
        return torch.from_numpy(rows.astype("int64"))
    return torch.from_numpy(rows.transpose(0, 3, 1, 2).copy() if rows.ndim == 4 else rows)


def _keras_weight(weights, layer: str, kind: str) -> np.ndarray:
    if kind == "bias":
        return weights[f"{layer}/{'beta' if layer.endswith('_norm') else 'bias'}"]
    if layer.endswith("_norm"):
        return weights[f"{layer}/gamma"]
    kernel = weights[f"{layer}/kernel"]
    return (kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T).copy()


if __name__ == "__main__":
    protocol.serve(TorchContestant)
