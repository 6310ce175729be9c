"""The cluster this process belongs to, checked in full before a collective can hang on it.

The description comes from `TF_CONFIG`, the environment variable that schedulers and
`tfparallel launch` set:

    {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
     "task": {"type": "worker", "index": 0}}
"""

import contextlib
import contextvars
import ipaddress
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from tfparallel.mistakes import MistakesError

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

# "host:port"; an IPv6 host stands in brackets, since it has colons of its own.
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_ADDRESS_FORM = (
    '"host:port" with a port from 1 to 65535, for example "10.0.0.1:2222" or "[::1]:2222"'
)


class ClusterConfigError(MistakesError):
    """A cluster description with at least one mistake.

    Attributes:
        problems: every mistake, each as "dotted.path: expected this. Received: that."
    """


class ClusterConfig(BaseModel):
    """All tasks of a cluster, and which of them this process is.

    Raises `ClusterConfigError`, listing every mistake, when it is built from a wrong description.

    Attributes:
        cluster: the addresses, "host:port", of the tasks of each type.
        task_type: "chief", "worker", "ps" or "evaluator".
        task_index: the position of this task in `cluster[task_type]`.
        rpc_layer: the protocol between tasks; None is TensorFlow's default, gRPC.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: dict[str, tuple[str, ...]]
    task_type: str
    task_index: int
    rpc_layer: str | None = None

    def __init__(
        self,
        *,
        cluster: Mapping[str, Sequence[str]],
        task_type: str,
        task_index: int | str,
        rpc_layer: str | None = None,
    ):
        config = {
            "cluster": cluster,
            "task": {"type": task_type, "index": task_index},
            "rpc_layer": rpc_layer,
        }
        if problems := list(_cluster_config_problems(config)):
            raise ClusterConfigError(problems, source="The cluster description")
        super().__init__(
            cluster=cluster, task_type=task_type, task_index=int(task_index), rpc_layer=rpc_layer
        )

    @property
    def num_workers(self) -> int:
        """How many tasks train together: the chief, if there is one, and the workers."""
        return len(self._training_addresses)

    @property
    def rank(self) -> int | None:
        """The position among chief and workers, chief first; None for a ps or an evaluator."""
        if self.task_type == "chief":
            return 0
        if self.task_type == "worker":
            return len(self.cluster.get("chief", ())) + self.task_index
        return None

    @property
    def is_chief(self) -> bool:
        """Whether this task does what one task only may do, such as writing the checkpoint.

        An evaluator is no chief here. `tf.distribute` says that it is, of a cluster of its own.
        """
        return self.rank == 0

    @property
    def address(self) -> str | None:
        """The address of this task; None for an evaluator that `cluster` does not list."""
        addresses = self.cluster.get(self.task_type)
        return addresses[self.task_index] if addresses else None

    @property
    def peers(self) -> tuple[str, ...]:
        """The addresses of all other training tasks, in the order of their ranks."""
        return tuple(a for a in self._training_addresses if a != self.address)

    @property
    def _training_addresses(self) -> tuple[str, ...]:
        return self.cluster.get("chief", ()) + self.cluster.get("worker", ())

    def to_tf_config(self) -> str:
        """The JSON text for `TF_CONFIG` that `read_tf_config` turns back into this object."""
        config: dict[str, Any] = {
            "cluster": {task_type: list(tasks) for task_type, tasks in self.cluster.items()},
            "task": {"type": self.task_type, "index": self.task_index},
        }
        if self.rpc_layer is not None:
            config["rpc_layer"] = self.rpc_layer
        return json.dumps(config)

    def cluster_resolver(self) -> object:
        """This cluster as a `tf.distribute.cluster_resolver.SimpleClusterResolver`.

        Does not initialize TensorFlow's context, so devices can still be configured afterwards;
        split GPUs into logical ones before, because GPUs are counted here.
        """
        import tensorflow as tf

        # MultiWorkerMirroredStrategy counts GPUs itself for a TFConfigClusterResolver only. From
        # any other resolver it takes this number, and falls back to the CPU when there is none.
        num_gpus = sum(
            len(tf.config.get_logical_device_configuration(gpu) or [gpu])
            for gpu in tf.config.get_visible_devices("GPU")
        )
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({t: list(addresses) for t, addresses in self.cluster.items()}),
            task_type=self.task_type,
            task_id=self.task_index,
            num_accelerators={"GPU": num_gpus},
            rpc_layer=self.rpc_layer,
        )


_is_ignored = contextvars.ContextVar("ignores TF_CONFIG", default=False)


@contextlib.contextmanager
def without_tf_config() -> Iterator[None]:
    """Within it a job is not seen: what is made takes the devices of this process."""
    token = _is_ignored.set(True)
    try:
        yield
    finally:
        _is_ignored.reset(token)


def forget_blank_tf_config() -> None:
    """Takes a blank `TF_CONFIG` out of the environment: TensorFlow would read it as broken JSON."""
    if "TF_CONFIG" in os.environ and not os.environ["TF_CONFIG"].strip():
        del os.environ["TF_CONFIG"]


def is_started_by_horovodrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank of Horovod, not within `without_tf_config`."""
    return "HOROVOD_RANK" in environ and not _is_ignored.get()


