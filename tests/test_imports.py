"""Imports run one way, from the user's class down to plain data: those in functions and those for types alone, too."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fxpipe

ROOT = Path(fxpipe.__file__).parent
INSIDE = ("fxpipe.tracing.", "fxpipe.profiling.")  # a graph and its recorder, a profile and its file know each other


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in ROOT.rglob("*.py")}


def _imports(name: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            of = str(node.module)
            found |= {one if (one := f"{of}.{alias.name}") in FILES else of for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & FILES.keys() - {"fxpipe"}  # which hands on the names of all, and has the version


def _circle(imports: dict[str, set[str]]) -> list[str]:
    """The files of one; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_run_one_way():
    imports = {name: _imports(name) for name in FILES if name != "fxpipe"}
    assert len(imports) > 200
    for name, needed in imports.items():
        inside = next((room for room in INSIDE if name.startswith(room)), None)
        imports[name] = {one for one in needed if one != name and (inside is None or not one.startswith(inside))}
    assert not _circle(imports)


def test_a_circle_is_found():
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])


def test_tracing_imports_no_compiler():
    """To look for the user's line torch would import half of what it compiles with, which takes most of a second."""
    program = (
        "import sys, torch, fxpipe\n"
        "from torch import nn\n"
        "fxpipe.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.ones(4, 2),))\n"
        "print('torch.export._trace' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
