"""A worker that is about to wait for its peers says for whom."""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.coordination.probe import is_listening


def report_absent_peers(rank: int, peers: Sequence[str]) -> None:
    """Logs a warning that names the workers that cannot be reached yet, if there are any.

    It has to come before TensorFlow waits for them: that wait holds Python's interpreter lock, so
    that nothing can be said meanwhile.

    Args:
        rank: the rank of this worker, which is speaking.
        peers: the addresses, "host:port", of the other workers.
    """
    absent = [address for address in peers if not is_listening(address)]
    if absent:
        tf.get_logger().warning(
            "[rank %d] waits for the other workers to start. Not reachable yet: %s.",
            rank,
            ", ".join(absent),
        )