def read_tf_config(environ: Mapping[str, str] = os.environ) -> ClusterConfig | None:
    """Read and check `TF_CONFIG`.

    Keys that TensorFlow ignores ("environment", "job", ...) are ignored here too.

    Args:
        environ: where to look the variable up; the environment of this process by default.

    Returns:
        The cluster. None when this process trains alone: `TF_CONFIG` is unset, blank or `{}`, or
        has no "cluster" (or an empty one), as platforms set it for jobs of one process.

    Raises:
        ClusterConfigError: naming all mistakes. A description without "cluster" whose task index
            is above 0 is one: the other tasks that it implies are nowhere to be found, and
            training alone, next to them, would go unnoticed.
    """
    text = environ.get("TF_CONFIG", "")
    if not text.strip() or _is_ignored.get():
        return None
    config = _parse_json_object(text)
    check = _cluster_config_problems if config.get("cluster", {}) != {} else _alone_problems
    if problems := list(check(config)):
        raise ClusterConfigError(problems, source=f"TF_CONFIG={_shortened(text)}")
    if not config.get("cluster"):
        return None
    return ClusterConfig(
        cluster=config["cluster"],
        task_type=config["task"]["type"],
        task_index=config["task"]["index"],
        rpc_layer=config.get("rpc_layer"),
    )


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        problem = (
            f"expected JSON, with double quotes around names. Received: text that stops being JSON "
            f"at line {error.lineno}, column {error.colno} ({error.msg}), before "
            f"{text[error.pos : error.pos + 20]!r}."
        )
        raise ClusterConfigError([problem], source=f"TF_CONFIG={_shortened(text)}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; deep nesting
        problem = f"expected JSON that can be read. Received: {error}."
        raise ClusterConfigError([problem], source=f"TF_CONFIG={_shortened(text)}") from None
    if not isinstance(config, dict):
        problem = f'expected an object, {{"cluster": ..., "task": ...}}. Received: {config!r}.'
        raise ClusterConfigError([problem], source=f"TF_CONFIG={_shortened(text)}")
    return config


def _shortened(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _alone_problems(config: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with a description that has no cluster."""
    if "sparseCluster" in config:
        yield (
            'cluster: expected all addresses of the job. Received: "sparseCluster", which lists '
            "only some. Turn dynamic workers (enableDynamicWorker) off in the TFJob."
        )
        return
    task = config.get("task", {})
    if not isinstance(task, Mapping):
        yield f'task: expected an object, {{"type": ..., "index": ...}}. Received: {task!r}.'
    elif task.get("index") is not None and _as_int(task["index"]) != 0:
        yield (
            f'task.index: expected 0, as there is no "cluster". Received: {task["index"]!r}. '
            'List the addresses of all tasks under "cluster".'
        )


def _cluster_config_problems(config: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with a description that has a cluster, in the order it is written."""
    cluster = config["cluster"]
    if isinstance(cluster, Mapping):
        yield from _cluster_problems(cluster)
    else:
        yield (
            "cluster: expected an object from task type to a list of addresses. "
            f"Received: {cluster!r}."
        )
        cluster = None
    task = config.get("task")
    if isinstance(task, Mapping):
        yield from _task_problems(task, cluster)
    else:
        received = repr(task) if "task" in config else "nothing"
        yield f'task: expected an object, {{"type": ..., "index": ...}}. Received: {received}.'
    rpc_layer = config.get("rpc_layer")
    if rpc_layer is not None and not isinstance(rpc_layer, str):
        yield f'rpc_layer: expected a name such as "grpc". Received: {rpc_layer!r}.'


def _cluster_problems(cluster: Mapping[str, object]) -> Iterator[str]:
    first_seen: dict[tuple[str, int], str] = {}
    for task_type, addresses in cluster.items():
        path = f"cluster.{task_type}"
        yield from _task_type_problems(path, task_type)
        if not isinstance(addresses, (list, tuple)):
            yield f'{path}: expected a list of "host:port". Received: {addresses!r}.'
            continue
        if not addresses:
            yield f"{path}: expected at least one address. Received: []. Leave the entry out."
        if task_type in ("chief", "evaluator") and len(addresses) > 1:
            yield f"{path}: expected one address at most. Received: {len(addresses)}."
        for index, address in enumerate(addresses):
            key = _parse_address(address)
            if key is None:
                yield f"{path}.{index}: expected {_ADDRESS_FORM}. Received: {address!r}."
            elif key in first_seen:
                yield (
                    f"{path}.{index}: expected an address of its own for every task. "
                    f"Received: {address!r}, which is also {first_seen[key]}."
                )
            else:
                first_seen[key] = f"{path}.{index}"
    if not set(cluster) - {"ps"}:
        received = "parameter servers only" if cluster else "an empty object"
        yield f"cluster: expected a chief or a worker. Received: {received}."


def _parse_address(address: object) -> tuple[str, int] | None:
    """Host and port in a form that is equal for equal addresses; None for anything malformed."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 1 <= int(match["port"]) <= 65535:
        return None
    host = match["host"].lower()
    if host.startswith("["):
        try:
            host = str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            return None
    return host, int(match["port"])


def _task_problems(
    task: Mapping[str, object], cluster: Mapping[str, object] | None
) -> Iterator[str]:
    task_type: Any = task.get("type")
    known_type = task_type in TASK_TYPES
    if "type" not in task:
        yield f"task.type: expected one of {', '.join(TASK_TYPES)}. Received: nothing."
    yield from _task_type_problems("task.type", task_type) if "type" in task else ()
    # An evaluator may work beside the cluster: Kubernetes operators leave it out.
    if known_type and task_type != "evaluator" and cluster is not None and task_type not in cluster:
        listed = ", ".join(map(str, cluster))
        yield f"task.type: expected a type that cluster lists ({listed}). Received: {task_type!r}."

    index = _as_int(task.get("index"))
    addresses = cluster.get(task_type) if cluster is not None and known_type else None
    if "index" not in task:
        yield "task.index: expected an integer from 0. Received: nothing."
    elif index is None or index < 0:
        yield f"task.index: expected an integer from 0. Received: {task['index']!r}."
    elif isinstance(addresses, (list, tuple)) and addresses and index >= len(addresses):
        yield (
            f"task.index: expected an index below {len(addresses)}, the number of addresses in "
            f"cluster.{task_type}. Received: {index}."
        )


def _task_type_problems(path: str, task_type: object) -> Iterator[str]:
    if task_type in TASK_TYPES:
        return
    old_name = " master is the old name of chief: rename it." if task_type == "master" else ""
    yield f"{path}: expected one of {', '.join(TASK_TYPES)}. Received: {task_type!r}.{old_name}"


def _as_int(value: object) -> int | None:
    """The integer that `value` is, or spells in digits as some platforms do; None otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    return None
