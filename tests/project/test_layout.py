"""Where tests stand: those of the behaviour use what users use, those of a unit stand where the unit does."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from helpers.paths import ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
# docstrings of the API name them
PUBLIC = {
    f"fxpipe.{name}"
    for name in ("distributed", "errors", "hardware", "integrations.transformers", "optim", "scheduling")
}
PACKAGES = {path.relative_to(ROOT / "fxpipe") for path in (ROOT / "fxpipe").rglob("*") if path.is_dir()}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return found | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


@pytest.mark.parametrize(("folder", "most"), [("fxpipe", 49_821), ("tests", 60_000)])
def test_one_person_can_carry_it(folder, most):
    """What comes in has to be worth what goes: raise no bound, and lower it where there is less."""
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob("*.py"))
    assert most - 2000 < lines <= most


def test_the_top_of_the_package_can_be_taken_in_at_a_glance():
    assert len([*(ROOT / "fxpipe").glob("*.py")]) <= 7
    assert len([*(ROOT / "fxpipe").glob("*/__init__.py")]) <= 14


def test_there_are_tests_of_each_kind():
    kinds = Counter(path.relative_to(TESTS).parts[0] for path in FILES)
    folders = "attacks behaviour cli gpu helpers project random_models simulated unit zoo"
    assert {*kinds} == {"conftest.py", *folders.split()}
    assert kinds["behaviour"] > 20
    assert kinds["unit"] > 80


def test_tests_of_the_behaviour_import_what_users_import():
    for path in [*(TESTS / "behaviour").glob("*.py"), *(TESTS / "attacks").glob("*.py")]:
        inner = {name for name in imported(path) if name.startswith("fxpipe.")} - PUBLIC
        assert not inner, path.name


def test_no_test_imports_another():
    names = {path.stem for path in FILES if path.name.startswith("test_")}
    for path in FILES:
        assert not {name.rpartition(".")[2] for name in imported(path)} & names, path.name


def test_no_file_name_stands_twice():
    counts = Counter(path.name for path in FILES if path.name.startswith("test_"))
    assert not [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in (TESTS / "unit").rglob("test_*.py")}), ids=lambda folder: folder.name
)
def test_folders_of_unit_tests_are_those_of_the_package(folder):
    assert folder == TESTS / "unit" or folder.relative_to(TESTS / "unit") in PACKAGES
