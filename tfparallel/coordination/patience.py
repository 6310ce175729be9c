"""How long a process waits for others: when it says so, when it gives up, and who is silent.

Decided only, in plain Python, on times that are passed in: who waits does the asking, the logging
and the sleeping (`waiting.py`), on real clocks or simulated ones. The rule is the same everywhere:

    0 s          15 s             half the limit,         the limit
                                  at least 60 s
    | silence    | INFO, again    | WARNING, again        | TimeoutError
                   every 15 s       every 15 s

A process that was stopped itself, or had no processor, has not waited meanwhile: between two looks
no more than `LONGEST_LOOK_S` counts.
"""

import logging
import math
from collections.abc import Iterable

SAY_AFTER_S = 15.0
NORMAL_S = 60.0  # machines start that far apart, and nothing is wrong
LONGEST_LOOK_S = 5.0


class WaitedTooLong(TimeoutError):
    """A process has waited for others up to its limit; the message names them and the limit."""


class Wait:
    """One wait of one process for others.

    Args:
        speaker: who waits, for example "worker 1" or "rank 0".
        what: for what, after "to": "start", "come to all-reduce 7".
        limit_s: how long; None waits for ever, which nobody does unless told so.
        now_s: when the wait begins.
        option: which sets the limit, for messages: "Timeouts.start_s".
    """

    def __init__(self, speaker: str, what: str, limit_s: float | None, now_s: float, option: str):
        self._speaker, self._what, self._option = speaker, what, option
        self._limit_s = math.inf if limit_s is None else limit_s
        self._last_s, self.waited_s = now_s, 0.0
        self._say_at_s = min(SAY_AFTER_S, self._limit_s / 2)

    def look(self, now_s: float, whom: str) -> tuple[int, str] | None:
        """What to log now, as level and sentence; None says nothing.

        Args:
            now_s: the time; at most `LONGEST_LOOK_S` after the last look, or less is counted.
            whom: names all that have not come, with their addresses and what is known of them.

        Raises:
            WaitedTooLong: at the limit.
        """
        self.waited_s += min(max(0.0, now_s - self._last_s), LONGEST_LOOK_S)
        self._last_s = now_s
        if self.waited_s >= self._limit_s:
            raise WaitedTooLong(self._gives_up(whom))
        if self.waited_s < self._say_at_s:
            return None
        self._say_at_s = self.waited_s + SAY_AFTER_S
        is_late = self.waited_s >= max(self._limit_s / 2, NORMAL_S)
        return logging.WARNING if is_late else logging.INFO, self._says(whom)

    def _says(self, whom: str) -> str:
        limit = "" if math.isinf(self._limit_s) else f" Limit: {self._limit_s:g} s."
        return (
            f"{self._speaker} has been waiting {self.waited_s:.0f} s for {whom} to {self._what}."
            f"{limit}"
        )

    def _gives_up(self, whom: str) -> str:
        return (
            f"Expected {whom} to {self._what} within {self._limit_s:g} s. Received: nothing. "
            f"{self._option} allows for longer. ({self._speaker} is speaking.)"
        )


class Silence:
    """For how long each of several processes has not been heard, though it was asked.

    Args:
        names: of the processes.
        now_s: when the asking begins.
    """

    def __init__(self, names: Iterable[str], now_s: float):
        self._silent_s = dict.fromkeys(names, 0.0)
        self._last_s = now_s

    def heard(self, now_s: float, names: Iterable[str]) -> None:
        """All were asked, and those of `names` have answered."""
        there = set(names)
        passed_s = min(max(0.0, now_s - self._last_s), LONGEST_LOOK_S)
        self._last_s = now_s
        for name in self._silent_s:
            self._silent_s[name] = 0.0 if name in there else self._silent_s[name] + passed_s

    def longer_than(self, limit_s: float) -> list[str]:
        """Those that have been silent for longer than `limit_s`."""
        return [name for name, silent_s in self._silent_s.items() if silent_s > limit_s]

    def of(self, name: str) -> float:
        """For how long `name` has been silent."""
        return self._silent_s[name]
