"""Formats a graph as readable text."""

from __future__ import annotations

import functools
import inspect
import os
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxpipe._torch.functions import opname
from fxpipe._torch.operators import BUILTIN_MODULE, MODULE_ALIASES
from fxpipe.tracing.node_info import info
from fxpipe.tracing.source_lines import UNKNOWN_LINE
from fxpipe.tracing.traced import CALL_OPS
from fxpipe.utils.text_table import text_table

_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "div": "/", "floordiv": "//", "pow": "**", "matmul": "@",
    "mod": "%", "and": "&", "or": "|", "xor": "^", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "iadd": "+=", "isub": "-=", "imul": "*=",
}  # fmt: skip


def short_source_line(node: fx.Node) -> str:
    """Returns the user's source line without directories: `unet.py:31`; "" if unknown."""
    line = info(node).source
    return "" if line == UNKNOWN_LINE else os.path.basename(line)


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else info(value).attribute or value.name
    if isinstance(value, slice):
        ends = ["" if v is None else _text(v) for v in (value.start, value.stop)]
        return ":".join(ends + ([_text(value.step)] if value.step is not None else []))
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, torch.device):
        return repr(str(value))
    return "..." if value is Ellipsis else repr(value)


@functools.cache
def _defaults(function: Any) -> dict[str, Any]:
    name = getattr(function, "__name__", "")
    if re.fullmatch(r"conv(_transpose)?\dd", name):  # built in, and hard to read without names
        first = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0}
        if "transpose" in name:
            return {**first, "output_padding": 0, "groups": 1, "dilation": 1}
        return {**first, "dilation": 1, "groups": 1}
    if getattr(F, name, None) is function:  # max_pool2d and others choose one of two functions
        function = getattr(F, f"_{name}", function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return {}
    return {name: p.default for name, p in parameters.items()}


def _is_default(value: Any, default: Any) -> bool:
    if type(value) is tuple and value and type(default) is int:  # a stride for each dimension
        return all(_is_default(item, default) for item in value)
    return type(value) is type(default) and bool(value == default)


def node_expression(node: fx.Node) -> str:
    """Formats an operation as Python, without arguments that equal their defaults."""
    positional, named = list(node.args), dict(node.kwargs)
    if node.op == "call_function":
        defaults = _defaults(node.target)
        names = list(defaults)
        if "stride" in names and "weight" in names:
            named = dict(zip(names[3:], positional[3:], strict=False)) | named
            del positional[3:]
        while len(positional) > 1:
            default = defaults[names[len(positional) - 1]] if len(positional) <= len(names) else None
            if not _is_default(positional[-1], default):
                break
            positional.pop()
        named = {key: v for key, v in named.items() if key not in defaults or not _is_default(v, defaults[key])}
    args = [_text(a) for a in positional]
    keywords = [f"{key}={_text(value)}" for key, value in named.items()]
    name = node.target if isinstance(node.target, str) else opname(node.target)
    home = getattr(node.target, "__module__", None) or ""
    if node.op == "call_method" or home == "_operator":
        plain = name.strip("_") if home == "_operator" or name.startswith("__") else name  # `x.add_(1)` is no sum
        if plain in _SYMBOLS and len(args) == 2 and not keywords:
            return f"{args[0]} {_SYMBOLS[plain]} {args[1]}"
        if plain == "getitem" or name == "setitem":
            index = node.args[1]
            inside = ", ".join(map(_text, index)) if isinstance(index, tuple) and index else _text(index)
            return f"{args[0]}[{inside}]" + (f" = {args[2]}" if name == "setitem" else "")
    if node.op == "call_method":
        return f"{args[0]}.{name}({', '.join([*args[1:], *keywords])})"
    if node.target is getattr:
        return f"{args[0]}.{node.args[1]}"
    prefix = MODULE_ALIASES.get(home, "torch" if home.startswith(BUILTIN_MODULE) else "")
    return f"{f'{prefix}.' if prefix else ''}{name}({', '.join([*args, *keywords])})"


def node_table(graph: fx.Graph) -> str:
    """Formats every node with its shape in the batch size `b`, module path and source line."""
    rows = [
        (
            n.name,
            "placeholder" if n.op == "placeholder" else node_expression(n),
            ", ".join(map(str, info(n).shapes)) or ("" if info(n).number is None else str(info(n).number)),
            info(n).module,
            short_source_line(n),
        )
        for n in graph.nodes
        if n.op in (*CALL_OPS, "placeholder")
    ]
    headers = ("node", "computes", "makes", "module", "source")
    return text_table(rows, headers, left=headers, keys=len(headers))  # all columns, for searching
