"""The chief's connection to the tasks that serve it: one cluster at a time, told when it ends."""

import atexit
import gc
import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfparallel.coordination.probe import task_names
from tfparallel.coordination.serving import say_done, say_here
from tfparallel.coordination.timeouts import Timeouts
from tfparallel.coordination.waiting import wait_for_tasks
from tfparallel.internals import keep_traced_functions, variables_alive


def connect(
    tasks: Mapping[str, Sequence[str]],
    own_type: str,
    own_index: int,
    servers: Sequence[tuple[str, int]],
    timeouts: Timeouts,
    protocol: str = "grpc",
) -> None:
    """Waits for all servers and makes their devices this process's; they end when it ends.

    A second strategy on the same cluster finds it connected.

    Args:
        tasks: "host:port" of all tasks of each type, without those that work beside the cluster.
        own_type, own_index: this task.
        servers: the type and index of every other task.
        timeouts: how long to wait for them, at the start and at the end.
        protocol: of the servers.

    Raises:
        TimeoutError: naming the tasks that never came.
    """
    global _connected
    if _connected == tasks:
        return
    named = task_names(tasks, *tasks)
    wait_for_tasks(
        {f"{kind} {index}": named[f"{kind} {index}"] for kind, index in servers},
        timeouts.start_s,
        f"{own_type} {own_index}",
        "Timeouts.start_s",
    )
    # Without it, a client deletes remote tensors out of order with the calls that use them
    # ("Unable to find the relevant tensor remote_handle").
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    keep_traced_functions()
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec({kind: list(addresses) for kind, addresses in tasks.items()}),
        job_name=own_type,
        task_index=own_index,
        protocol=protocol,
    )
    if _connected is None:
        atexit.register(lambda: say_done(_servers_to_tell, timeouts.end_s / 2))
    _servers_to_tell[:] = [device_name(kind, index) for kind, index in servers]
    say_here(_servers_to_tell)
    _connected = tasks


def check_nothing_is_trained(strategy: str, speaker: str) -> None:
    """Refuses what a connection would cut off from its values, before others are waited for.

    Args:
        strategy: its name.
        speaker: this task.

    Raises:
        RuntimeError: for variables that were made before, naming some.
    """
    if _connected is not None:
        return
    gc.collect()
    if names := sorted(variables_alive()):
        raise RuntimeError(
            f"Expected {strategy} to be made before any variable: it connects TensorFlow to other "
            "processes, after which values of before cannot be read. Received: a process with "
            f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). Make the "
            f"strategy first, right after the imports; in a notebook, restart the kernel before. "
            f"({speaker} is speaking.)"
        )


def device_name(task_type: str, index: int, kind: str = "CPU", number: int = 0) -> str:
    """The full name of a device of a task."""
    return f"/job:{task_type}/replica:0/task:{index}/device:{kind}:{number}"


_connected: Mapping[str, Sequence[str]] | None = None
_servers_to_tell: list[str] = []
