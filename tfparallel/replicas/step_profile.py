"""One training step as it really ran: what devices and links did when, of all processes of a job.

Nothing is put into the step: TensorFlow's profiler notes when operations run, graphs tell on what
device and what for, our own transport what it sends and receives.
"""

import contextlib
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import keras
import tensorflow as tf

from tfparallel.coordination.agreement import Agreement
from tfparallel.internals.profile_planes import Ran
from tfparallel.internals.ran_elsewhere import addresses_elsewhere, own_task
from tfparallel.internals.ran_operations import Node, collected_graphs, profiled
from tfparallel.measure.clock_offsets import Offset, offsets
from tfparallel.measure.lanes import Box, StepLanes, lanes_of
from tfparallel.measure.operation_kinds import kind_of_operation
from tfparallel.replicas.checking.check import prepared
from tfparallel.replicas.checking.step import TracedStep
from tfparallel.replicas.checking.traces import no_trace
from tfparallel.replicas.device_names import names_with_tasks
from tfparallel.replicas.measured_training import MeasuredTraining
from tfparallel.replicas.model_optimizers import optimizers_of
from tfparallel.replicas.profile_of_servers import BOOT, ROUNDS, OnServers
from tfparallel.replicas.training import training_of

_GAP = 1 / 400  # of a step: shorter pauses between boxes of one kind are not shown
# They end when another operation has called them back, of which the profiler sees the start only.
_COME_BACK = ("_Recv", "_HostRecv", "Collective", "Horovod", "Nccl")

_TPU = re.compile(r"\bTPU:\d")  # what the host does for it is launching, whatever its clock says


def profile_step(strategy: tf.distribute.Strategy, model: keras.Model, batch: object) -> StepLanes:
    """`KerasStrategy.profile`, which explains the arguments."""
    batch = prepared(strategy, model, batch, "profile")
    extended: MeasuredTraining = strategy.extended
    with no_trace(model, strategy):
        steps_at_once = extended._steps_at_once(model, batch)
        if steps_at_once is not None:
            return _of_steps_at_once(steps_at_once, _optimizer_names(model))
        step = TracedStep(model)
        with collected_graphs() as nodes:
            step.repeat(batch)
        agreement = training_of(strategy).agreement()
        offset = _offset(agreement)  # nobody begins before all have traced
        addresses = addresses_elsewhere({node.device for node in nodes.values()})
        with profiled() as ran, extended._link_journal() as journal:
            servers = OnServers(lambda: step.repeat(batch), addresses) if addresses else None
            if servers is None:
                step.repeat(batch)
    if servers is not None:
        ran = _of_all_tasks(servers, ran, nodes)
        offset = offset._replace(error_s=max(offset.error_s, servers.clock_error_s))
    lanes = _Lanes()
    _add_operations(lanes, ran, nodes, _optimizer_names(model))
    rank, size = extended._id_in_cluster, extended._num_workers
    links = {"send": f"to rank {(rank + 1) % size}", "receive": f"from rank {(rank - 1) % size}"}
    for kind, start, end in journal.since_1970():
        lanes.add(links[kind], kind, kind, start, end)
    return lanes.of_all_ranks(agreement, offset)


def _of_steps_at_once(
    steps_at_once: Callable[[], Collection[object]], optimizers: Collection[str]
) -> StepLanes:
    """Of steps that workers take by themselves: they divide the graphs between devices, not we.

    So what a step sends and receives is on the lane of who does, and all that processors of a task
    run is on the lane of its first one.
    """
    steps_at_once()  # traces
    addresses = addresses_elsewhere(each.name for each in tf.config.list_logical_devices())
    with profiled() as ran:
        servers = OnServers(lambda: len(steps_at_once()), addresses)
    lanes = _Lanes()
    for (job, number), own in {own_task(): servers.of_step(ran), **servers.ran()}.items():
        has_clock = any(each.device for each in own)  # then the host's part is launching
        own = [each for each in own if each.device or not has_clock]
        named = [each._replace(device=f"{job} {number} {each.device or 'CPU:0'}") for each in own]
        _add_operations(lanes, named, {}, optimizers)
    return lanes.of_all_ranks(None, Offset(0.0, servers.clock_error_s))


def _optimizer_names(model: keras.Model) -> set[str]:
    return {name for each in optimizers_of(model) for name in _names_of(each)}


def _names_of(optimizer: keras.Optimizer) -> set[str]:
    """Of an optimizer and the one that it scales losses for."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return {optimizer.name} | (set() if inner is None else {inner.name})


class _Lanes:
    """Boxes by the name of their lane."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[Box]] = {}

    def add(self, lane: str, kind: str, label: str, start: float, end: float) -> None:
        self._boxes.setdefault(lane, []).append(Box(0, kind, label, start, end))

    def of_all_ranks(self, agreement: Agreement | None, offset: Offset) -> StepLanes:
        """Joined, so that what is exchanged is short; devices come before links."""
        own = []
        spans = [(b.start, b.end) for boxes in self._boxes.values() for b in boxes]
        gap_s = (max(end for _, end in spans) - min(start for start, _ in spans)) * _GAP
        for name, boxes in sorted(self._boxes.items(), key=lambda item: (" " in item[0], item[0])):
            first = min(box.start for box in boxes)
            for box in lanes_of((name,), boxes, gap_s).boxes:
                times = [first + each - offset.seconds for each in (box.start, box.end)]
                own.append([name, box.kind, box.label, *times])
        if agreement is None:
            return _together([own], [""], gap_s, offset.error_s)
        answers = agreement.exchange("profile a step", [own, gap_s, offset.error_s])
        by_rank, gaps_s, errors_s = zip(*answers, strict=True)
        ranks = [f"rank {rank} " for rank in range(len(answers))]
        return _together(by_rank, ranks, max(gaps_s), max(errors_s))


