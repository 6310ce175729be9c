"""What pyproject.toml cannot say: the README as an index page shows it, with absolute links."""

import re
import sys
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:  # setuptools carries it for Python 3.10
    from setuptools.compat.py310 import tomllib

ROOT = Path(__file__).parent
# A link or picture, `](docs/x.md)`, but neither `](https://...)` nor `](#here)`.
_RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)]+)\)")


def readme_with_absolute_links() -> str:
    """README.md, its links leading into the repository: an index page knows no relative ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]

    def absolute(link: re.Match) -> str:
        picture, text, target = link.groups()
        return f"{picture}{text}({repository}/{'raw' if picture else 'blob'}/main/{target})"

    return _RELATIVE_LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    setup(
        long_description=readme_with_absolute_links(),
        long_description_content_type="text/markdown",
    )
