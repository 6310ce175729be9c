"""Which errors of TensorFlow speak of a task that is gone, or was started anew."""

import tensorflow as tf

# What a call to a task says when the task is gone, or has been started anew since.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.CancelledError,
)
_STARTED_ANEW = ("context_id", "context id", "incarnation", "remote_handle", "unknown device")


def speaks_of_lost_task(error: tf.errors.OpError) -> bool:
    """Whether the error may come from a lost task; the task itself says whether it is there."""
    return isinstance(error, _LOST) or speaks_of_new_task(error)


def speaks_of_new_task(error: tf.errors.OpError) -> bool:
    """Whether the error comes from a task that was started anew and knows nothing of ours."""
    return any(sign in str(error) for sign in _STARTED_ANEW)
