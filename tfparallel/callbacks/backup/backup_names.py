"""The names of all that a backup consists of; whatever has another name is not ours."""

import re
from collections.abc import Iterable
from typing import NamedTuple

MANIFEST = "manifest.json"
FILE = re.compile(r"(shared|worker-[0-9]+)\.(json|safetensors)|manifest\.json")
# One spelling of each number, and none that a file name could be too short for. The token is that
# of a lease: two jobs never write under the same name.
_NAME = re.compile(
    r"(backup|writing|deleting|lease)-([0-9]{8}|[1-9][0-9]{8,17})(?:-([0-9a-f]{16}))?"
)

KINDS = ("backup", "writing", "deleting")
CLAIMING = re.compile(r"claiming-[0-9]{8,18}-[0-9a-f]{16}")  # a claim before it has its name


def unfinished_claim(fence: int, drawn: str) -> str:
    """A name like `CLAIMING`; `drawn` are sixteen hexadecimal digits that nobody else has."""
    return f"claiming-{fence:08d}-{drawn}"


class Draft(NamedTuple):
    """A backup while it is written: its number, and the token of who writes it (empty: nobody)."""

    number: int
    token: str = ""

    def name(self, kind: str) -> str:
        """How it is called; `kind` is "backup", "writing" or "deleting"."""
        return folder_name(kind, self.number) + (f"-{self.token}" if self.token else "")


def drafts(names: Iterable[str], kind: str) -> list[Draft]:
    """What the names `kind-00000001` and `kind-00000001-0123456789abcdef` are of, ascending."""
    matches = map(_NAME.fullmatch, names)
    return sorted(Draft(int(m[2]), m[3] or "") for m in matches if m and m[1] == kind)


def numbered(names: Iterable[str], kind: str) -> list[int]:
    """The numbers of the names `kind-00000001`, without a token, ascending."""
    return [draft.number for draft in drafts(names, kind) if not draft.token]


def folder_name(kind: str, number: int) -> str:
    """The name that `numbered` finds; `kind` as in `Draft.name`, or "lease"."""
    return f"{kind}-{number:08d}"
