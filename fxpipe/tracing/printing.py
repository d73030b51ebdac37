"""A graph as text for people."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from tabulate import tabulate
from torch import fx

from fxpipe.tracing.traced import WORKING, Traced

# How people write the modules that torch functions live in.
_SHORT = {"torch.nn.functional": "F", "torch": "torch", "torch._C._nn": "F", "torch.functional": "torch", "math": "math"}
_OPERATORS = {"getitem": "{}[{}]", "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "floordiv": "{} // {}", "mod": "{} % {}"}
_SYMBOLS = {
    "__add__": "+", "__sub__": "-", "__mul__": "*", "__truediv__": "/", "__floordiv__": "//", "__pow__": "**",
    "__matmul__": "@", "__mod__": "%", "__and__": "&", "__or__": "|", "__xor__": "^", "__eq__": "==", "__ne__": "!=",
    "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=", "__iadd__": "+=", "__isub__": "-=", "__imul__": "*=",
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "pow": "**",
}  # fmt: skip


def source_of(node: fx.Node) -> str:
    """The user's source line, short: `unet.py:31`."""
    return os.path.basename(str(node.meta.get("source", "")))


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else str(value.meta.get("text", value.name))
    if isinstance(value, slice):
        ends = ["" if v is None else _text(v) for v in (value.start, value.stop)]
        return ":".join(ends + ([_text(value.step)] if value.step is not None else []))
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    return "..." if value is Ellipsis else repr(value)


def _index(value: Any) -> str:
    return ", ".join(map(_text, value)) if isinstance(value, tuple) and value else _text(value)


@functools.cache
def _defaults(function: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return {}
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def expression(node: fx.Node) -> str:
    """What a working node computes, as one would write it: without arguments that are the default."""
    defaults = {} if isinstance(node.target, str) else _defaults(node.target)
    args = [_text(a) for a in node.args]
    keywords = [
        f"{key}={_text(value)}"
        for key, value in node.kwargs.items()
        if isinstance(value, fx.Node) or key not in defaults or defaults[key] != value
    ]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if node.op == "call_method":
        if name in _SYMBOLS and len(args) == 2 and not keywords:
            return f"{args[0]} {_SYMBOLS[name]} {args[1]}"
        if name == "__getitem__":
            return f"{args[0]}[{_index(node.args[1])}]"
        return f"{args[0]}.{name}({', '.join([*args[1:], *keywords])})"
    home = getattr(node.target, "__module__", None) or ""
    if home == "_operator" and name == "setitem":
        return f"{args[0]}[{_index(node.args[1])}] = {args[2]}"
    if home == "_operator" and name in _OPERATORS:
        return _OPERATORS[name].format(args[0], _index(node.args[1]))
    if node.target is getattr:
        return f"{args[0]}.{node.args[1]}"
    prefix = f"{_SHORT[home]}." if home in _SHORT else ("torch." if home.startswith("torch._C") else "")
    return f"{prefix}{name}({', '.join([*args, *keywords])})"


def graph_table(traced: Traced) -> str:
    """Every node with its shape in the batch size `b`, module path and source line."""
    rows = [
        (
            n.name,
            expression(n) if n.op in WORKING else n.op,
            " ".join(map(str, n.meta.get("shapes", ()))) or str(n.meta.get("number", "")),
            n.meta.get("module", ""),
            source_of(n),
        )
        for n in traced.graph.nodes
        if n.op in (*WORKING, "placeholder")
    ]
    head = f"{type(traced.model).__name__}: {len(traced.nodes)} nodes, traced by {traced.tracer}"
    return head + "\n" + tabulate(rows, headers=("node", "computes", "makes", "module", "source"))
