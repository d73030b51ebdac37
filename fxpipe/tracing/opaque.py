"""Shapes of what nodes make whose Python must run: modules kept whole, functions marked as leaves, hooks.

They read values, go over the samples, call libraries: on fake tensors with symbolic sizes this fails, or takes the size
of the example for the only one. So the graph runs on the example inputs for real, and such a node is called again on
its own arguments, with other numbers of samples: those at hand, repeated or left out. Each size of its results then is
a formula in the size that was varied.

    one size of the arguments is symbolic                 it varies
    several: they vary together, and the node runs        they are the same from now on
    several: only some can vary                           the others are fixed
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fxpipe.errors import TraceError
from fxpipe.thread_state import applied
from fxpipe.tracing.fitting import simplest, value_of
from fxpipe.tracing.snapshot import forked_random
from fxpipe.tracing.traced import WORKING, Traced, call, lookup

Call = tuple[tuple[Any, ...], dict[str, Any]]
MORE = (0, 1, 3)  # samples more than in the example


def is_opaque(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == "fxpipe.tracing.whole"


def real_calls(traced: Traced, leaves: Sequence[Any]) -> dict[fx.Node, Call]:
    """The arguments of all opaque nodes, from a run of the graph on real inputs; copies, as later nodes may write."""
    if not any(is_opaque(node) for node in traced.graph.nodes):
        return {}
    calls: dict[fx.Node, Call] = {}
    values: dict[fx.Node, Any] = {}
    with forked_random():
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                values[node] = leaves[traced.place_of(node)].detach().clone()
            elif node.op == "get_attr":
                values[node] = lookup(traced, node).detach().clone()
            elif node.op in WORKING:
                if is_opaque(node):
                    given = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    calls[node] = pytree.tree_map_only(torch.Tensor, torch.clone, given)
                with applied(node.meta["state"]), torch.no_grad():
                    values[node] = call(node, values.__getitem__)
    return calls


def symbolic_sizes(env: ShapeEnv, node: fx.Node, real: Call, fake: Call) -> list[Any]:
    """What an opaque node makes of `fake` arguments: for each tensor its sizes in theirs, and the tensor; else a value.

    `env` learns which of these sizes are the same, or fixed.
    """
    real_leaves, spec = pytree.tree_flatten(real)
    fake_leaves = pytree.tree_leaves(fake)
    symbols = _symbols(env, fake_leaves)
    hints = {symbol: int(size.node.hint) for symbol, size in symbols.items()}

    def made_at(varied: dict[sympy.Symbol, int]) -> list[Any]:
        numbers = hints | varied
        given = [_resized(r, f, numbers) for r, f in zip(real_leaves, fake_leaves, strict=True)]
        args, kwargs = pytree.tree_unflatten(given, spec)
        with applied(node.meta["state"]), torch.no_grad(), forked_random():
            made: list[Any] = pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
        return made

    for group in _groups([*symbols]):
        sizes = [hints[group[0]] + more for more in MORE] if group else [0]
        try:
            results = [made_at(dict.fromkeys(group, size)) for size in sizes]
        except Exception:
            if not group:
                raise
            continue
        for symbol, size in symbols.items():
            if symbol not in group:
                int(size)  # a guard, by which it is fixed
            else:
                torch._check(size == symbols[group[0]])
        return _with_sizes(node, results, sizes, symbols[group[0]] if group else 0)
    raise AssertionError  # the last group is empty


def _symbols(env: ShapeEnv, leaves: Sequence[Any]) -> dict[sympy.Symbol, Any]:
    """The symbols that the sizes among arguments hang on.

    Raises:
        TraceError: one hangs on values.
    """
    sizes = [s for leaf in leaves for s in (leaf.shape if isinstance(leaf, torch.Tensor) else [leaf])]
    found: dict[sympy.Symbol, Any] = {}
    for size in sizes:
        if isinstance(size, (torch.SymInt, torch.SymFloat)):
            for symbol in sorted(env.replace(size.node.expr).free_symbols, key=str):
                if size.node.hint is None:
                    raise TraceError("it is given a size that hangs on the values of tensors")
                found.setdefault(symbol, env.create_symintnode(symbol, hint=int(env.backed_var_to_val[symbol])))
    return found


def _groups(symbols: list[sympy.Symbol]) -> Iterator[list[sympy.Symbol]]:
    """Which sizes may vary together, the most first; none in the end."""
    for count in range(len(symbols), -1, -1):
        yield from map(list, itertools.combinations(symbols, count))


def _resized(real: Any, fake: Any, numbers: dict[sympy.Symbol, int]) -> Any:
    """An argument with other numbers of samples."""
    if isinstance(fake, (torch.SymInt, torch.SymFloat)):
        return _number(fake, numbers)
    if not isinstance(fake, torch.Tensor):
        return real
    real = real.clone()  # it may be written to
    for dim, size in enumerate(fake.shape):
        wanted = _number(size, numbers) if isinstance(size, torch.SymInt) else size
        if wanted != real.shape[dim]:
            real = real.index_select(dim, torch.arange(wanted, device=real.device) % real.shape[dim])
    return real


def _number(symbolic: Any, numbers: dict[sympy.Symbol, int]) -> Any:
    number = symbolic.node.shape_env.replace(symbolic.node.expr).subs(numbers)
    return int(number) if isinstance(symbolic, torch.SymInt) else float(number)


def _with_sizes(node: fx.Node, results: list[list[Any]], sizes: list[int], size: Any) -> list[Any]:
    made: list[Any] = []
    for versions in zip(*results, strict=True):
        if not isinstance(versions[0], torch.Tensor):
            made.append(versions[0])
            continue
        shape = []
        for numbers in zip(*(version.shape for version in versions), strict=True):
            formula = simplest(list(zip(sizes, numbers, strict=True)))
            if formula is None:
                raise TraceError(f"{node.name} makes tensors of sizes {numbers} from {sizes} samples")
            shape.append(value_of(formula, size))
        made.append((shape, versions[0]))
    return made
