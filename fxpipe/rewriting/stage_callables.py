"""The callables that run stages: their plain code, or compiled by `torch.compile`; backward whole or split.

The backward is split if a schedule has W (`split_backward`). For the compiler, random nodes are replaced
(`rng_compiled`). To autograd a compiled stage is one node, so B computes all of its gradients and W none.

A stage compiles at its first F, in its worker, since the compiler fixes the number of threads of an operation; one
stage at a time. Uneven micro-batches have two sizes, so a stage compiles twice for a graph, the second time for any
size. Dynamic sizes of the graph are dynamic for the compiler from the start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import fx

from fxpipe._torch.tools import compile_backward_at_once, mark_dynamic_dims
from fxpipe.rewriting.program import Stage, StageCallable
from fxpipe.rewriting.split_backward import split_stage_backward
from fxpipe.tracing.node_info import info
from fxpipe.utils.locks import DISPATCH_MODE_LOCK, step_block

StageFunction = Callable[..., tuple[Any, ...]]


def make_stage_callable(stage: Stage, is_split: bool, options: Mapping[str, Any] | None) -> StageCallable:
    """Makes the callable of a stage.

    Args:
        is_split: compute the gradients of weights in W, not in B, unless it is compiled.
        options: keywords of `torch.compile`; None: it is not compiled.
    """
    code, parameters = stage.run, frozenset[str]()
    assert isinstance(code, fx.GraphModule)
    if options is None:
        if is_split:
            code, parameters = split_stage_backward(stage, code)
        # Not the module: fx's call drops the traceback of a failing builtin, and with it the node.
        return StageCallable(code.forward, parameters, functools.partial(_failing_node, code))
    from fxpipe.rewriting.rng_compiled import with_compilable_rng  # registers an operator

    compiled: StageFunction = torch.compile(with_compilable_rng(code).forward, **options)
    dynamic = {} if options.get("dynamic") is False else _dynamic_dims(code.graph, stage)
    function = _serialized(compiled, len(stage.attributes), dynamic)
    return StageCallable(function, parameters, functools.partial(_failing_node, code))


def _dynamic_dims(graph: fx.Graph, stage: Stage) -> dict[int, tuple[int, ...]]:
    """Finds, by place among the arguments of a stage, dimensions whose sizes are dynamic in its graph."""
    received = list(graph.find_nodes(op="placeholder"))[len(stage.attributes) :]
    symbols = {
        symbol
        for node in graph.nodes
        for full, example in zip(info(node).full_shapes, info(node).shapes, strict=True)
        for sizes in zip(full.shape, example.shape, strict=True)
        for symbol in sizes[0].free_symbols - sizes[1].free_symbols
    }
    shapes = [info(node).full_shapes[0].shape if len(info(node).full_shapes) == 1 else () for node in received]
    dims = {
        place: tuple(dim for dim, size in enumerate(shape) if size.free_symbols & symbols)
        for place, shape in enumerate(shapes, len(stage.attributes))
    }
    return {place: those for place, those in dims.items() if those}


def _failing_node(code: fx.GraphModule, error: BaseException) -> str:
    """Returns the node in whose line of the stage's code an exception was raised; "" if in none."""
    function = getattr(type(code).forward, "__code__", None)
    traceback: Any = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is function:
            line: str = code.code.split("\n")[traceback.tb_lineno - 1]
            return line.strip().split(" = ")[0].split(":")[0]
        traceback = traceback.tb_next
    return ""


def _serialized(code: StageFunction, attributes: int, dynamic: Mapping[int, tuple[int, ...]]) -> StageFunction:
    """Returns code that compiles only while no other does. `dynamic`: by argument, the dimensions of any size."""
    seen = set[Hashable]()

    def call(*args: Any) -> tuple[Any, ...]:
        # Attributes do not change, except for `requires_grad`.
        kind = (
            torch.is_grad_enabled(),
            *(a.requires_grad for a in args[:attributes] if isinstance(a, torch.Tensor)),
            *map(_compile_key, args[attributes:]),
        )
        if kind in seen:
            return code(*args)
        for place, dims in dynamic.items():
            if isinstance(args[place], torch.Tensor):
                mark_dynamic_dims(args[place], dims)
        # Backward, too: otherwise it would be compiled when it first runs.
        with DISPATCH_MODE_LOCK, step_block, compile_backward_at_once():
            result = code(*args)
        seen.add(kind)
        return result

    return call


def _compile_key(value: Any) -> Any:
    """Returns the properties of a value that the compiler distinguishes."""
    if not isinstance(value, torch.Tensor):
        return type(value), value if isinstance(value, int) else None
    strides = value.stride() if value.layout == torch.strided else None
    return value.dtype, value.shape, strides, value.requires_grad, strides is None or value.storage_offset() == 0
