"""The names of all that a backup consists of; whatever has another name is not ours."""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

MANIFEST = "manifest.json"
FILE = re.compile(r"(shared|worker-[0-9]+|shards-[0-9]+)\.(json|safetensors)|manifest\.json")
# One spelling of each number, and none that a file name could be too short for. The token is that
# of a lease: two jobs never write under the same name. What is written ends with the lease's
# fencing number (earlier versions wrote none).
_NAME = re.compile(
    r"(backup|writing|deleting|lease)-([0-9]{8}|[1-9][0-9]{8,17})"
    r"(?:-([0-9a-f]{16})(?:-([1-9][0-9]{0,17}))?)?"
)

KINDS = ("backup", "writing", "deleting")
CLAIMING = re.compile(r"claiming-[0-9]{8,18}-[0-9a-f]{16}")  # a claim before it has its name


def unfinished_claim(fence: int, drawn: str) -> str:
    """A name like `CLAIMING`; `drawn` are sixteen hexadecimal digits that nobody else has."""
    return f"claiming-{fence:08d}-{drawn}"


class Draft(NamedTuple):
    """A backup while it is written.

    Attributes:
        number: its own.
        token: of the lease of who writes it; empty without one.
        fence: the fencing number of that lease, where it is known.
    """

    number: int
    token: str = ""
    fence: int = 0

    def name(self, kind: str) -> str:
        """How it is called; `kind` is "backup", "writing" or "deleting"."""
        parts = [folder_name(kind, self.number), self.token]
        if kind == "writing" and self.fence:
            parts.append(str(self.fence))
        return "-".join(filter(None, parts))

    @property
    def published(self) -> tuple[int, str]:
        """Number and token: which it is, once it counts."""
        return self.number, self.token


def drafts(names: Iterable[str], kind: str) -> list[Draft]:
    """What names like `writing-00000001-0123456789abcdef-3` of a kind are of, ascending."""
    matches = map(_NAME.fullmatch, names)
    found = [m for m in matches if m and m[1] == kind and (kind == "writing" or not m[4])]
    return sorted(Draft(int(m[2]), m[3] or "", int(m[4] or 0)) for m in found)


def swept(names: Collection[str], token: str, fence: int) -> list[Draft]:
    """Which of the drafts in a folder an owner removes: its own, and those of owners before it.

    An owner that has slept may be none any more. So it leaves what has a higher fencing number, and
    everything once its own claim has gone: a folder that was removed counts from 1 again.

    Args:
        names: all that is in the folder, seen at one moment.
        token, fence: of the owner; without a fence nobody else may write, and all are removed.
    """
    is_there = not fence or folder_name("lease", fence) in names
    return [
        draft
        for draft in drafts(names, "writing")
        if not fence or draft.token == token or (is_there and draft.fence < fence)
    ]


def numbered(names: Iterable[str], kind: str) -> list[int]:
    """The numbers of the names `kind-00000001`, without a token, ascending."""
    return [draft.number for draft in drafts(names, kind) if not draft.token]


def folder_name(kind: str, number: int) -> str:
    """The name that `numbered` finds; `kind` as in `Draft.name`, or "lease"."""
    return f"{kind}-{number:08d}"
