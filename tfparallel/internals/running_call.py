"""Whether a call that a thread is in has ended, asked from whatever thread."""

from types import FrameType


class RunningCall:
    """A call, known by its frame, which it finds in its own thread.

    Neither Keras nor TensorFlow tells when `fit` or a `tf.function` has ended, but the frame does:
    `clear` refuses one that is executing. The frame is held, with its local variables, until
    somebody asks and it has ended. (To walk the stack of another thread that runs, as
    `sys._current_frames` offers, can crash Python 3.11.)
    """

    def __init__(self, frame: FrameType):
        self._frame: FrameType | None = frame

    def is_running(self) -> bool:
        """Whether it has not ended."""
        if self._frame is None:
            return False
        try:
            self._frame.clear()
        except RuntimeError:
            return True
        self._frame = None
        return False

    def __eq__(self, other: object) -> bool:
        """Whether both are one call, while it runs."""
        return isinstance(other, RunningCall) and other._frame is self._frame

    __hash__ = None  # type: ignore[assignment]  # nobody needs it
