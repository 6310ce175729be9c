"""Workers that add up arrays around a ring: `communication.ring.Ring` on simulated connections.

Checked: whoever gets a sum gets the right one, to the bit; who does not gets `PeerLostError`, after
no longer than its limits; nobody is blamed who is there while another has gone.
"""

from unittest import mock

import numpy as np

from tests.simulation.choices import Choices
from tests.simulation.faults import FaultInjector, Faults
from tests.simulation.network import Network
from tests.simulation.world import Process, Violation, World
from tfparallel.communication.doubling import all_reduce_exchanges
from tfparallel.communication.neighbours import Neighbours, PeerLostError
from tfparallel.communication.ring import Ring
from tfparallel.coordination.patience import Silence

_TIMEOUT_S, _PATIENCE_S, _ASK_EVERY_S = 30.0, 8.0, 2.0
_SLACK_S = 10.0  # between a look and the next, and what waits behind another's end


def run(choices: Choices) -> World:
    """A schedule."""
    world = World(choices)
    network = Network(world)
    num_workers = 2 + choices.below(3)
    num_steps = 1 + choices.below(4)
    ring = _Workers(world, network, num_workers, num_steps)
    faults = Faults(
        kill=0.002, stop=0.003, jump=0.002, power=0.0, most=(0, 1, 2, 4)[choices.below(4)]
    )
    FaultInjector(world, faults, lambda process: process in ring.processes)
    for rank in range(num_workers):
        ring.start(rank)
    sizes = {"SEGMENT_BYTES": 64, "_SENT_AT_ONCE_BYTES": 200}  # so that both ways are gone
    with mock.patch.multiple("tfparallel.communication.ring", **sizes):
        world.run()
    return world


class _Workers:
    """All of one job."""

    def __init__(self, world: World, network: Network, num_workers: int, num_steps: int):
        self._world, self._network = world, network
        self._num_workers, self._num_steps = num_workers, num_steps
        self.processes: list[Process] = []
        below = world.choices.below
        self._kinds = [("sum", "rows", "scatter")[below(3)] for _ in range(num_steps)]
        self._sizes = [(1, 3, 40, 300)[below(4)] for _ in range(num_steps)]
        self._cuts_at = below(4 * num_steps) if below(8) == 7 else -1
        self._small_bytes = (-1, 200, 2000)[below(3)]  # beyond a socket's buffer
        self._timeout_s = (_TIMEOUT_S, None)[below(2)]  # with none, liveness alone ends a wait

    def start(self, rank: int) -> None:
        process = self._world.process(f"rank {rank}", lambda process: self._main(process, rank))
        self.processes.append(process)
        if len(self.processes) == self._num_workers:
            self._connect()

    def _connect(self) -> None:
        ends = [
            self._network.connected(process, self.processes[(rank + 1) % self._num_workers])
            for rank, process in enumerate(self.processes)
        ]
        self._to_next = [end for end, _ in ends]
        self._from_previous = [ends[rank - 1][1] for rank in range(self._num_workers)]
        self._partners: list[dict] = [{} for _ in self.processes]
        for rank, process in enumerate(self.processes):
            for other in {e.partner for e in all_reduce_exchanges(rank, self._num_workers)}:
                if other > rank:
                    own_end, other_end = self._network.connected(process, self.processes[other])
                    self._partners[rank][other], self._partners[other][rank] = own_end, other_end

    def _values(self, rank: int, step: int) -> np.ndarray:
        size, kind = self._sizes[step], self._kinds[step]
        rng = np.random.default_rng(1000 * rank + step)
        shape = {"sum": (size,), "rows": (1 + rank, size), "scatter": (self._num_workers, size)}
        return rng.normal(size=shape[kind]).astype("float32")

    def _main(self, process: Process, rank: int) -> None:
        watch = _Watch(self._network, process, self.processes)
        neighbours = Neighbours(
            rank,
            self._num_workers,
            self._to_next[rank],
            self._from_previous[rank],
            self._timeout_s,
            watch,
            machine=process.machine,
            partners=self._partners[rank],
        )
        ring = Ring(neighbours, self._small_bytes)
        process.machine.start(watch.ask, "watch")
        results: list[np.ndarray] = []
        began_s = self._world.now_s
        try:
            for step, kind in enumerate(self._kinds):
                if self._cuts_at == self._num_workers * step + rank:
                    self._world.note("cut off")
                    self._network.cut.add(process)
                began_s = self._world.now_s
                reduce = {"sum": ring.all_reduce, "rows": ring.all_gather}
                reduce["scatter"] = ring.reduce_scatter
                results.append(reduce[kind](self._values(rank, step)))
                self._check(rank, step, results[-1])
        except PeerLostError as error:
            self._world.note(f"gives up: {error}")
            self._check_limits(process, began_s, str(error))
        finally:
            neighbours.close.detach()  # not by the collector of garbage, at a time of its own
        neighbours._sender.stop()

    def _check(self, rank: int, step: int, result: np.ndarray) -> None:
        values = [self._values(each, step) for each in range(self._num_workers)]
        kind = self._kinds[step]
        if kind == "rows":
            is_right = np.array_equal(result, np.concatenate(values))
        else:
            total = np.sum(values, axis=0, dtype="float64")
            expected = total[rank] if kind == "scatter" else total
            is_right = np.allclose(result, expected, atol=1e-5)
        if not is_right:
            self._world.fail(Violation(f"rank {rank} has the wrong {kind} in step {step}"))

    def _check_limits(self, process: Process, began_s: float, text: str) -> None:
        waited_s = self._world.now_s - began_s
        stops_s = sum(each.was_stopped_s for each in self.processes)
        if waited_s > _TIMEOUT_S + _PATIENCE_S + stops_s + _SLACK_S:
            self._world.fail(Violation(f"waited {waited_s:.0f} s: {text}"))
        if "speaking" not in text or not any(
            each.name.capitalize() in text or each.name in text for each in self.processes
        ):
            self._world.fail(Violation(f"an error that names nobody: {text}"))
        disturbed = [p for p in self.processes if p.is_dead or p.was_stopped_s or p.clock_s]
        if not disturbed and not self._network.cut:
            self._world.fail(Violation(f"nothing was wrong, and yet: {text}"))


class _Watch:
    """`coordination.watch.Watch` on the simulated network: its rule is `patience.Silence`."""

    patience_s = _PATIENCE_S

    def __init__(self, network: Network, own: Process, processes: list[Process]):
        self._network, self._own = network, own
        self._others = {each.name: each for each in processes if each is not own}
        self._lost: list[str] = []

    def ask(self) -> None:
        machine = self._own.machine
        silence = Silence(self._others, machine.now_s())
        while True:
            there = self._there()
            silence.heard(machine.now_s(), there)
            self._lost = silence.longer_than(self.patience_s)
            machine.sleep(_ASK_EVERY_S)

    def lost(self) -> list[str]:
        return self._lost

    def absent(self) -> list[str]:
        there = self._there()
        return [name for name in self._others if name not in there]

    def _there(self) -> list[str]:
        is_answering = self._network.is_answering
        return [n for n, each in self._others.items() if is_answering(self._own, each)]
