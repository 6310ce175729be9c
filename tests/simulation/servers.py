"""A chief, its workers and parameter servers: each step's update once, whoever is lost meanwhile.

`WorkerPool`, `StalenessBound`, `RepeatedSteps` and `Recovery` are the package's. Played is what
runs in TensorFlow: calls of functions on workers and servers, and the lock on a server by which
`fence.py` orders them.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tensorflow as tf

from tests.simulation.choices import Choices
from tests.simulation.faults import FaultInjector, Faults
from tests.simulation.fit import next_hash
from tests.simulation.network import Network
from tests.simulation.world import Process, Violation, World
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.parameter_server import recovery as recovery_module
from tfparallel.parameter_server.recovery import Recovery, ServerLost, WorkerLost
from tfparallel.parameter_server.repeated_steps import RepeatedSteps
from tfparallel.parameter_server.worker_lanes import Lane, lanes_of_workers
from tfparallel.parameter_server.worker_pool import WorkerPool

TIMEOUTS = Timeouts(worker_s=20.0, all_workers_s=15.0, ps_s=8.0)
_CUT_S = 10.0  # after which calls to a silent task fail
_POLL_S, _BUSY_S = 0.1, 0.3
_LIMIT_S = 1000.0  # that twelve steps and eight faults may take, if every wait has its limit


def run(choices: Choices) -> World:
    """A schedule, in either mode."""
    world = World(choices, _LIMIT_S)
    is_async = not choices.below(2)
    cluster = _Cluster(world, num_workers=1 + choices.below(3), num_ps=1 + choices.below(2))
    most = (0, 1, 3, 8)[choices.below(4)]
    faults = Faults(kill=0.004, stop=0.004, jump=0.002, power=0.0, most=most)
    cluster.faults = FaultInjector(world, faults, cluster.may_be_hit)
    train = _asynchronously if is_async else _in_step
    with cluster.probed():
        cluster.start(lambda chief: train(world, cluster, chief))
        world.run()
    return world


class _Cluster:
    """The tasks by address, and what `ServerCluster` tells of them."""

    chief_device, ps_devices = "chief", ("ps 0",)
    faults: FaultInjector
    recovery: Recovery  # of asynchronous training

    def __init__(self, world: World, num_workers: int, num_ps: int):
        self.world, self.network = world, Network(world)
        self.num_workers, self.num_ps = num_workers, num_ps
        self.tasks = {
            "worker": [f"worker-{i}:1" for i in range(num_workers)],
            "ps": [f"ps-{i}:1" for i in range(num_ps)],
        }
        self.processes: dict[str, Process] = {}
        self.is_done = False
        # Servers hold what cannot be had again: their loss ends the training, and is hit seldom.
        self._servers_fail = world.choices.below(4) == 3
        self.workers_return = world.choices.below(4) != 3
        self._operator_s = (2.0, 40.0)[world.choices.below(2)]

    def describe(self, kind: str, index: int) -> str:
        return f"{kind} {index} ({self.tasks[kind][index]})"

    def start(self, train: Any) -> None:
        for address in [*self.tasks["worker"], *self.tasks["ps"]]:
            self._start_task(address)
        self.chief = self.world.process("chief", lambda process: self._chief(process, train))
        self.world.process("operator", lambda process: self._operate())

    def _start_task(self, address: str) -> None:
        self.processes[address] = self.world.process(address, self._serve)

    def _serve(self, process: Process) -> None:
        while not self.world.wait(lambda: self.is_done, _BUSY_S):
            pass  # what it does for itself: each request is a moment at which it may be hit

    def _chief(self, process: Process, train: Any) -> None:
        try:
            train(process)
        finally:
            self.is_done = True

    def _operate(self) -> None:
        """Starts workers again, after a while."""
        while not self.is_done:
            self.world.sleep(self._operator_s)
            for address in self.tasks["worker"]:
                if self.workers_return and self.processes[address].is_over:
                    self._start_task(address)

    def may_be_hit(self, process: Process) -> bool:
        """Chief: stopped and its clock; the operator never; servers in some schedules."""
        name = process.name
        if process not in self.processes.values():
            return False
        return name.startswith("worker") or self._servers_fail

    def are_all_there(self) -> bool:
        """Whether every task runs."""
        tasks = self.processes.values()
        return all(not t.is_over and self.world.now_s >= t.stopped_until_s for t in tasks)

    def is_there(self, address: str) -> bool:
        """Whether a task answers the chief."""
        return self.network.is_answering(self.chief, self.processes[address])

    @contextlib.contextmanager
    def probed(self) -> Iterator[None]:
        """Within it, `Recovery` asks this cluster, on the chief's clock."""

        def answering(addresses: dict[str, str]) -> list[str]:
            return [name for name, address in addresses.items() if self.is_there(address)]

        def is_listening(address: str) -> bool:
            self.world.request()
            return not self.processes[address].is_over

        machine = SimpleNamespace(
            monotonic=lambda: self.chief.machine.now_s(),
            sleep=lambda seconds: self.world.sleep(seconds),
        )
        names = {
            "answering": answering,
            "is_answering": self.is_there,
            "is_listening": is_listening,
            "time": machine,
            "context": SimpleNamespace(
                context=lambda: SimpleNamespace(update_server_def=lambda definition: None),
                get_server_def=lambda: None,
            ),
            "look": lambda wait, whom: wait.look(self.chief.machine.now_s(), whom),
        }
        with mock.patch.multiple(recovery_module, **names):
            yield

    def call(self, address: str, work_s: float) -> None:
        """A call of the chief that runs on a task for so long; fails as TensorFlow's do."""
        process, silent_s, left_s = self.processes[address], 0.0, work_s
        while True:
            self.world.sleep(min(_POLL_S, left_s) if left_s > 0 else _POLL_S)
            if process.is_over:
                raise tf.errors.UnavailableError(None, None, f"{address}: connection reset")
            if self.world.now_s < process.stopped_until_s:
                silent_s += _POLL_S
                if silent_s > _CUT_S:
                    raise tf.errors.UnavailableError(None, None, f"{address}: connection cut")
                continue
            left_s -= _POLL_S
            if left_s <= 0:
                return


