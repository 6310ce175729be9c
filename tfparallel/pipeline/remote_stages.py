"""The processes of a pipeline that is more than one: the chief, and tasks that serve it.

    tfparallel launch --standalone --workers 3 train.py

    worker 0   runs the script, feeds the data, computes stage 0
    worker 1   serves: stage 1
    worker 2   serves: stage 2

What a stage makes goes straight to the process of the stage that takes it, by TensorFlow's own
sends and receives; the chief only starts every process's part of a step.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tfparallel.coordination.connection import check_nothing_is_trained, connect, device_name
from tfparallel.coordination.lost_tasks import speaks_of_lost_task, speaks_of_new_task
from tfparallel.coordination.probe import answering
from tfparallel.coordination.serving import serve
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.coordination.watch import always, watch_once
from tfparallel.internals import let_idle_threads_sleep
from tfparallel.segments.threads import has_one_thread

_FIND_S = 5.0  # after an error: how long to look for a task that does not answer


class StageLost(RuntimeError):
    """The process of a stage is gone or does not answer, and with it the stage's variables."""


class StageCluster:
    """The tasks of the cluster that a resolver describes, one behind another in the pipeline.

    The chief, if there is one, comes first, then the workers. The first task runs the script.

    Args:
        resolver: of the cluster, and of this task.

    Raises:
        ValueError: for tasks of other types, or if the resolver does not say which task this is.
    """

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver):
        tasks = resolver.cluster_spec().as_dict()
        if others := sorted(set(tasks) - {"chief", "worker"}):
            raise ValueError(
                "A pipeline is a chief and workers, or workers only: start the script with "
                "`tfparallel launch --standalone --workers 2 SCRIPT`, or set TF_CONFIG for every "
                f"task. Received: a cluster with {', '.join(others)}."
            )
        self.tasks = {kind: list(tasks[kind]) for kind in ("chief", "worker") if tasks.get(kind)}
        self._ranked = [(kind, i) for kind, own in self.tasks.items() for i in range(len(own))]
        self._protocol = resolver.rpc_layer or "grpc"
        self._own = (resolver.task_type, resolver.task_id)
        if self._own not in self._ranked:
            raise ValueError(
                "A cluster resolver must say which task this process is. Received: task "
                f"{self._own} of {self.tasks}. Pass task_type and task_id to the resolver, or set "
                "TF_CONFIG."
            )
        self._stages_of: dict[tuple[str, int], list[int]] = {}

    @property
    def is_chief(self) -> bool:
        """Whether this task runs the script; the others serve it."""
        return self._own == self._ranked[0]

    def check_nothing_is_trained(self, strategy: str) -> None:
        """Refuses variables of before, in every task. For errors, see the function."""
        check_nothing_is_trained(strategy, " ".join(map(str, self._own)))

    def serve(self, timeouts: Timeouts) -> NoReturn:
        """Serves until the chief is done, and ends this process; for all but the chief."""
        kind, index = self._own
        spec, chief = tf.train.ClusterSpec(self.tasks), self._address(self._ranked[0])
        serve(spec, kind, index, chief, timeouts, self._protocol)

    def connect(self, timeouts: Timeouts) -> None:
        """Waits for all tasks and makes their devices ours; chief only."""
        if has_one_thread():  # which has better to do than to look for work
            let_idle_threads_sleep()
        servers = self._ranked[1:]
        connect(self.tasks, *self._own, servers, timeouts, self._protocol)
        addresses = {f"{kind} {i}": self._address((kind, i)) for kind, i in servers}
        if timeouts.stage_s is not None:
            watch_once(addresses, timeouts.stage_s, always, cuts_all=True)

    def devices(self) -> list[str]:
        """The GPUs of every task, or its CPU where it has none; once connected."""
        gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
        found = []
        for kind, index in self._ranked:
            own = [gpu for gpu in gpus if gpu.startswith(f"/job:{kind}/replica:0/task:{index}/")]
            found += own or [device_name(kind, index)]
        return found

    def name_stages(self, devices: Sequence[str]) -> None:
        """Tells on which of `devices` each stage is, for messages."""
        for stage, device in enumerate(devices):
            spec: Any = tf.DeviceSpec.from_string(device)
            self._stages_of.setdefault((spec.job, spec.task), []).append(stage)

    @contextlib.contextmanager
    def reports_lost_stages(self) -> Iterator[None]:
        """Within it, TensorFlow's errors become `StageLost` where a task is not there."""
        try:
            yield
        except tf.errors.OpError as error:
            if not (lost := self._lost(error)):
                raise
            raise StageLost(
                "Expected the processes of all stages to live as long as the training. Received: "
                f"{lost}, with the variables of its layers. Start the job again; with the backup "
                f"callback it resumes. ({' '.join(map(str, self._own))} is speaking.)"
            ) from error

    def _lost(self, error: tf.errors.OpError) -> str:
        """The tasks that are not there, in words; "" if all are."""
        servers = {self._described(task): self._address(task) for task in self._ranked[1:]}
        deadline_s = time.monotonic() + _FIND_S
        while time.monotonic() < deadline_s:
            there = answering(servers)
            if silent := [name for name in servers if name not in there]:
                return f"no answer from {', '.join(silent)}"
            named = re.search(r"remote target /job:(\w+)/replica:0/task:(\d+)", str(error))
            if named and speaks_of_new_task(error):
                return f"a new process as {self._described((named[1], int(named[2])))}"
            if not speaks_of_lost_task(error):
                break
            time.sleep(_FIND_S / 10)
        return ""

    def _described(self, task: tuple[str, int]) -> str:
        """A task as messages name it: "stage 1 (worker 1, 10.0.0.2:2222)"."""
        stages = self._stages_of.get(task, [])
        if not stages:  # a place of layers in parts
            return f"{task[0]} {task[1]} ({self._address(task)})"
        what = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        return f"{what} ({task[0]} {task[1]}, {self._address(task)})"

    def _address(self, task: tuple[str, int]) -> str:
        return self.tasks[task[0]][task[1]]
