"""What a check ends with."""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "failed", "skipped"]
# Between weights in float32: after so few steps they differ by the order of sums alone.
MOST_DIFFERENCE = 1e-5


class CheckFailedError(Exception):
    """What a check found is wrong; the message says what, and by how much."""


class CheckSkippedError(Exception):
    """A check does not apply to this machine; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """The end of one check.

    Attributes:
        check: its name.
        verdict: "ok", "failed" or "skipped".
        found: what it saw or measured, or why it failed or was skipped.
        seconds: how long it took.
        cure: what to do about a failure.
        output: the end of what the check's processes wrote, of one that failed.
        figures: what it measured, for `--json`.
    """

    check: str
    verdict: Verdict
    found: str
    seconds: float = 0.0
    cure: str = ""
    output: str = ""
    figures: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Passed:
    """What a check that passed says.

    Attributes:
        text: a short sentence.
        figures: what was measured.
    """

    text: str
    figures: dict[str, object] = field(default_factory=dict)
