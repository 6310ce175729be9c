"""The code that README and docs show, as it stands there."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# ` <!-- needs: a TPU -->` in the line before a block says why a laptop does not run it. A block
# within a list is indented with it.
_BLOCK = re.compile(
    r"(?:^ *<!-- needs: (?P<needs>[^>]+) -->\n+)?"
    r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Snippet(NamedTuple):
    """A block of Python, and what it needs that a laptop with TensorFlow does not have."""

    name: str  # page:line
    code: str
    needs: str | None


def snippets() -> list[Snippet]:
    """All blocks of Python, page by page."""
    return [snippet for page in PAGES for snippet in snippets_of(page)]


def snippets_of(page: Path) -> list[Snippet]:
    """The blocks of one page."""
    text = page.read_text()
    return [
        Snippet(
            f"{page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name}:"
            f"{text.count(chr(10), 0, found.start('code')) + 1}",
            textwrap.dedent(found["code"]),
            found["needs"],
        )
        for found in _BLOCK.finditer(text)
    ]
