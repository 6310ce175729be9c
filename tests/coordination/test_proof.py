"""A token is proved, and never said; a proof that was heard once is of no use."""

import hashlib
import hmac
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfparallel.coordination.proof import Challenge, NotKnownError, introduce, key_of, until

KEY = key_of("token", {})


def reply(challenge, key=KEY, message=b"", who=b"connects"):
    """As the standard says, in other words than ours."""
    own = b"g" * 32
    proof = hmac.new(key, who + challenge + own + message, hashlib.sha256).digest()
    return own + struct.pack("<I", len(message)) + proof + message


def test_who_knows_the_token_is_believed():
    challenge = Challenge(KEY, 100)
    said = reply(challenge.sent, message=b"hello")
    assert challenge.missing(b"") == 68
    assert challenge.missing(said[:68]) == 5
    assert challenge.missing(said) == 0
    assert challenge.message(said) == b"hello"


def test_nothing_else_is():
    challenge = Challenge(KEY, 100)
    right = reply(challenge.sent, message=b"hello")
    wrong = {
        "another token": reply(challenge.sent, key_of("other", {}), b"hello"),
        "another message": right[:-1] + b"p",
        "what was heard on another connection": reply(Challenge(KEY, 100).sent, message=b"hello"),
        "what who listens says": reply(challenge.sent, message=b"hello", who=b"listens_"),
    }
    for name, said in wrong.items():
        with pytest.raises(NotKnownError):
            challenge.message(said)
            pytest.fail(f"{name} was believed")
    with pytest.raises(NotKnownError, match="101 bytes, of 100 at most"):
        challenge.missing(reply(challenge.sent, message=b"x" * 101))


def test_challenges_differ():
    assert len({Challenge(KEY, 0).sent for _ in range(100)}) == 100


def test_the_secret_makes_another_key():
    assert key_of("token", {"TFPARALLEL_SECRET": "s"}) != KEY
    assert key_of("token", {"TFPARALLEL_SECRET": ""}) == KEY


@pytest.fixture
def ends():
    own, other = socket.socketpair()
    with own, other, ThreadPoolExecutor(1) as pool:
        yield own, other, pool


def in_time(seconds=10.0):
    return until(time.monotonic() + seconds, "it")


def test_who_listens_has_to_prove_it_too(ends):
    own, other, pool = ends
    introduced = pool.submit(introduce, own, KEY, b"", in_time())
    other.sendall(b"h" * 32)
    said = other.recv(68)
    other.sendall(struct.pack("<I", 0) + said[-32:])  # sends back what it has heard
    with pytest.raises(NotKnownError, match="does not know the job's token"):
        introduced.result(10)


def test_an_answer_of_any_length_is_not_waited_for(ends):
    own, other, pool = ends
    introduced = pool.submit(introduce, own, KEY, b"", in_time())
    other.sendall(b"h" * 32 + b"\xff" * 36)
    with pytest.raises(NotKnownError, match="4294967295 bytes, where 0 at most"):
        introduced.result(10)


def test_who_is_silent_is_given_up_in_time(ends):
    with pytest.raises(TimeoutError, match="it has not answered in time"):
        introduce(ends[0], KEY, b"", in_time(0.3))
