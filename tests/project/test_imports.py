"""Imports run one way, from the user's class down to plain data: those in functions and those for types alone, too.

Only methods that draw import from above: what shows itself.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fxpipe

ROOT = Path(fxpipe.__file__).parent
INSIDE = ("fxpipe.tracing.", "fxpipe.profiling.")  # a graph and its recorder, a profile and its file know each other


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in ROOT.rglob("*.py")}


DRAWS = {"__str__", "compare_sizes", "_repr_html_", "save_timeline", "save_trace"}  # methods


def _imports_by_function(node: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """Each import: the class and function that it stands in, dotted ("" for none), and what it imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            assert not child.level, "imports say in full what they import"
            yield from ((inside, f"{child.module}.{alias.name}") for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from ((inside, alias.name) for alias in child.names)
        else:
            is_named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports_by_function(child, f"{inside}.{child.name}".lstrip(".") if is_named else inside)


def _by_function(name: str) -> list[tuple[str, str]]:
    return list(_imports_by_function(ast.parse(FILES[name].read_text(encoding="utf-8"))))


def _imports(name: str) -> set[str]:
    """The files that a file imports outside of methods that draw."""
    needed = {one for inside, one in _by_function(name) if DRAWS.isdisjoint(inside.split("."))}
    files = {one if one in FILES else one.rpartition(".")[0] for one in needed}
    return files & FILES.keys() - {"fxpipe"}  # which hands on the names of all, and has the version


def _circle(imports: dict[str, set[str]]) -> list[str]:
    """The files of one; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_run_one_way():
    imports = {name: _imports(name) for name in FILES if name != "fxpipe"}
    assert len(imports) > 150
    for name, needed in imports.items():
        inside = next((room for room in INSIDE if name.startswith(room)), None)
        imports[name] = {one for one in needed if one != name and (inside is None or not one.startswith(inside))}
    assert not _circle(imports)


def test_a_circle_is_found():
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])


# Who runs a step or computes how long it takes knows no pictures. What shows itself draws when it is asked to.
NO_DRAWING = ("fxpipe.runtime", "fxpipe.simulation")
DRAWING = "fxpipe.inspect"
DRAWS_WHEN_ASKED = {
    ("fxpipe.simulation.timeline", "HasTimeline.save_timeline"),
    ("fxpipe.simulation.timeline", "HasTimeline._repr_html_"),
    ("fxpipe.runtime.step_record", "StepRecord.save_trace"),
}


def _is_in(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def test_runtime_and_simulation_draw_only_where_they_are_asked_to():
    drawing = {
        (name, inside)
        for name in FILES
        if _is_in(name, *NO_DRAWING)
        for inside, needed in _by_function(name)
        if _is_in(needed, DRAWING)
    }
    assert drawing == DRAWS_WHEN_ASKED


# The compiler: from a model to a program. Of it the runtime may import, and why:
COMPILER = ("partitioning", "planning", "profiling", "rewriting", "tracing")
HANDED_OVER = {
    "fxpipe.rewriting.program": "stages as callables, and who sends what to whom: where compiler and runtime meet"
}


def _imports_of_compiler(name: str) -> set[str]:
    """What a file imports of the compiler, and of torch.fx: what walks or rewrites graphs."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    rooms = ("torch.fx", "fxpipe._torch.functions", *(f"fxpipe.{room}" for room in COMPILER))
    found = {needed for _, needed in _imports_by_function(tree) if _is_in(needed, *rooms)}
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= attributes & {"torch.fx"}
    return {one if one in FILES or one == "torch.fx" else one.rpartition(".")[0] for one in found}


def test_compiler_and_runtime_meet_in_the_program_and_nowhere_else():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert folders.issuperset(COMPILER), "a folder of the compiler has another name"
    runtime = {name: _imports_of_compiler(name) for name in FILES if name.startswith("fxpipe.runtime")}
    assert set().union(*runtime.values()) >= HANDED_OVER.keys(), "what nobody imports need not be allowed"
    past_the_wall = {name: found - HANDED_OVER.keys() for name, found in runtime.items()}
    assert not {name: found for name, found in past_the_wall.items() if found}


def test_what_is_handed_over_brings_no_compiler_with_it():
    for name in HANDED_OVER:
        assert not _imports_of_compiler(name)


def test_an_import_past_the_wall_is_found():
    assert "torch.fx" in _imports_of_compiler("fxpipe.rewriting.cut_points")
    assert "fxpipe.tracing.traced" in _imports_of_compiler("fxpipe.rewriting.build_stages")


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


def test_integrations_are_imported_by_those_who_use_them():
    program = "import sys, fxpipe; print({*sys.modules} & {'transformers', 'accelerate', 'lightning'})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