def _work_s(world: World) -> float:
    return (0.05, 0.2, 1.0, 6.0)[world.choices.below(4)]


# ---- asynchronous --------------------------------------------------------------------------------


class _AsyncStep:
    """`RemoteStep`: adds its batch to what the servers have."""

    has_effects = True

    def __init__(self, cluster: _Cluster, lanes: tuple[Lane, ...], bound: int | None):
        self._cluster, self._lanes, self._bound = cluster, lanes, bound
        self._has_run: set[tuple] = set()  # calls, of a lane since its worker was let in last
        self._running: list[tuple] = []  # workers, and whether a call is a first one
        self.applied: list[int] = []
        self.kept: list[int] = []
        self._is_applying = False

    def call(self, lane: int, batch: int) -> int:
        return lane

    def compute(self, lane: int, device: str, batch: int) -> tuple:
        read_at, worker = len(self.applied), self._lanes[lane].worker
        call = (lane, self._cluster.recovery.num_losses)
        running = (worker, call not in self._has_run)
        others = [is_first for other, is_first in self._running if other == worker]
        if others and (running[1] or any(others)):
            self._cluster.world.fail(Violation(f"worker {worker} runs a first call and another"))
        self._running.append(running)
        try:
            address = self._cluster.tasks["worker"][worker]
            self._cluster.call(address, _work_s(self._cluster.world))
            self._has_run.add(call)
        finally:
            self._running.remove(running)
        return batch, [batch, read_at], [batch]

    def fetch(self, device: str, outputs: int) -> int:
        self._cluster.world.request()
        return outputs

    def apply(self, device: str, effects: list) -> None:
        world = self._cluster.world
        batch, read_at = effects
        if self._is_applying:
            world.fail(Violation("two updates are applied at a time"))
        self._is_applying = True
        try:
            self._cluster.call(self._cluster.tasks["ps"][0], 0.05)
            if self._bound is not None and len(self.applied) - read_at > self._bound:
                world.fail(Violation(f"an update is {len(self.applied) - read_at} steps stale"))
            if batch in self.applied:
                world.fail(Violation(f"the update of batch {batch} is applied twice"))
            self.applied.append(batch)
        finally:
            self._is_applying = False

    def keep(self, worker: int, kept: list) -> None:
        self.kept += kept


def _asynchronously(world: World, cluster: _Cluster, chief: Process) -> None:
    bound = (None, 0, 1, 3)[world.choices.below(4)]
    devices = [[f"CPU:{i}" for i in range(1 + world.choices.below(3))]] * cluster.num_workers
    lanes = lanes_of_workers(devices)
    cluster.recovery = Recovery(cluster, TIMEOUTS)  # type: ignore[arg-type]
    executor = SimpleNamespace(wait=world.request, clear_error=lambda: None)
    pool = WorkerPool(
        cluster,  # type: ignore[arg-type]
        lanes,
        bound,
        TIMEOUTS,
        chief.machine,
        cluster.recovery,
        lambda: executor,
    )
    remote, num_steps = _AsyncStep(cluster, lanes, bound), 4 + world.choices.below(9)

    def train_on(batches: range) -> None:
        steps = []
        for batch in batches:
            arguments = SimpleNamespace(tensors=lambda hosts, batch=batch: batch)
            steps.append(pool.submit(remote, arguments))  # type: ignore[arg-type]
        pool.join()
        for what, done in (("applied", remote.applied), ("remembered", remote.kept)):
            if sorted(batch for batch in done if batch in batches) != list(batches):
                world.fail(Violation(f"of {batches} these were {what}: {done}"))
        if [step.outputs for step in steps] != list(batches):
            world.fail(Violation("a step has the outputs of another"))

    try:
        train_on(range(num_steps))
    except ServerLost as error:
        _check_end(world, cluster, error)
    except TimeoutError as error:  # nobody was left; whoever waits for them may go on
        _check_end(world, cluster, error)
        if cluster.workers_return:
            is_whole = world.wait(cluster.are_all_there, _LIMIT_S / 2)
            left = cluster.faults.left
            try:
                train_on(range(num_steps, 2 * num_steps))
            except (ServerLost, TimeoutError) as again:
                if is_whole and cluster.faults.left == left:
                    world.fail(Violation(f"nothing went wrong since {error}, and it ends: {again}"))


