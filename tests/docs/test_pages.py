"""What holds for every page of the documentation."""

import re
import runpy
import textwrap
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_MOST_WORDS = 1500
_BLOCK_OF_CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return _BLOCK_OF_CODE.sub("", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_is_short_enough_to_be_read(page):
    assert len(prose(page).split()) < _MOST_WORDS, "divide it into two pages"


@pytest.mark.parametrize("page", (DOCS / "measurements").glob("*.md"), ids=lambda page: page.stem)
def test_measurements_have_a_date_and_a_machine(page):
    if page.name != "index.md":
        begin = page.read_text()[:600]
        assert re.search(r"20\d\d-\d\d-\d\d", begin) and "Machine: " in begin


def test_messages_wrap():
    """A block of the class `message` does, as stylesheets/extra.css says."""
    blocks = re.findall(
        r"^```([^\n]*)\n(.*?)^```$", (DOCS / "troubleshooting.md").read_text(), re.M | re.S
    )
    long = [
        kind for kind, text in blocks if "Error: " in text and max(map(len, text.split("\n"))) > 40
    ]
    assert len(long) > 30
    assert set(long) <= {" { .text .message }"}
    assert ".message pre > code" in (DOCS / "stylesheets/extra.css").read_text()


def test_commands_install_from_a_checkout_as_long_as_there_is_no_release():
    """Messages name `tfparallel[cpu]`: where the package is installed, pip takes it from there."""
    for page in [ROOT / "README.md", ROOT / "BUILD.md", *PAGES]:
        for block in _BLOCK_OF_CODE.findall(page.read_text()):
            if "Error: " not in block:
                assert "\npip install 'tfparallel" not in block, page


def test_the_elastic_command_is_that_of_its_example():
    example = (ROOT / "examples/elastic.py").read_text()
    page = (DOCS / "strategies/horovod.md").read_text()
    commands = re.search(r"    echo localhost.*?elastic-backups\n", example, re.DOTALL)
    assert commands is not None and textwrap.dedent(commands[0]) in page


def test_every_page_can_be_found():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"[\w/]+\.md", nav)
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_the_reference_has_every_public_name():
    script = runpy.run_path(str(DOCS / "api_page.py"))
    assert script["PAGE"].read_text() == script["page"](), "run `python docs/api_page.py`"


@pytest.mark.parametrize("word", ["install", "jupyter", "slurm", "kubernetes", "gpu", "horovod"])
def test_what_people_look_for_is_in_a_heading(word):
    headings = [line for page in PAGES for line in prose(page).splitlines() if line[:1] == "#"]
    assert any(word in heading.lower() for heading in headings)
