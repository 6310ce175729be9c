"""What is declared of a strategy's `extended`, every one of them has; who asks, asks no more."""

import inspect

import pytest

from tfparallel.central_storage.extended import CentralStorageExtended
from tfparallel.data_parallel.horovod import HorovodExtended
from tfparallel.data_parallel.mirrored import MirroredLocalExtended
from tfparallel.data_parallel.multi_worker import MultiWorkerExtended
from tfparallel.hybrid.groups_as_stages import PipelinesOfGroupsExtended
from tfparallel.hybrid.sharded_groups import ShardedGroupsExtended
from tfparallel.hybrid.sharded_over_ranks import RanksShardedExtended
from tfparallel.hybrid.sharded_over_workers import WorkersShardedExtended
from tfparallel.hybrid.shares_among_processes import (
    GroupsOfProcessesExtended,
    PipelinesOfProcessesExtended,
)
from tfparallel.parameter_server.async_extended import AsyncParameterServerExtended
from tfparallel.parameter_server.sync_extended import SyncParameterServerExtended
from tfparallel.pipeline.extended import PipelineExtended
from tfparallel.replicas.axis_of_processes import AxisOfProcesses
from tfparallel.replicas.extended import ReplicatedExtended
from tfparallel.replicas.interface import KerasExtended, KnownInReplicas, StepDecisions
from tfparallel.replicas.local_replicas import LocalReplicas
from tfparallel.replicas.measured_training import MeasuredTraining
from tfparallel.replicas.training import Training
from tfparallel.sharded.in_one_process import LocalShardedExtended
from tfparallel.sharded.unit_gathers import UnitGathers
from tfparallel.tensor_parallel.extended import TensorParallelExtended
from tfparallel.tensor_parallel.found_layouts import PutsInParts
from tfparallel.tensor_parallel.over_ranks import TensorParallelOverRanks
from tfparallel.tpu.extended import KerasTPUExtended

OURS = (
    AsyncParameterServerExtended,
    CentralStorageExtended,
    GroupsOfProcessesExtended,
    HorovodExtended,
    LocalShardedExtended,
    MirroredLocalExtended,
    MultiWorkerExtended,
    PipelineExtended,
    PipelinesOfGroupsExtended,
    PipelinesOfProcessesExtended,
    RanksShardedExtended,
    ShardedGroupsExtended,
    SyncParameterServerExtended,
    TensorParallelExtended,
    TensorParallelOverRanks,
    WorkersShardedExtended,
)
DECLARED = [
    *[(extended, KerasExtended) for extended in OURS],
    (HorovodExtended, AxisOfProcesses),
    (MultiWorkerExtended, AxisOfProcesses),
    (KerasTPUExtended, KnownInReplicas),
    (TensorParallelExtended, PutsInParts),
    (TensorParallelOverRanks, PutsInParts),
    (PipelinesOfGroupsExtended, PutsInParts),
    (ShardedGroupsExtended, PutsInParts),
    (LocalShardedExtended, UnitGathers),
    (RanksShardedExtended, UnitGathers),
    (WorkersShardedExtended, UnitGathers),
]

_NOWHERE = object()  # what None is not


def members(protocol: type) -> set[str]:
    """Names that a protocol declares, with those of the protocols it is made of."""
    parts = [part for part in protocol.__mro__ if getattr(part, "_is_protocol", False)]
    found = {name for part in parts for name in {**vars(part), **part.__annotations__}}
    return {name for name in found if not name.startswith(("__", "_abc_", "_is_"))}


def declared(protocol: type, name: str) -> object:
    return inspect.getattr_static(protocol, name, None)


def is_set_in(extended: type, name: str) -> bool:
    """Whether instances of a class get `name` when they are made."""
    known = {*getattr(extended, "__annotations__", {})}
    sources = [inspect.getsource(part) for part in extended.__mro__ if part is not object]
    return name in known or any(f"self.{name}" in source for source in sources)


@pytest.mark.parametrize(
    ("extended", "protocol"),
    DECLARED,
    ids=[f"{extended.__name__}-{protocol.__name__}" for extended, protocol in DECLARED],
)
def test_what_is_declared_is_there(extended, protocol):
    missing = [
        name
        for name in sorted(members(protocol))
        if inspect.getattr_static(extended, name, _NOWHERE) is _NOWHERE
        and not is_set_in(extended, name)
    ]
    assert not missing


@pytest.mark.parametrize(
    ("extended", "protocol"),
    DECLARED,
    ids=[f"{extended.__name__}-{protocol.__name__}" for extended, protocol in DECLARED],
)
def test_methods_take_what_is_declared(extended, protocol):
    """By position as declared, and what they have beyond is optional."""
    for name in sorted(members(protocol)):
        asked, there = declared(protocol, name), inspect.getattr_static(extended, name, None)
        if not inspect.isfunction(asked) or not inspect.isfunction(there):
            continue
        expected = list(inspect.signature(asked).parameters.values())
        stand_ins = [object() for each in expected if each.kind != each.VAR_KEYWORD]
        inspect.signature(there).bind(*stand_ins)  # raises, naming the argument


def test_every_extended_of_the_package_is_looked_at():
    """Those that strategies are made of; what they are made of themselves is not."""

    def leaves(kind):
        below = kind.__subclasses__()
        return {kind} if not below else set().union(*map(leaves, below))

    ours = {kind for kind in leaves(ReplicatedExtended) if kind.__module__.startswith("tfparallel")}
    assert ours <= set(OURS)


def test_protocols_are_made_of_one_another():
    assert members(LocalReplicas) <= members(StepDecisions) <= members(KerasExtended)
    assert members(Training) <= members(MeasuredTraining) <= members(KerasExtended)


def test_what_nobody_declares_is_missing():
    class Renamed:
        def settled(self) -> None: ...

    assert inspect.getattr_static(Renamed, "settle", None) is None and not is_set_in(
        Renamed, "settle"
    )