def _check_end(world: World, cluster: _Cluster, error: BaseException) -> None:
    """A training that ends names a task that was hit."""
    hit = [each for each in world.processes if each.is_dead or each.was_stopped_s]
    named = [each for each in hit if each.name in str(error)]
    if not named:
        world.fail(Violation(f"an error that names nobody who was hit: {error}"))


# ---- in step -------------------------------------------------------------------------------------


class _Servers:
    """Variables, one a server; their copies; the lock and the generation of each (`fence.py`)."""

    def __init__(self, world: World, cluster: _Cluster):
        self._world, self._cluster = world, cluster
        self.values = [0] * cluster.num_ps
        self.copies = [0] * cluster.num_ps
        self.generations = [0] * cluster.num_ps
        self.generation = 0
        self.taken_by: Any = lambda: None

    def raise_generation(self) -> None:
        self.generation += 1
        for i in range(len(self.values)):
            self._cluster.call(self._cluster.tasks["ps"][i], 0.05)
            self.generations[i] = self.generation

    # `VariableCopies`

    def cover(self, handles: Any) -> bool:
        return True

    def take(self) -> None:
        for i, value in enumerate(self.values):
            self._cluster.call(self._cluster.tasks["ps"][i], 0.05)
            self.copies[i] = value

    def restore(self) -> None:
        for i, copy in enumerate(self.copies):
            self._cluster.call(self._cluster.tasks["ps"][i], 0.05)
            self.values[i] = copy

    def update(self, server: int, generation: int, batch: int) -> None:
        """What a step does on a server, under its lock."""
        if generation >= self.generations[server]:
            self.values[server] = next_hash(self.values[server], batch)

    def step(self, generation: int, batch: int) -> int:
        """A step of all workers: some of it may be done, or come late, though it fails."""
        world, cluster = self._world, self._cluster
        for address in cluster.tasks["worker"]:
            try:
                cluster.call(address, _work_s(world) / 5)
            except tf.errors.OpError:
                self._leave_something(generation, batch)
                raise
        for server in range(len(self.values)):
            cluster.call(cluster.tasks["ps"][server], 0.05)
            self.update(server, generation, batch)
        return batch

    def _leave_something(self, generation: int, batch: int) -> None:
        below = self._world.choices.below
        for server in range(len(self.values)):
            kind = below(3)
            if kind == 1:
                self.update(server, generation, batch)
            elif kind == 2:

                def late(server: int = server) -> None:
                    self._world.sleep((0.5, 5.0, 30.0)[below(3)])
                    self.update(server, generation, batch)

                process = self._cluster.processes[self._cluster.tasks["ps"][server]]
                process.machine.start(late, "what comes late")


def _in_step(world: World, cluster: _Cluster, chief: Process) -> None:
    servers = _Servers(world, cluster)
    recovery = Recovery(cluster, TIMEOUTS)  # type: ignore[arg-type]
    every, num_steps = 1 + world.choices.below(4), 3 + world.choices.below(8)
    steps = RepeatedSteps(
        servers,  # type: ignore[arg-type]
        recovery,
        every,
        contextlib.nullcontext,
        chief.machine,
        servers,  # type: ignore[arg-type]
    )
    try:
        with recovery.of_all():
            for batch in range(num_steps):
                output = steps.run(servers.step, lambda batch=batch: batch)
                if output != batch:
                    world.fail(Violation(f"step {batch} has the outputs of step {output}"))
                expected = _value_after(batch + 1)
                if servers.values != [expected] * cluster.num_ps:
                    world.fail(Violation(f"after step {batch} a variable is that of no such run"))
    except (ServerLost, WorkerLost) as error:
        _check_end(world, cluster, error)


def _value_after(num_steps: int) -> int:
    value = 0
    for step in range(num_steps):
        value = next_hash(value, step)
    return value
