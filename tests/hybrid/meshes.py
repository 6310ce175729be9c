"""Meshes of four logical CPUs, each with all that it takes."""

from collections.abc import Sequence

import keras

import tfparallel
from tests.helpers import cpu_mesh_of
from tests.tensor_parallel.layouts import LayoutOfAnything

PAIRS = ("data", "shard", "pipeline", "model")
# Every two axes, and each alone.
SIZES = [
    *({first: 2, second: 2} for i, first in enumerate(PAIRS) for second in PAIRS[i + 1 :]),
    *({axis: 2} for axis in PAIRS),
]


def hybrid(
    sizes: dict[str, int],
    memory: tfparallel.MemoryPolicy | None = None,
    seed_by: str = "replica",
    what: str = "parameters",
    devices: Sequence[str] | None = None,
    **options,
) -> tfparallel.HybridStrategy:
    """On a mesh of these axes; whatever can be in parts is.

    Args:
        sizes: of the axes.
        memory, seed_by: of the strategy.
        what: is in parts along an axis of shards.
        devices: of the places; logical CPUs in their order without.
        options: of `PipelineOptions`; without an axis "pipeline" they say nothing.
    """
    mesh: keras.distribution.DeviceMesh = cpu_mesh_of(devices, **sizes)
    arguments: dict = {"memory": memory, "seed_by": seed_by}
    if "shard" in sizes:
        arguments["shard"] = tfparallel.Sharding(what, min_size=1)
    if "model" in sizes:
        arguments["layout_map"] = LayoutOfAnything(mesh)
    if "pipeline" in sizes:
        arguments["pipeline"] = tfparallel.PipelineOptions(**{"num_microbatches": 2, **options})
    return tfparallel.HybridStrategy(mesh, **arguments)


def over_processes(
    sizes: dict[str, int], transport: str = "auto", what: str = "parameters", **options
) -> tfparallel.HybridStrategy:
    """On a mesh of the devices of all processes of a job; whatever can be in parts is.

    Args:
        sizes: of the axes, the outermost first.
        transport: between the processes.
        what: is in parts along an axis of shards.
        options: of the strategy.
    """
    if "shard" in sizes:
        options.setdefault("shard", tfparallel.Sharding(what, min_size=1))
    if "pipeline" in sizes:
        options.setdefault("pipeline", tfparallel.PipelineOptions(2))
    if "model" in sizes:
        options["layout_map"] = LayoutOfAnything(None)
    return tfparallel.HybridStrategy(sizes, transport=transport, **options)
