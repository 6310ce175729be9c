"""What is wrong with a configuration, in the words of whoever wrote it."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Location = tuple[int | str, ...]


class ConfigError(ValueError):
    """A configuration with at least one mistake.

    Attributes:
        problems: every mistake, each as "dotted.path: should be this. Received: that."
    """

    def __init__(self, problems: Sequence[str], source: str):
        super().__init__(tuple(problems), source)
        self.problems = tuple(problems)
        self._source = source

    def __str__(self) -> str:
        count = len(self.problems)
        heading = f"{self._source} has {count} mistake{'s' if count > 1 else ''}:"
        return "\n  - ".join([heading, *self.problems])


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Describe all mistakes that `model` found, one line each."""
    return [_describe(problem, model) for problem in error.errors()]


def _describe(problem: Any, model: type[BaseModel]) -> str:
    kind, received, context = problem["type"], problem["input"], problem.get("ctx", {})
    path, section = _follow(problem["loc"], model)
    if kind == "extra_forbidden":
        return f"{path}: unknown key.{_suggest_key(path, section, model)}"
    if kind == "missing":
        return f"{path}: is required. Received: nothing."
    if kind == "union_tag_not_found":
        return f"{path}.name: is required. Received: nothing.{_choices(section)}"
    if kind == "union_tag_invalid":
        names, tag = context["expected_tags"], context["tag"]
        return (
            f"{path}.name: should be one of {names}. Received: {tag!r}.{_did_you_mean(tag, names)}"
        )
    if kind in ("model_type", "model_attributes_type"):
        return f"{path}: should be a section of its own, `key: value`. Received: {received!r}."
    if kind == "value_error":
        return f"{path}: {context['error']}."
    message = re.sub(r"^(Input|List|String|Value) ", "", problem["msg"])
    hint = _did_you_mean(received, context["expected"]) if kind == "literal_error" else ""
    return f"{path}: {message}. Received: {received!r}.{hint}"
