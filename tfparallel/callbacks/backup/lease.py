"""Whose a folder of backups is, decided from what lies in it: nothing here reads a disk or a clock.

Each owner leaves a claim, `lease-00000003`, with a fencing number one above the claim before it.
Making a file that must not exist yet is atomic, so of two that want number 4 one gets it, and from
then on number 3 owns nothing. An owner rewrites its claim now and then: its heartbeat.

```
claim before it         a contender who sees it
----------------------  -------------------------------------------------------------
none, or released       takes the folder
its process has ended   takes the folder at once; only processes of this machine can be asked
no heartbeat            takes the folder once the claim has not changed for `lease_s`, by
                        the contender's own clock: the owner's may be wrong, or jump
a heartbeat             gives up after `patience_s`, and names the owner
```

What fences an owner out that only slept: it publishes by an atomic step on a draft that carries its
token, after it has looked at the claims once more. Who takes the folder removes, after its own
claim is there, all drafts of owners before it. So either the new owner sees the backup, or the step
fails. Who slept before it removes them is an owner no more, and finds drafts of its successors:
their names carry fencing numbers above its own, and it leaves them.

Source: the fencing tokens of M. Kleppmann, "How to do distributed locking",
https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html; a store that checks the
token at each write is not needed, as the step that counts is the only one that must fail.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Literal

from tfparallel.callbacks.backup.schema import ClaimContent, Owner, parse_json

LARGEST_CLAIM_BYTES = 1 << 20
_PADDED_BYTES = 2048  # a claim that is rewritten in place takes no more of a disk that is full

Decision = Literal["take", "wait", "give up"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """That an owner has the folder since a number.

    Attributes:
        fence: its fencing number; the highest counts.
        token: of the owner alone; two jobs have never the same.
        owner: who it is.
        beat: how often it has said that it lives.
        last_number: the highest number that a backup has had so far, of whatever owner.
        is_released: whether it has ended, and said so.
        accepted: the backups of earlier owners that count, as [number, token]; None where it has
            not looked yet, and where files cannot appear behind its back.
    """

    fence: int
    token: str
    owner: Owner
    beat: int = 0
    last_number: int = 0
    is_released: bool = False
    accepted: tuple[tuple[int, str], ...] | None = None

    def to_bytes(self) -> bytes:
        """What its file holds."""
        content = dataclasses.asdict(self)
        del content["fence"]
        content["owner"] = self.owner.model_dump()
        return json.dumps(content).encode().ljust(_PADDED_BYTES)

    @classmethod
    def from_bytes(cls, fence: int, data: bytes) -> "Claim | None":
        """The claim that a file holds; None if it is damaged, or half written."""
        try:
            content = ClaimContent.model_validate(parse_json(data))
        except ValueError:
            return None
        accepted = None if content.accepted is None else tuple(map(tuple, content.accepted))
        fields = {name: getattr(content, name) for name in ClaimContent.model_fields}
        return cls(fence=fence, **{**fields, "accepted": accepted})


class Contender:
    """Watches a folder that it wants, until it may take it or should give up.

    Args:
        lease_s: how long a claim must stay as it is to be nobody's.
        patience_s: how long to wait for an owner that lives.
    """

    def __init__(self, lease_s: float, patience_s: float):
        self._lease_s, self._patience_s = lease_s, patience_s
        self._seen: tuple[int, bytes] | None = None
        self._seen_since_s = self._began_s = 0.0

    def decide(self, fence: int, data: bytes, has_ended: bool, now_s: float) -> Decision:
        """What to do about the newest claim.

        Args:
            fence: its fencing number; 0 if there is no claim.
            data: what its file holds.
            has_ended: whether its process is known to have ended.
            now_s: of a clock that never goes back.
        """
        if self._seen is None:
            self._began_s = now_s
        if self._seen != (fence, data):
            self._seen, self._seen_since_s = (fence, data), now_s
        claim = Claim.from_bytes(fence, data)
        if fence == 0 or has_ended or (claim is not None and claim.is_released):
            return "take"
        if now_s - self._seen_since_s >= self._lease_s:
            return "take"
        return "wait" if now_s - self._began_s < self._patience_s else "give up"


def owns(token: str, newest: Claim | None) -> bool:
    """Whether the claim of `token` is the newest, and not released."""
    return newest is not None and newest.token == token and not newest.is_released


def counting(
    published: Iterable[tuple[int, str]], claims: Sequence[Claim | None]
) -> list[tuple[int, str]]:
    """Which of the backups in a store count, where one may appear that was fenced out.

    Stores without an atomic rename let an owner that only slept finish what was removed. So the
    newest owner notes what it found, and nothing else counts but what it makes itself. Until it has
    noted that, the note of the owner before it holds.

    Args:
        published: number and token of each; the token is empty in backups of earlier versions.
        claims: from the newest on.
    """
    noted = next((c for c in claims if c is not None and c.accepted is not None), None)
    if noted is None or noted.accepted is None:
        return list(published)
    accepted = noted.accepted
    return [b for b in published if not b[1] or may_be_counted(b[1], claims) or b in accepted]


def may_be_counted(token: str, claims: Sequence[Claim | None]) -> bool:
    """Whether all counts that an owner publishes, now or later.

    Args:
        token: of the owner.
        claims: from the newest on.
    """
    for claim in claims:
        if claim is not None and claim.token == token:
            return True
        if claim is not None and claim.accepted is not None:
            return False
    return bool(token)
