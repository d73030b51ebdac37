"""Text for people: tables, all from one renderer, and bytes and seconds with their units."""

import ast
from pathlib import Path

import pytest

import fxpipe
from fxpipe.utils.text_table import text_table, use_text_width, wrap_text
from fxpipe.utils.units import human_bytes, human_seconds


def test_cells_are_text_and_columns_line_up() -> None:
    rows = [("1e5", "12", "a"), ("relu", "3", "bc")]
    assert text_table(rows, ("node", "calls", "device"), left=("node", "device")).split("\n") == [
        "node      calls  device",
        "------  -------  --------",
        "1e5          12  a",
        "relu          3  bc",
    ]


def test_a_table_without_a_rule_is_as_wide_as_its_cells() -> None:
    assert text_table([("0", "12.5 KiB")], ("stage", "has"), has_rule=False).split("\n") == [
        "stage       has",
        "    0  12.5 KiB",
    ]


def test_a_table_that_is_too_wide_is_divided_and_says_in_each_part_what_rows_are_about() -> None:
    rows = [("0", "one", "x" * 20, "-", "y" * 20), ("1", "two", "x", "-", "y")]
    headers = ("k", "name", "first", "nothing", "second")
    wide = text_table(rows, headers, left=headers)
    assert max(map(len, wide.split("\n"))) > 40
    with use_text_width(40):
        first, second = text_table(rows, headers, left=headers, keys=2).split("\n\n")
        assert wrap_text("word " * 20).count("\n") == 2
    assert text_table(rows, headers, left=headers) == wide
    for part, header, cell in ((first, "first", "x"), (second, "second", "y")):
        lines = part.split("\n")
        assert max(map(len, lines)) <= 40
        assert lines[0].split() == ["k", "name", header]
        assert [line.split()[:2] for line in lines[2:]] == [["0", "one"], ["1", "two"]]
        assert lines[2].endswith(cell * 20)


def test_nobody_else_renders_tables() -> None:
    root = Path(fxpipe.__file__).parent
    importing = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and node.module == "tabulate")
        or (isinstance(node, ast.Import) and any(alias.name == "tabulate" for alias in node.names))
    }
    assert importing == {"utils/text_table.py"}


MIB = 2**20


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1.0 MiB"),
        (5 * 2**50, "5120.0 TiB"),
    ],
)
def test_human_bytes(number: int, text: str) -> None:
    assert human_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.000 ms"), (1.5e-6, "0.002 ms"), (1e-3, "1.00 ms"), (0.0123, "12.3 ms"), (1.5, "1500 ms"), (12, "12.0 s"),
     (119.4, "119.4 s"), (360, "6:00 min"), (7209, "2:00:09 h")],
)  # fmt: skip
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
