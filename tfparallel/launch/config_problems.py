"""What is wrong with a configuration, in the words of whoever wrote it."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tfparallel.mistakes import MistakesError


class ConfigError(MistakesError):
    """A configuration with at least one mistake."""


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Describe every mistake that `model` found, one line each."""
    return [_describe(problem, model) for problem in error.errors()]


def _describe(problem: Any, model: type[BaseModel]) -> str:
    kind, received, context = problem["type"], problem["input"], problem.get("ctx", {})
    path, section = _follow(problem["loc"], model)
    if kind == "extra_forbidden":
        return f"{path}: unknown key.{_suggest_key(path, section, model)}"
    if kind == "union_tag_not_found":
        return f"{path}.name: is required. Received: nothing."
    if kind == "union_tag_invalid":
        names, tag = context["expected_tags"], context["tag"]
        return (
            f"{path}.name: should be one of {names}. Received: {tag!r}.{_suggest_value(tag, names)}"
        )
    if kind in ("model_type", "model_attributes_type"):
        return f"{path}: should be a section of its own, `key: value`. Received: {received!r}."
    if kind == "value_error":
        return f"{path}: {context['error']}."
    message = re.sub(r"^(Input|List|String) ", "", problem["msg"])
    hint = _suggest_value(received, context["expected"]) if kind == "literal_error" else ""
    return f"{path}: {message}. Received: {received!r}.{hint}"


def _follow(location: Sequence[object], model: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """Follow pydantic's location of a mistake.

    Returns:
        The dotted path as a file has it (pydantic adds the name of the strategy), and the last
        section on the way.
    """
    keys, rest = [], list(location)
    while rest:
        key = rest.pop(0)
        keys.append(str(key))
        field = model.model_fields.get(key) if isinstance(key, str) else None
        sections = _sections_in(field) if field else []
        if field and field.discriminator and rest:
            name = rest.pop(0)
            sections = [s for s in sections if name in get_args(s.model_fields["name"].annotation)]
        if sections:
            model = sections[0]
    return ".".join(keys), model


def _sections_in(field: FieldInfo) -> list[type[BaseModel]]:
    annotations = [field.annotation, *get_args(field.annotation)]
    return [a for a in annotations if isinstance(a, type) and issubclass(a, BaseModel)]


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted paths that a file may have."""
    for key, field in model.model_fields.items():
        yield prefix + key
        for section in _sections_in(field):
            yield from _paths(section, f"{prefix}{key}.")


def _suggest_key(path: str, section: type[BaseModel], model: type[BaseModel]) -> str:
    """Suggest a key of the same section, else of any other, else list those of the section."""
    parent, _, key = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    if close := difflib.get_close_matches(key, section.model_fields, n=1):
        return f" Did you mean {prefix}{close[0]}?"
    elsewhere = {other.rpartition(".")[2]: other for other in _paths(model)}
    if close := difflib.get_close_matches(key, elsewhere, n=1):
        return f" Did you mean {elsewhere[close[0]]}?"
    return f" Known keys: {', '.join(prefix + known for known in section.model_fields)}."


def _suggest_value(received: object, quoted_choices: str) -> str:
    """Suggest one of `'a', 'b' or 'c'`."""
    choices = re.findall("'([^']*)'", quoted_choices)
    close = difflib.get_close_matches(str(received).lower(), choices, n=1)
    return f" Did you mean {close[0]}?" if close else ""
