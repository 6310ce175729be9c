"""Layers of a model by path, and which of them patterns name."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import keras

from tfparallel.internals.keras_layers import direct_layers

Patterns: TypeAlias = Sequence[str] | set[str] | frozenset[str]  # of layers, as of a shell


def layers_by_path(model: keras.Model) -> dict[str, keras.Layer]:
    """All layers in `model`, each once, by their names behind those of the layers around them."""
    found: dict[int, tuple[str, keras.Layer]] = {}
    for path, layer in _walk(model, ""):
        found.setdefault(id(layer), (path, layer))
    return dict(found.values())


def _walk(layer: keras.Layer, prefix: str) -> Iterator[tuple[str, keras.Layer]]:
    for inner in direct_layers(layer):
        path = prefix + inner.name
        yield path, inner
        yield from _walk(inner, f"{path}/")


def is_named(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` is of a layer's path, or, without `/`, of its name.

    Args:
        path: as in `layers_by_path`.
        patterns: as of a shell: `block_*`, `decoder/block_?`.
    """
    name = path.rpartition("/")[2]
    return any(
        fnmatchcase(path, pattern) or ("/" not in pattern and fnmatchcase(name, pattern))
        for pattern in patterns
    )


def check_patterns(option: str, patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Refuse a pattern that names no layer.

    Raises:
        ValueError: naming the patterns of `option`, and some layers.
    """
    paths = list(paths)
    idle = [each for each in patterns if not any(is_named(path, [each]) for path in paths)]
    if idle:
        raise ValueError(
            f"Every pattern of `{option}` must name a layer. Received: {', '.join(map(repr, idle))}"
            f". The layers are {', '.join(map(repr, paths[:10]))}"
            f"{' ...' if len(paths) > 10 else ''}."
        )