def _together(
    by_rank: Iterable[list], prefixes: Iterable[str], gap_s: float, error_s: float
) -> StepLanes:
    names: dict[str, int] = {}
    boxes = []
    for own, prefix in zip(by_rank, prefixes, strict=True):
        for name, kind, label, start, end in own:
            lane = names.setdefault(prefix + name, len(names))
            boxes.append(Box(lane, kind, label, start, end))
    return lanes_of(list(names), boxes, gap_s, error_s)


def _of_all_tasks(servers: OnServers, ran: Iterable[Ran], nodes: Mapping[str, Node]) -> list[Ran]:
    """What a step ran here and on servers; devices with clocks are named with their tasks."""
    specs = {name: tf.DeviceSpec.from_string(node.device) for name, node in nodes.items()}
    return [
        each._replace(device=each.device and f"{job} {number} {each.device}")
        for (job, number), own in {own_task(): servers.of_step(ran), **servers.ran()}.items()
        for each in own
        if each.device
        or (each.name in specs and (specs[each.name].job, specs[each.name].task) == (job, number))
    ]


def _add_operations(
    lanes: _Lanes, ran: Iterable[Ran], nodes: Mapping[str, Node], optimizers: Collection[str]
) -> None:
    """Operations on their devices, and what goes from device to device on links of its own."""
    ran = [each for each in ran if each.device or each.name in nodes]
    has_clock = {each.device for each in ran}  # GPUs: what the host does for them is launching
    devices = {device for node in nodes.values() for device in (node.device, node.to) if device}
    names = dict(zip(devices, names_with_tasks(list(devices)), strict=True))
    starts = {each.name: each.start_s for each in ran if not each.device}
    first_use = _first_uses(starts, nodes)
    sent: dict[tuple[str, str], Ran] = {}
    received: dict[tuple[str, str], Ran] = {}
    for each in ran:
        kind = kind_of_operation(each.name, each.operation, optimizers)
        if each.device:
            if "memcpy" in each.operation.lower():
                kind = "receive" if "h2d" in each.operation.lower() else "send"
            lanes.add(each.device, kind, each.operation, each.start_s, each.end_s)
            continue
        node = nodes[each.name]
        device = names[node.device]
        if kind in ("send", "receive"):
            (sent if kind == "send" else received)[node.tensor, node.to] = each
            continue
        end_s = each.end_s
        if each.operation.startswith(_COME_BACK):
            end_s = max(end_s, first_use.get(each.name, end_s))
        if device not in has_clock and not _TPU.search(device):
            lanes.add(device, kind, each.operation, each.start_s, end_s)
    _add_transfers(lanes, sent, received, nodes, names)


def _first_uses(starts: Mapping[str, float], nodes: Mapping[str, Node]) -> dict[str, float]:
    """When the first operation began that needs a node."""
    first: dict[str, float] = {}
    for name, start_s in starts.items():
        for needed in nodes[name].inputs:
            first[needed] = min(first.get(needed, start_s), start_s)
    return first


def _add_transfers(
    lanes: _Lanes,
    sent: Mapping[tuple[str, str], Ran],
    received: Mapping[tuple[str, str], Ran],
    nodes: Mapping[str, Node],
    names: Mapping[str, str],
) -> None:
    """Between devices: from the sender's operation to the receiver's."""
    for (tensor, to), each in sent.items():
        came = received.get((tensor, to))
        lane = f"{names[nodes[each.name].device]} > {names[to]}"
        lanes.add(lane, "send", tensor, each.start_s, each.end_s)
        if came is not None and came.end_s > each.end_s:
            start_s = max(came.start_s, each.end_s)
            lanes.add(lane, "receive", tensor, start_s, came.end_s)


def _offset(agreement: Agreement | None) -> Offset:
    """Of this process's clock to that of rank 0."""
    if agreement is None:
        return Offset(0.0, 0.0)
    announced, seen = [], []
    for _ in range(ROUNDS):
        announced.append(agreement.exchange("compare clocks", time.time()))
        seen.append(time.time())
    by_rank = agreement.exchange("compare clocks", [seen, _host()])
    rounds = [[own[i] for own, _ in by_rank] for i in range(ROUNDS)]
    hosts = [host for _, host in by_rank]
    return offsets(announced, rounds, hosts)[agreement.rank]


def _host() -> str:
    """What processes that read one clock have in common."""
    with contextlib.suppress(OSError):
        return Path(BOOT).read_text().strip()
    return socket.gethostname()
