"""What a look at a machine has found, and how bad it is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]
_ORDER: tuple[Status, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what was looked at, such as "wheels".
        status: "problem" where a job fails or is wrong, "warning" where it is slower than it could.
        found: what is there.
        cure: what to do about it; "" where nothing is to do.
    """

    check: str
    status: Status
    found: str
    cure: str = ""


def worst(findings: Iterable[Finding]) -> Status:
    """The worst status of all; "ok" of none."""
    return max((each.status for each in findings), key=_ORDER.index, default="ok")
