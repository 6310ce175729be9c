"""Both ends of a connection prove that they know a token, which neither sends.

    who listens                       who connects
    32 random bytes            -->
                               <--    32 random bytes, length, proof, message
    length, proof, answer      -->

A proof is an HMAC of who speaks, what both have drawn, and what is said with it: heard once, it is
of no use to anybody. What follows on the connection is neither signed nor encrypted.

A token that one process draws reaches the others through TensorFlow or Horovod, in clear. The job's
secret, an environment variable of all its processes, crosses no network: where it is set, whoever
has overheard the token still cannot prove anything.

Source: SKID3, Menezes, van Oorschot, Vanstone, Handbook of Applied Cryptography, section 10.3.2;
HMAC is RFC 2104.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping

SECRET_VARIABLE = "TFPARALLEL_SECRET"

_CHALLENGE_BYTES = 32
_GUEST, _HOST = b"connects", b"listens_"  # who speaks; of one length
_REPLY = struct.Struct("<32sI32s")  # a challenge, the length of the message, its proof
_ANSWER = struct.Struct("<I32s")
_LOOK_S = 0.2
_SEND_S = 5.0  # who listens reads at once


class NotKnownError(ConnectionError):
    """The other end is of another job, or of none: it does not prove that it knows the token."""


def key_of(token: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """What proofs are made with, of the token and the job's secret."""
    secret = environ.get(SECRET_VARIABLE, "")
    return hmac.digest(os.fsencode(secret), token.encode(), "sha256")


class Challenge:
    """What one who listens asks of one guest.

    Args:
        key: see `key_of`.
        most_bytes: how long the guest's message may be.

    Attributes:
        sent: what is sent to the guest.
    """

    def __init__(self, key: bytes, most_bytes: int):
        self._key, self._most_bytes = key, most_bytes
        self.sent = secrets.token_bytes(_CHALLENGE_BYTES)
        self._drawn_by_guest = b""

    def missing(self, reply: bytes | bytearray) -> int:
        """How many bytes are still to come, as far as is known; 0 when the guest has said all.

        Raises:
            NotKnownError: if its message would be too long.
        """
        if len(reply) < _REPLY.size:
            return _REPLY.size - len(reply)
        length = _REPLY.unpack_from(reply)[1]
        if length > self._most_bytes:
            raise NotKnownError(f"a message of {length} bytes, of {self._most_bytes} at most")
        return _REPLY.size + length - len(reply)

    def message(self, reply: bytes) -> bytes:
        """What the guest says, which has said all.

        Raises:
            NotKnownError: if it does not know the token.
        """
        self._drawn_by_guest, _, proof = _REPLY.unpack_from(reply)
        message = reply[_REPLY.size :]
        expected = _proof(self._key, _GUEST, self.sent, self._drawn_by_guest, message)
        if not hmac.compare_digest(proof, expected):
            raise NotKnownError("it does not know the job's token")
        return message

    def answer(self, text: bytes) -> bytes:
        """What to send to a guest that is known; `text`, and who says it."""
        proof = _proof(self._key, _HOST, self.sent, self._drawn_by_guest, text)
        return _ANSWER.pack(len(text), proof) + text


def introduce(
    connection: socket.socket,
    key: bytes,
    message: bytes,
    look: Callable[[], object],
    most_bytes: int = 0,
) -> bytes:
    """What who listens answers to `message`, once both have proved that they know the token.

    Args:
        connection: to it.
        key: see `key_of`.
        message: what it is told.
        look: called every 0.2 s while it is waited for; raises at the limit.
        most_bytes: how long its answer may be.

    Raises:
        NotKnownError: if it does not know the token, or lets nobody in who has this one.
    """
    challenge = _received(connection, _CHALLENGE_BYTES, look)
    own = secrets.token_bytes(_CHALLENGE_BYTES)
    proof = _proof(key, _GUEST, challenge, own, message)
    connection.settimeout(_SEND_S)
    connection.sendall(_REPLY.pack(own, len(message), proof) + message)
    length, proof = _ANSWER.unpack(_received(connection, _ANSWER.size, look))
    if length > most_bytes:
        raise NotKnownError(f"it answers {length} bytes, where {most_bytes} at most are expected")
    answer = _received(connection, length, look)
    if not hmac.compare_digest(proof, _proof(key, _HOST, challenge, own, answer)):
        raise NotKnownError("it does not know the job's token")
    return answer


def until(deadline_s: float, whom: str) -> Callable[[], None]:
    """A `look` that gives up on `whom` at a time of the monotonic clock."""

    def look() -> None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{whom} has not answered in time")

    return look


def _proof(key: bytes, who: bytes, by_host: bytes, by_guest: bytes, text: bytes) -> bytes:
    return hmac.digest(key, who + by_host + by_guest + text, "sha256")


def _received(connection: socket.socket, size: int, look: Callable[[], object]) -> bytes:
    received = b""
    while len(received) < size:
        look()
        connection.settimeout(_LOOK_S)
        try:
            more = connection.recv(size - len(received))
        except TimeoutError:
            continue
        except ConnectionError:
            more = b""
        if not more:
            raise NotKnownError(
                "it has closed the connection: it has ended, is of another job, or has another "
                f"{SECRET_VARIABLE}"
            )
        received += more
    return received
