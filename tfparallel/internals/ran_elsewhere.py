"""Which operations ran in other tasks of a cluster, whose servers answer a profiler.

Every `tf.distribute.Server` has TensorFlow's profiler as a service at its own address. It is asked
for so many seconds from now, not for a step: whoever asks runs steps meanwhile. Servers of TPUs
have it at another port (tensorflow/python/tpu/profiler/capture_tpu_profile.py).
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

# The addresses of the cluster that this process controls.
from tensorflow.python.eager import context

from tfparallel.internals.profile_planes import Profile, read_profile
from tfparallel.internals.ran_operations import OPTIONS

__all__ = ["Profiled", "Task", "addresses_elsewhere", "own_task", "repeated_while_profiled"]

Task = tuple[str, int]  # a job of the cluster, and a number in it
_OF_TPU = (":8470", ":8466")  # where a TPU's server listens, and where it answers a profiler
_FIRST_S = 0.5  # that servers are profiled for; twice as long until a whole call was within


class Profiled(NamedTuple):
    """A call that ran while servers were profiled.

    Attributes:
        start_s, end_s: of the call, seconds since 1970.
        profiles: of each task, of this call and of others, by the clock there.
    """

    start_s: float
    end_s: float
    profiles: dict[Task, Profile]


def own_task() -> Task:
    """Of this process, in the cluster that it is one of."""
    server = context.context().get_server_def()
    return server.job_name, server.task_index


def addresses_elsewhere(devices: Iterable[str]) -> dict[Task, str]:
    """Where others of the tasks that have these devices answer a profiler, by job and number."""
    server = context.context().get_server_def()
    if server is None:
        return {}
    by_task = {
        (job.name, number): address
        for job in server.cluster.job
        for number, address in job.tasks.items()
    }
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    named = {(spec.job, spec.task) for spec in specs} - {own_task()}
    return {task: by_task[task].replace(*_OF_TPU) for task in sorted(named & by_task.keys())}


def repeated_while_profiled(
    call: Callable[[], int], addresses: Mapping[Task, str], ahead_s: Mapping[Task, float]
) -> Profiled:
    """Calls again and again until all servers have been profiled during a whole call.

    Args:
        call: is run to its end each time; gives how much there is to see of it. Of several the last
            one is kept of which that is most.
        addresses: of the servers.
        ahead_s: by how much the clock of each is ahead of ours.

    Raises:
        tf.errors.OpError: for a server that does not answer.
    """
    seconds = _FIRST_S
    while True:
        calls = []
        with _profiles(addresses, seconds) as (asked, profiles):
            while not asked.done():
                start_s = time.time()
                seen = call()
                calls.append((seen, start_s, time.time()))
        begins = max(each.start_s - ahead_s[task] for task, each in profiles.items())
        ends = min(each.end_s - ahead_s[task] for task, each in profiles.items())
        whole = [each for each in calls if begins <= each[1] and each[2] <= ends]
        if whole:
            _, start_s, end_s = max(whole)
            return Profiled(start_s, end_s, profiles)
        seconds *= 2


@contextmanager
def _profiles(
    addresses: Mapping[Task, str], seconds: float
) -> Iterator[tuple[Future, dict[Task, Profile]]]:
    """What is done when the servers have been profiled; behind it, what they tell."""
    profiles: dict[Task, Profile] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(
            tf.profiler.experimental.client.trace,
            ",".join(f"grpc://{address}" for address in addresses.values()),
            folder,
            round(seconds * 1e3),
            num_tracing_attempts=1,
            options=OPTIONS,
        )
        yield asked, profiles
        asked.result(timeout=0)  # it is done
        files = {path.name: path for path in Path(folder).rglob("*.xplane.pb")}
        for task, address in addresses.items():
            profiles[task] = read_profile(files[f"{address.replace(':', '_')}.xplane.pb"])
