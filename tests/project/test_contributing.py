"""CONTRIBUTING.md: the examples do what the text says."""

import re

import pytest
from helpers.paths import ROOT

TEXT = ROOT.joinpath("CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
IMPORTS = "import fxpipe\nimport torch\nfrom torch import nn\n"  # of the first example, for each one alone


@pytest.mark.parametrize("title", [title for title, text in SECTIONS if "```python" in text])
def test_examples_run(title, capsys):
    text = dict(SECTIONS)[title]
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(IMPORTS + code, "CONTRIBUTING.md", "exec"), {"__name__": "contributing"})


def test_files_that_are_named_exist():
    root = ROOT
    names = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", TEXT)
    assert len(names) > 20
    found = [
        path.relative_to(root).as_posix()
        for folder in ("fxpipe", "tests")
        for path in root.joinpath(folder).rglob("*.py")
    ]
    for name in names:
        assert any(f"/{path}".endswith(f"/{name}") or f"/{name}" in f"/{path}" for path in found), name


def test_concepts_that_are_named_exist_and_are_few():
    source = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.joinpath("fxpipe").rglob("*.py"))
    classes = set(re.findall(r"^class (\w+)", source, re.MULTILINE))
    parts = dict(re.findall(r"^\*\*(.+?)\*\*:(.*?)\n\n", dict(SECTIONS)["Concepts"], re.MULTILINE | re.DOTALL))
    for part, most in {"Tracing": 45, "A step": 30, "A plan": 30}.items():
        names = re.findall(r"`(\w+)`", parts[part])
        assert 20 < len(names) <= most
        assert not {*names} - classes
