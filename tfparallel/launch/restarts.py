"""Starting a job again after one of its processes has failed: how often, when, and when not.

```
 attempt ---- 0 ----------------------------------------> 0
    |  ^
    |  `---- pause 1, 2, 4, ... 60 s <--- restarts left --.
    |                                                     |
    `------- a process failed, or saved and exited (143) -+--- none left, or no use ---> status
```
"""

import time
from collections.abc import Callable

from tfparallel.launch.job_life import Ending
from tfparallel.launch.processes import wait_for_stop

RESTART_VARIABLE = "TFPARALLEL_RESTART"

# What a program exits with that was called wrongly (Python's and argparse's own status), or that
# could not be run (a shell's). It would do so again.
USELESS_STATUSES = frozenset({2, 126, 127})

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


def run_with_restarts(
    run: Callable[[int], Ending],
    max_restarts: int,
    note: Callable[[str], None],
    *,
    wait: Callable[[float], int | None] = wait_for_stop,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Runs a job until it succeeds or is told to stop, but not again and again for ever.

    Args:
        run: runs the job once, all of its processes; is given the number of restarts so far.
        max_restarts: how often it is started again at most, for whatever reason it ended.
        note: tells a person something.
        wait: waits so many seconds; returns the number of a signal that says to stop, or None.
        clock: seconds.

    Returns:
        The exit status of the last attempt, or 128 + n after signal n.
    """
    pause_s = 0.0
    for restart in range(max_restarts + 1):
        started_s = clock()
        ending = run(restart)
        if ending.failed_rank is None or max_restarts == 0:
            return ending.status
        if ending.status in USELESS_STATUSES:
            note(f"not started again: exit status {ending.status} would come again")
            return ending.status
        if restart == max_restarts:
            break
        pause_s = next_pause_s(pause_s, clock() - started_s)
        note(f"restart {restart + 1} of {max_restarts} in {pause_s:g} s")
        if number := wait(pause_s):
            note("told to stop; not started again")
            return 128 + number
    note(f"not started again: all {max_restarts} restarts are used")
    return ending.status


def next_pause_s(previous_s: float, ran_s: float) -> float:
    """The pause before a restart: doubles from attempt to attempt that ends at once.

    Args:
        previous_s: the pause before the attempt that has ended; 0 for none.
        ran_s: how long that attempt ran. One that ran longer than the longest pause has shown that
            the job can run.
    """
    if previous_s == 0 or ran_s > LONGEST_PAUSE_S:
        return FIRST_PAUSE_S
    return min(2 * previous_s, LONGEST_PAUSE_S)
