"""SIGTERM as a request: finish the step, save, exit.

Kubernetes, Slurm and TPU VM maintenance send SIGTERM and kill some seconds later.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# What a process that was preempted and has saved exits with: as if SIGTERM had ended it.
EXIT_STATUS = 128 + signal.SIGTERM


class PreemptionNotice:
    """Whether SIGTERM has come since `watch`.

    Python tells signals to the main thread only: in other threads nothing is watched.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._previous: Any = None
        self._is_watching = False
        self._is_training: Callable[[FrameType | None], bool] = lambda frame: False

    def watch(self, is_training: Callable[[FrameType | None], bool]) -> None:
        """Takes SIGTERM over from whoever handled it.

        Args:
            is_training: whether a frame belongs to the training. A signal that finds it ended (by
                an error, say) goes to the handler before this one.
        """
        self.has_come, self._is_training = False, is_training
        if threading.current_thread() is threading.main_thread() and not self._is_watching:
            self._previous = signal.signal(signal.SIGTERM, self._note)
            self._is_watching = True

    def unwatch(self) -> None:
        """Gives SIGTERM back."""
        if self._is_watching:
            signal.signal(signal.SIGTERM, self._previous)
            self._is_watching = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_training(frame):
            self.has_come = True
        else:
            self.unwatch()
            signal.raise_signal(number)
