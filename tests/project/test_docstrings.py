"""What docstrings name exists: names in back ticks are of the package, of torch or of the docstring's own example."""

import ast
import builtins
import contextlib
import doctest
import importlib
import keyword
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from helpers.paths import ROOT
from torch import nn

FILES = sorted((ROOT / "fxpipe").rglob("*.py"))
FOLDERS = {path.parent for path in FILES}
NAME = re.compile(r"\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?|[\w/]+(?:\.py|/)")
OF_TORCH = (builtins, torch, torch.Tensor, nn, nn.Module, nn.functional, torch.fx, torch.optim, torch.distributed)
ACTION = re.compile(r"\d*[FRBWU]\d+")
# Inputs and dynamic sizes in examples; classes and arguments of torch that are not at its top.
EXTRA = "in_0 in_1 ids_dim1 batch_ids_dim1 foreach experimental_config SymNode register_backend"
EXTRA += " ScheduleInterleavedZeroBubble ScheduleZBVZeroBubble"


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) else None
        if text:
            yield node.body[0].lineno, text


@cache
def names_of_code() -> frozenset[str]:
    """The identifiers in the package, with parts of texts that name attributes, as in `getattr(x, "shape")`."""
    names = {*keyword.kwlist, *EXTRA.split(), *(part for path in FILES for part in (path.stem, path.parent.name))}
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        for value in vars(node).values():
            if isinstance(value, str) and re.fullmatch(r"[\w.,: =-]{1,120}", value):
                names.update(re.findall(r"\w+", value))
    return frozenset(names)


def exists(name: str, docstring: str) -> bool:
    if name.endswith((".py", "/")):
        return (ROOT / name).exists() or any(f"/{path}".endswith(f"/{name.rstrip('/')}") for path in {*FILES, *FOLDERS})
    name = name.strip(".()")
    example = "\n".join(line for line in docstring.splitlines() if line.startswith(("    ", ">>>")))
    if all(
        part in names_of_code()
        or ACTION.fullmatch(part) is not None
        or re.search(rf"\b{part}\b", example) is not None
        or any(hasattr(owner, part) for owner in OF_TORCH)
        for part in name.split(".")
    ):
        return True
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
        return True
    return False


def test_names_in_docstrings_exist():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: `{name}`"
        for path, tree in trees().items()
        for line, text in docstrings(tree)
        for name in re.findall(r"`([^`\n]+)`", text)
        if NAME.fullmatch(name) and not exists(name, text)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_name_that_is_gone_is_noticed():
    text = "As `order_of_rows` in `rows/order.py`.\n\n    encoder = Encoder()"
    assert exists("encoder", text)
    assert exists("micro_batch", text)
    assert exists("scheduling/actions.py", text)
    assert exists("torch.nn.Linear", text)
    assert not exists("order_of_rows", text)
    assert not exists("rows/order.py", text)


def test_examples_in_docstrings_print_what_they_say():
    examples = [path for path, tree in trees().items() if any(">>> " in text for _, text in docstrings(tree))]
    assert len(examples) > 15
    for path in examples:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert doctest.testmod(importlib.import_module(name)).failed == 0, name
