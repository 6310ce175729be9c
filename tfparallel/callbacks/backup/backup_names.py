"""The names of all that a backup consists of; whatever has another name is not ours."""

import re

MANIFEST = "manifest.json"
FILE = re.compile(r"(shared|worker-[0-9]+)\.(json|safetensors)|manifest\.json")
# One spelling of each number, and none that a file name could be too short for.
_FOLDER = re.compile(r"(backup|writing|deleting)-([0-9]{8}|[1-9][0-9]{8,17})")


def numbered(names: list[str], kind: str) -> list[int]:
    """The numbers of the names `kind-00000001`, ascending."""
    matches = map(_FOLDER.fullmatch, names)
    return sorted(int(match[2]) for match in matches if match and match[1] == kind)


def folder_name(kind: str, number: int) -> str:
    """The name that `numbered` finds; `kind` is "backup", "writing" or "deleting"."""
    return f"{kind}-{number:08d}"
