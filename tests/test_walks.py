"""The walks through the code that `docs/architecture.md` tells, against steps that are traced."""

import json
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import keras
import numpy as np
import pytest

import tfparallel
from tests.horovod.launching import horovodrun

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tfparallel"
PAGE = (ROOT / "docs/architecture.md").read_text()


def section(title: str) -> str:
    """From a headline that begins with `title` to the next."""
    return PAGE.split(f"\n## {title}")[1].split("\n## ")[0]


def steps(title: str) -> list[tuple[str, str]]:
    """File and function of each row that names both."""
    return re.findall(r"\| `([\w/]+\.py)`: `(\w+)` \|", section(title))


def entered(strategy) -> list[tuple[str, str]]:
    """Functions of the package, as often and in the order that a training step enters them."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.train_on_batch(np.ones((8, 4)), np.ones((8, 3)))  # what is built, is built
    found: list[tuple[str, str]] = []

    def note(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            found.append((name.removeprefix(f"{PACKAGE}/"), frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        model.train_on_batch(np.ones((12, 4)), np.ones((12, 3)))  # of another size: traced anew
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


@pytest.mark.parametrize(
    ("title", "make", "most_files"),
    [
        ("One batch under", lambda: tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]), 7),
        ("One microbatch under", lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], 2), 12),
    ],
)
def test_a_step_goes_the_way_that_is_told(title, make, most_files):
    goes_as_told(title, entered(make()), most_files)


@pytest.mark.turns
def test_a_gradient_of_a_rank_goes_the_way_that_is_told(tmp_path):
    pytest.importorskip("horovod.tensorflow")
    status, output = horovodrun("walk", tmp_path / "entered.json")
    assert status == 0, output
    found = json.loads((tmp_path / "entered.json").read_text())
    goes_as_told("One gradient under", map(tuple, found), 9)


def goes_as_told(title: str, found: Iterable[tuple[str, str]], most_files: int) -> None:
    told, taken = steps(title), iter(found)
    assert len({file for file, _ in told}) == len(told) <= most_files
    assert told and not [step for step in told if step not in taken]  # behind the one before


def test_files_that_the_page_names_are_there():
    names = set(re.findall(r"`(\w+(?:/\w+)*/\w+\.py)`", PAGE))
    assert len(names) > 30
    missing = [n for n in names if not any((base / n).is_file() for base in (ROOT, PACKAGE))]
    assert not missing


def test_rooms_that_the_page_names_are_there():
    named = set(re.findall(r"^([a-z_]+)/(?=[ /])", section("Rooms"), re.M))
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert named <= rooms
    drawn = set(re.findall(r"([a-z_]+)/", section("Rooms").split("```")[1]))
    assert rooms - drawn == set(), "rooms that the drawing lacks"
