"""What pyproject.toml says of the package is what the package is."""

import ast
import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tfparallel.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Optional: asked for when they are used, with a message that says what to install.
OPTIONAL = {"cloudpickle", "fsspec", "horovod", "matplotlib", "ray", "tensorflow", "tensorboard"}
INSTALLED_BY_MAKE = ("cpu", "horovod", "plot", "dev")


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported_by(folder: str) -> set[str]:
    """Top-level modules that a folder imports, its own and the standard library's aside."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    own = {path.stem for path in (ROOT / folder).rglob("*.py")} | {"tfparallel", "tests"}
    return found - own - sys.stdlib_module_names


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    owners = packages_distributions()
    imported = {
        canonicalize_name(owner)
        for module in imported_by("tfparallel") - OPTIONAL
        for owner in owners[module]
    }
    assert imported == names(PROJECT["dependencies"])


def test_examples_import_what_the_extras_bring():
    from_keras_and_make = {"absl", "keras", "tensorflow", "mlxtend"}
    declared = names(PROJECT["dependencies"] + EXTRAS["plot"])
    assert imported_by("examples") - from_keras_and_make <= {
        name.replace("-", "_") for name in declared
    }


def locked() -> dict[str, str]:
    """Exact versions of requirements/dev.txt that hold for this Python."""
    lines = (ROOT / "requirements/dev.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    here = [r for r in found if r.marker is None or r.marker.evaluate(default_environment())]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in here}


def test_every_direct_requirement_is_locked_to_a_version_that_suits_it():
    versions = locked()
    wanted = PROJECT["dependencies"] + [r for extra in INSTALLED_BY_MAKE for r in EXTRAS[extra]]
    for requirement in map(Requirement, wanted):
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(Version(version)), requirement


def test_readme_on_an_index_page_has_absolute_links_to_files_that_exist():
    readme = runpy.run_path(str(ROOT / "setup.py"))["readme_with_absolute_links"]()
    links = re.findall(r"\]\(([^)]+)\)", readme)
    prefix = re.compile(re.escape(PROJECT["urls"]["Repository"]) + "/(?:blob|raw)/main/")
    assert len(links) > 20
    for link in links:
        assert prefix.match(link), link
        assert (ROOT / prefix.sub("", link).partition("#")[0]).exists(), link


def test_the_documentation_leads_to_the_same_repository():
    site = (ROOT / "mkdocs.yml").read_text()
    assert f"repo_url: {PROJECT['urls']['Repository']}\n" in site
    assert f"site_url: {PROJECT['urls']['Documentation']}\n" in site


def test_the_version_has_a_place_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{__version__}]" in changelog


def test_pythons_and_their_classifiers_agree():
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    tested = runpy.run_path(str(ROOT / "tools/test_versions.py"))["PYTHONS"]
    assert listed == list(tested)
    assert PROJECT["requires-python"] == f">={tested[0]}"


def test_the_versions_that_are_tested_are_the_ends_of_those_supported():
    pins = runpy.run_path(str(ROOT / "tools/test_versions.py"))["PINS"]
    declared = {Requirement(r).name: Requirement(r).specifier
                for r in PROJECT["dependencies"] + EXTRAS["cpu"]}  # fmt: skip
    for package in ("keras", "tensorflow-cpu"):
        oldest, newest = (Version(pins[end][package].removesuffix(".*")) for end in pins)
        major, minor = newest.release
        assert declared[package].contains(f"{oldest}.9")
        assert not declared[package].contains(f"{oldest.major}.{oldest.minor - 1}.9")
        assert declared[package].contains(f"{newest}.9")
        assert not declared[package].contains(f"{major}.{minor + 1}.0")
