"""The cluster of a parameter server strategy, and this task's place in it."""

import tensorflow as tf

from tfparallel.coordination.connection import connect, device_name
from tfparallel.coordination.serving import serve
from tfparallel.coordination.timeouts import Timeouts

_SETUP = (
    "A parameter server strategy needs one chief, at least one worker and at least one ps: start "
    "the script with `tfparallel launch --standalone --workers 2 --ps 2 SCRIPT`, or set TF_CONFIG "
    "for every task."
)


class ParameterServerCluster:
    """The tasks of the cluster that a resolver describes.

    Raises:
        ValueError: for a cluster without chief, workers or parameter servers.
    """

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver | None):
        tasks = resolver.cluster_spec().as_dict() if resolver is not None else {}
        missing = [t for t in ("chief", "worker", "ps") if not tasks.get(t)]
        if missing:
            raise ValueError(f"{_SETUP} Received: a cluster without {', '.join(missing)}: {tasks}.")
        assert resolver is not None
        self.tasks: dict[str, list[str]] = {t: list(addresses) for t, addresses in tasks.items()}
        # An evaluator works on checkpoints, beside the cluster.
        self.spec = tf.train.ClusterSpec({t: tasks[t] for t in ("chief", "worker", "ps")})
        self.task_type, self.task_index = resolver.task_type, resolver.task_id
        self.protocol = resolver.rpc_layer or "grpc"
        self.num_workers, self.num_ps = len(tasks["worker"]), len(tasks["ps"])

    @property
    def is_server(self) -> bool:
        """Whether this task serves and computes nothing of its own."""
        return self.task_type in ("worker", "ps")

    def serve(self, timeouts: Timeouts) -> None:
        """Serves until the chief is done, and ends the process; workers and ps only."""
        serve(
            self.spec,
            self.task_type,
            self.task_index,
            self.tasks["chief"][0],
            timeouts,
            self.protocol,
        )

    def connect(self, timeouts: Timeouts) -> None:
        """Waits for all tasks and makes their devices ours; chief only.

        A second strategy on the same cluster finds it connected.
        """
        servers = [("ps", i) for i in range(self.num_ps)]
        servers += [("worker", i) for i in range(self.num_workers)]
        tasks = {kind: self.tasks[kind] for kind in ("chief", "worker", "ps")}
        connect(tasks, "chief", self.task_index, servers, timeouts, self.protocol)

    def device(self, task_type: str, index: int, kind: str = "CPU", number: int = 0) -> str:
        """The full name of a device of a task."""
        return device_name(task_type, index, kind, number)

    @property
    def chief_device(self) -> str:
        """The CPU of this process, on the chief."""
        return self.device("chief", 0)

    @property
    def ps_devices(self) -> tuple[str, ...]:
        """Where variables live."""
        return tuple(self.device("ps", i) for i in range(self.num_ps))

    def worker_devices(self) -> tuple[tuple[str, ...], ...]:
        """What each worker computes on: its GPUs, or its CPUs; once connected."""

        def devices(worker: int, kind: str) -> tuple[str, ...]:
            task = f"/job:worker/replica:0/task:{worker}/"
            names = [device.name for device in tf.config.list_logical_devices(kind)]
            return tuple(name for name in names if name.startswith(task))

        return tuple(devices(i, "GPU") or devices(i, "CPU") for i in range(self.num_workers))

    def describe(self, task_type: str, index: int) -> str:
        """A task as messages name it: "worker 1 (10.0.0.2:2222)"."""
        return f"{task_type} {index} ({self.tasks[task_type][index]})"
