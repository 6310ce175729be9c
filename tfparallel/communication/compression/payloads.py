"""What a link takes for bytes, told by payloads that are sent beside steps."""

import numpy as np

_FIRST_BYTES, _MOST_BYTES = 1 << 17, 1 << 23
_OF_A_MODEL = 64  # a payload of a large one is so small a part of what there is to send
_MORE = 4  # times a payload that was too small to tell anything
_SEEN_S = 0.005  # what a payload has to take at least, beyond the smallest sum
_IDLE_BYTES = 14_600  # that TCP sends at once (RFC 6928); it doubles them with each answer
_LUCK = 2.0  # how much faster exact sums may be than payloads were


class Payloads:
    """How many bytes the next one has, and what the last one told.

    Args:
        exact_bytes: of all exact sums of a step.

    Attributes:
        next_bytes: of the next payload; 0 where it would tell nothing more.
        trip_s: what the smallest sum takes.
        exact_s: what exact sums take, where the link was idle; infinite as long as that is not
            known.
    """

    def __init__(self, exact_bytes: int):
        self._exact_bytes = exact_bytes
        self.trip_s, self.exact_s = 0.0, np.inf
        self.start()

    def start(self) -> None:
        """The link may be another one now."""
        part = max(_FIRST_BYTES, self._exact_bytes // _OF_A_MODEL)
        self.next_bytes = min(part, self._exact_bytes, _MOST_BYTES)
        self._byte_s = 0.0  # as long as it is not known

    def end(self) -> None:
        """No more are sent."""
        self.next_bytes = 0

    def weigh(self, sent_bytes: int, payload_s: np.ndarray, trip_s: np.ndarray) -> None:
        """Takes what a payload took.

        A connection that was idle starts slowly, and takes a way there and back more for each time
        that it doubles its speed: of two payloads the faster one tells what bytes take.

        Args:
            sent_bytes: of the payload.
            payload_s: `[rank, 2]`: what summing it took, twice.
            trip_s: `[rank]`: what the smallest sum took. Who comes later than the others waits for
                so much less.
        """
        self.trip_s = float(np.mean(trip_s))
        bytes_s = max(0.0, float(np.min(np.mean(payload_s, 0))) - self.trip_s)
        self._byte_s = bytes_s / sent_bytes
        starting_s = self.starting_s(self._exact_bytes)
        self.exact_s = self.trip_s + starting_s + self.bytes_s(self._exact_bytes)
        most = min(_MOST_BYTES, self._exact_bytes)
        is_enough = bytes_s >= _SEEN_S or sent_bytes >= most
        self.next_bytes = 0 if is_enough else min(most, _MORE * sent_bytes)

    def starting_s(self, sent_bytes: float) -> float:
        """What so many bytes take longer where fewer were sent before."""
        return 2 * self.trip_s * float(np.log2(max(1.0, sent_bytes / _IDLE_BYTES)))

    def bytes_s(self, sent_bytes: float) -> float:
        """What so many bytes of a sum take, by the last payload."""
        return self._byte_s * sent_bytes

    def least_s(self, sent_bytes: np.ndarray) -> np.ndarray:
        """What so many bytes of a sum take at least."""
        return self._byte_s / _LUCK * sent_bytes

    def have_told(self, waiting_s: float) -> bool:
        """Whether exact steps that wait for so long wait as long as the link makes them."""
        return waiting_s <= _LUCK * self.exact_s
