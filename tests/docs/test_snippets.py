"""Every snippet of README and docs runs as it is shown, or says what it needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfparallel
from tests.docs.reader import UNTOUCHED, run_snippet
from tests.docs.snippets import ROOT, snippets, snippets_of

pytestmark = pytest.mark.turns

# What is needed, and the tests have.
HERE = {
    None,
    "a file of weights",
    "a pipeline",
    "a step that runs on replicas",
    "files of yours",
    "the folder configs of a checkout",
}
# What another process has: one for all snippets of a kind.
ELSEWHERE = ["eight devices", UNTOUCHED]


def run_pasted(code: str, folder: Path) -> None:
    """Runs a script as whoever pastes it does: nothing is imported, nothing is set."""
    script = folder / "pasted.py"
    script.write_text(code)
    command = [sys.executable, script.name]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "num_replicas=2" in ran.stderr
    accuracies = re.findall(r"accuracy: ([\d.]+)", ran.stdout)
    assert (
        not accuracies or float(accuracies[-1]) > 0.5
    )  # or a newcomer thinks that nothing is learnt


@pytest.fixture
def _keras_as_it_was():
    """A page turns on what Keras lacks for a whole process: the next test has it off again."""
    yield
    tfparallel.keras_distribution.disable()


@pytest.mark.usefixtures("_keras_as_it_was")
@pytest.mark.parametrize("snippet", snippets(), ids=lambda snippet: snippet.name)
def test_snippet(snippet, tmp_path, monkeypatch):
    if snippet.needs == "a process of its own":
        run_pasted(snippet.code, tmp_path)
    elif snippet.needs in HERE:
        monkeypatch.chdir(tmp_path)
        run_snippet(snippet)
    elif snippet.needs in ELSEWHERE:
        pytest.skip("runs in test_snippets_in_a_process_of_their_own")
    else:
        pytest.skip(f"needs {snippet.needs}")


@pytest.mark.long
@pytest.mark.parametrize("needs", ELSEWHERE)
def test_snippets_in_a_process_of_their_own(needs, tmp_path):
    known = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.docs.fresh_process", needs],
        cwd=ROOT,
        env={**known, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    chosen = [snippet.name for snippet in snippets() if snippet.needs == needs]
    reported = [line for line in ran.stdout.splitlines() if line.startswith("ran ")]
    assert chosen and reported == [f"ran {name}" for name in chosen]


def test_most_snippets_run():
    known = snippets()
    run = [each for each in known if each.needs in {*HERE, *ELSEWHERE, "a process of its own"}]
    assert len(known) > 60 and len(run) > 50


def test_a_block_within_a_list_is_found_with_what_it_needs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "- one:\n\n    ```python\n    if x:\n        f()\n    ```\n\n"
        "- two:\n\n    <!-- needs: a TPU -->\n    ```python\n    g()\n    ```\n\n"
        '```python title="three.py"\nh()\n```\n'
    )
    found = snippets_of(page)
    assert [(each.code, each.needs) for each in found] == [
        ("if x:\n    f()\n", None),
        ("g()\n", "a TPU"),
        ("h()\n", None),
    ]
    assert found[0].name == "page.md:4"
