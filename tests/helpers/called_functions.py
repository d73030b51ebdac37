"""Which functions of fxpipe run: an import hook has each note its call, so that it can be counted what models take.

    python -m helpers.called_functions zoo.processes  # runs a module in which calls are noted

Noted are dotted names as `fxpipe.utils.units.format_bytes`, and the name
with a `?` behind it once the function has returned something: neither None nor False, and no empty container.

The code is changed, and no wrapper put around it: another frame on the stack would be another line of the user's.
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "fxpipe"
CALL, RETURN = "__note_call__", "__note_return__"  # builtins of a process in which calls are noted
CONTAINERS = (tuple, list, dict, set, frozenset, str)

called: set[str] = set()


def install() -> None:
    """Has every function of fxpipe note its calls in `called`. To be called before fxpipe is imported."""
    assert PACKAGE not in sys.modules
    setattr(builtins, CALL, called.add)
    setattr(builtins, RETURN, _note_return)
    sys.meta_path.insert(0, _Finder())


def _note_return(name: str, value: Any) -> Any:
    # A tensor must not be asked for its truth, nor a size that is recorded.
    if value is not None and value is not False and (type(value) not in CONTAINERS or value):
        called.add(f"{name}?")
    return value


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = _NoteCalls(fullname).visit(ast.parse(self.get_data(self.path)))
        code: CodeType = compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)
        return code


class _NoteCalls(ast.NodeTransformer):
    """Begins each function by noting its call, and passes what it returns through `_note_return`."""

    def __init__(self, module: str):
        self.names = [module]
        self.function = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node, self.function)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        name = ".".join([*self.names, node.name])
        self._inside(node, name)
        place = 1 if ast.get_docstring(node, clean=False) is not None else 0
        first = node.body[min(place, len(node.body) - 1)]
        node.body.insert(place, _at(first, ast.parse(f"{CALL}({name!r})").body[0]))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is None:
            return node
        call = _at(node.value, ast.parse(f"{RETURN}({self.function!r})", mode="eval").body)
        call.args.append(self.visit(node.value))
        node.value = call
        return node

    def _inside(self, node: ast.AST, function: str) -> ast.AST:
        outer, self.function = self.function, function
        self.names.append(node.name)  # type: ignore[attr-defined]
        self.generic_visit(node)
        self.names.pop()
        self.function = outer
        return node


def _at(place: ast.AST, new: ast.AST) -> Any:
    for node in ast.walk(new):
        ast.copy_location(node, place)
    return new


if __name__ == "__main__":
    from helpers import called_functions  # this file is `__main__`, and what it notes would stay here

    called_functions.install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
