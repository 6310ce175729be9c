"""Whose a folder is, as a table: no disk, no clock."""

import pytest

from tfparallel.callbacks.backup.lease import Claim, Contender, counting, owns
from tfparallel.callbacks.backup.schema import Owner

OWNER = Owner(host="vm", pid=7, job="job", since="2026", machine="boot pid:[1]", started="123")
A, B = "a" * 16, "b" * 16


def data(fence=1, token=A, **fields):
    return Claim(fence, token, OWNER, **fields).to_bytes()


@pytest.mark.parametrize(
    ("fence", "content", "has_ended", "decision"),
    [
        (0, b"", False, "take"),
        (1, data(is_released=True), False, "take"),
        (1, data(), True, "take"),
        (1, data(), False, "wait"),
        (1, b"damaged", False, "wait"),
    ],
    ids=["nobody's", "released", "ended", "running", "damaged"],
)
def test_the_first_look_decides_what_is_certain(fence, content, has_ended, decision):
    assert Contender(6, 8).decide(fence, content, has_ended, now_s=100.0) == decision


@pytest.mark.parametrize("content", [data(), b"damaged"], ids=["whole", "damaged"])
def test_a_claim_without_a_heartbeat_is_free_after_the_lease(content):
    contender = Contender(6, 8)
    decisions = [contender.decide(1, content, False, now_s) for now_s in (100, 103, 105.9, 106)]
    assert decisions == ["wait", "wait", "wait", "take"]


def test_an_owner_that_lives_is_not_waited_for_beyond_the_limit():
    contender = Contender(6, 8)
    beats = [contender.decide(1, data(beat=s), False, s) for s in range(9)]
    assert beats == ["wait"] * 8 + ["give up"]


def test_a_contender_without_patience_gives_up_at_once():
    assert Contender(6, 0).decide(1, data(), False, 0.0) == "give up"


def test_the_newest_claim_owns_until_it_is_released():
    mine = Claim(1, A, OWNER)
    assert owns(A, mine)
    assert not owns(A, Claim(2, B, OWNER))
    assert not owns(A, None)
    assert not owns(A, Claim(1, A, OWNER, is_released=True))


@pytest.mark.parametrize("accepted", [None, (), ((3, A), (4, ""))])
def test_a_claim_is_read_as_it_was_written(accepted):
    claim = Claim(7, A, OWNER, beat=3, last_number=9, accepted=accepted)
    assert Claim.from_bytes(7, claim.to_bytes()) == claim


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{" * 100_000,
        data().replace(A.encode(), b"../etc/passwd  "),
        data().replace(b'"beat": 0', b'"beat": -1'),
        data().replace(b'"last_number": 0', b'"last_number": 1e99'),
    ],
    ids=["empty", "null", "list", "deep", "path", "negative", "too large"],
)
def test_a_claim_of_any_other_content_is_damaged(content):
    assert Claim.from_bytes(1, content) is None


def test_what_was_fenced_out_does_not_count():
    published = [(1, ""), (2, A), (3, A), (3, B)]
    old, new = Claim(1, A, OWNER), Claim(2, B, OWNER)
    noted = Claim(2, B, OWNER, accepted=((1, ""), (2, A)))
    assert counting(published, []) == published
    assert counting(published, [old]) == published  # it has noted nothing yet
    assert counting(published, [new, old]) == published
    assert counting(published, [noted]) == [(1, ""), (2, A), (3, B)]
    newest = Claim(3, "c" * 16, OWNER)
    assert counting(published, [newest, noted]) == [(1, ""), (2, A), (3, B)]
