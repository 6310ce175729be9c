"""What servers ran while this process, which controls them, ran a step; all on its clock."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import tensorflow as tf

from tfparallel.internals.profile_planes import Ran
from tfparallel.internals.ran_elsewhere import Profiled, Task, repeated_while_profiled
from tfparallel.measure.clock_offsets import Offset, offsets

ROUNDS = 8  # in which clocks are compared
BOOT = "/proc/sys/kernel/random/boot_id"  # what processes that read one clock have in common


class OnServers:
    """Runs steps while servers are profiled, and keeps one of them.

    Args:
        run_step: a step, or several at once, to its end; gives how many workers took part.
        addresses: of the servers.

    Attributes:
        clock_error_s: by how much their clocks may differ from ours after they were compared.
    """

    def __init__(self, run_step: Callable[[], int], addresses: Mapping[Task, str]):
        self._offsets = {task: _offset(task) for task in addresses}
        self.clock_error_s = max(each.error_s for each in self._offsets.values())
        ahead_s = {task: each.seconds for task, each in self._offsets.items()}
        self._profiled: Profiled = repeated_while_profiled(run_step, addresses, ahead_s)

    def of_step(self, ran: Iterable[Ran]) -> list[Ran]:
        """Those of operations that ran in the step."""
        begin, end = self._profiled.start_s, self._profiled.end_s
        return [each for each in ran if begin <= each.start_s and each.end_s <= end]

    def ran(self) -> dict[Task, list[Ran]]:
        """What each server ran in the step."""
        profiles = self._profiled.profiles.items()
        return {task: self.of_step(self._on_our_clock(task, each.ran)) for task, each in profiles}

    def _on_our_clock(self, task: Task, ran: Iterable[Ran]) -> Iterator[Ran]:
        ahead_s = self._offsets[task].seconds
        for each in ran:
            yield each._replace(start_s=each.start_s - ahead_s, end_s=each.end_s - ahead_s)


def _offset(task: Task) -> Offset:
    """Of the clock of a server to ours: it is read between two looks at ours."""
    announced, seen = [], []
    with tf.device(f"/job:{task[0]}/task:{task[1]}/device:CPU:0"):
        for _ in range(ROUNDS):
            before_s, there_s, after_s = time.time(), float(tf.timestamp().numpy()), time.time()
            announced.append([before_s, there_s])
            seen.append([after_s, there_s])
        host = _boot()
    with tf.device("CPU:0"):
        own_host = _boot()
    return offsets(announced, seen, [own_host, host or str(task)])[1]


def _boot() -> str:
    """Of the machine of the current device; "" where it has no such file."""
    with contextlib.suppress(tf.errors.NotFoundError):
        return tf.io.read_file(BOOT).numpy().decode().strip()
    return ""
