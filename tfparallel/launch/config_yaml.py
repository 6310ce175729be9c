"""YAML 1.2 as configurations use it: no key twice, values set by dotted path."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError


def read_yaml(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """Read a file of named sections.

    Returns:
        The sections (empty if there are problems) and the problems.
    """
    try:
        document = _parse(Path(path).read_bytes())
    except OSError as error:
        return {}, [f"expected a file that can be read. Received: {error.strerror}."]
    except ValueError as error:
        return {}, [str(error)]
    if document is None:
        return {}, []
    if not isinstance(document, dict):
        return {}, [f"expected sections such as `training:`. Received: {document!r}."]
    # A section whose keys are all commented out has the value None.
    return {key: {} if value is None else value for key, value in document.items()}, []


def apply_override(document: dict[str, Any], override: str) -> list[str]:
    """Set the value at a dotted path, in place.

    Args:
        document: the sections to change.
        override: `"section.key=value"`.

    Returns:
        The problems.
    """
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return [f"expected section.key=value. Received: {override!r}."]
    try:
        value = _parse(text)
    except ValueError as error:
        return [f"{path}: in {override!r}, {error}"]
    section = document
    for depth, key in enumerate(keys[:-1], start=1):
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            parent = ".".join(keys[:depth])
            return [f"{path}: expected a section at {parent}. Received: {section!r}."]
    section[keys[-1]] = value
    return []


def _parse(text: bytes | str) -> Any:
    """Return the value of a YAML text; a ValueError names the line of a mistake."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}expected YAML. Received: {error.problem}.") from None
    except RecursionError:
        problem = "lists or sections that are too deep in one another"
        raise ValueError(f"expected sections of settings. Received: {problem}.") from None
    except (YAMLError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        raise ValueError(f"expected YAML. Received: {error}.") from None
