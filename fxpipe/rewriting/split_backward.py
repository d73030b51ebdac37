"""A stage with split backward: gradients of weights are computed not in B but later, in W.

W takes the parameters that the stage uses only as the weight or the bias of nodes that `weight_gradients` can split:
linear, convolutions, matrix products, embeddings. A parameter with another use (a norm of it in the loss, a cast, a
reparametrization) stays in B, and so do the nodes that use it and their other parameters: a gradient is computed either
in B or in W, and summed over its uses in autograd's order, the last use first.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxpipe.rewriting.program import Stage
from fxpipe.rewriting.weight_gradients import (
    ADDMM,
    BMM,
    LINEAR,
    MATMUL,
    OperatorKind,
    convolution_kind,
    split_embedding,
    split_node,
)
from fxpipe.tracing.node_info import info, state_of

_aten = torch.ops.aten
ParameterNames = dict[fx.Node, str]  # parameters of a stage -> their names in the model

_PRODUCTS = {
    torch.matmul,
    operator.matmul,
    torch.mm,
    _aten.matmul.default,
    _aten.mm.default,
    "matmul",
    "mm",
    "__matmul__",
}
_CONVOLUTIONS: dict[Any, tuple[OperatorKind, int, bool]] = {}  # function -> kind, dimensions, whether it is transposed
for _dims, _is_transposed in itertools.product((1, 2, 3), (False, True)):
    _name = f"conv_transpose{_dims}d" if _is_transposed else f"conv{_dims}d"
    _function, _packet = getattr(F, _name), getattr(_aten, _name)
    _overload = _packet.input if "input" in _packet.overloads() else _packet.default
    _kind = convolution_kind(_function, _is_transposed)
    _CONVOLUTIONS |= dict.fromkeys((_function, _overload), (_kind, _dims, _is_transposed))
_CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def split_stage_backward(stage: Stage, run: fx.GraphModule) -> tuple[fx.GraphModule, frozenset[str]]:
    """Splits the backward of a stage, whose code is `run`, for all parameters that allow it.

    Returns its code, which takes a `WeightGradientTape` first, and the parameters whose gradients W computes; if there
    are none, the code is the stage's, without a tape.
    """
    # Parameters that may require grad, without buffers that F changes.
    attributes = zip((n for n in run.graph.nodes if n.op == "placeholder"), stage.attributes, strict=False)
    parameters = {node: name for node, name in attributes if name not in stage.changes}
    uses = {node: use for node in run.graph.nodes if (use := _splittable_node(node, parameters)) is not None}
    while True:
        split = {p for use in uses.values() for p in use.parameters}
        kept = {p for p in split if not uses.keys() >= p.users.keys()}
        if not kept:
            break
        uses = {node: use for node, use in uses.items() if kept.isdisjoint(use.parameters)}
    if not uses:
        return run, frozenset()
    code = fx.GraphModule({}, _with_splits(run.graph, uses), class_name=type(run).__name__)
    return code, frozenset(parameters[p] for p in split)


@dataclass(frozen=True, slots=True)
class SplittableNode:
    """A node to split, and its replacement."""

    parameters: tuple[fx.Node, ...]  # W computes their gradients
    make: Callable[[], Callable[..., Any]]  # makes the function to call instead
    args: tuple[Any, ...]  # after the tape
    kwargs: dict[str, Any]


def _with_splits(graph: fx.Graph, uses: dict[fx.Node, SplittableNode]) -> fx.Graph:
    new = fx.Graph()
    taken, name = {node.name for node in graph.nodes}, "tape"
    while name in taken:  # node names are kept, to locate exceptions
        name = f"_{name}"
    tape = new.placeholder(name)
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        use = uses.get(node)
        if use is None:
            copies[node] = new.node_copy(node, copies.__getitem__)
        else:
            args, kwargs = fx.map_arg((use.args, use.kwargs), copies.__getitem__)
            copies[node] = new.create_node("call_function", use.make(), (tape, *args), kwargs, name=node.name)
            copies[node].meta = dict(node.meta)
    new.lint()
    return new


def _splittable_node(node: fx.Node, parameters: ParameterNames) -> SplittableNode | None:
    if node.op not in ("call_function", "call_method"):
        return None
    if any(info(user).opaque is not None for user in node.users):
        return None  # opaque Python may register a hook on the value, and W would get the gradient before the hook
    function: Any = node.target
    if function in (F.linear, _aten.linear.default):
        arguments = _bound_arguments(node, ("input", "weight", "bias"))
        return None if arguments is None else _split_operands(node, parameters, LINEAR, *arguments.values())
    operands = () if node.kwargs else node.args
    if function in _PRODUCTS and len(operands) == 2:
        return _split_operands(node, parameters, MATMUL, *operands, None)
    if function in (torch.addmm, _aten.addmm.default, "addmm") and len(operands) == 3:
        return _split_operands(node, parameters, ADDMM, operands[1], operands[2], operands[0])
    if function in (torch.bmm, _aten.bmm.default, "bmm") and len(operands) == 2:
        return _split_operands(node, parameters, BMM, *operands, None, rank=3)
    if function in _CONVOLUTIONS:
        return _split_convolution(node, parameters, *_CONVOLUTIONS[function])
    if function is F.embedding or function is _aten.embedding.default:
        place = 1 if function is F.embedding else 0
        table = node.args[place] if len(node.args) > place else None
        if not isinstance(table, fx.Node) or table not in parameters or node.args[1 - place] is table:
            return None
        make = functools.partial(split_embedding, function, parameters[table], place)
        return SplittableNode((table,), make, node.args, node.kwargs)
    return None


def _split_operands(
    node: fx.Node,
    parameters: ParameterNames,
    kind: OperatorKind,
    x: Any,
    w: Any,
    b: Any,
    options: tuple[Any, ...] = (),
    rank: int = 2,
) -> SplittableNode | None:
    """Splits a node by its operands; None if `w`, of this rank, or `b` is not a parameter, or one occurs twice."""
    used = [n for n in (w, b) if n is not None]
    if not isinstance(x, fx.Node) or x in used or w is b or not all(n in parameters for n in used):
        return None
    shapes = info(w).full_shapes
    if not shapes or len(shapes[0].shape) != rank or any(size.free_symbols for size in shapes[0].shape):
        return None
    names = parameters[w], None if b is None else parameters[b]
    casts = any(autocast.enabled for autocast in state_of(node).autocast)
    make = functools.partial(split_node, kind, names, casts)
    return SplittableNode(tuple(used), make, (x, w, b, *options), {})


def _split_convolution(
    node: fx.Node, parameters: ParameterNames, kind: OperatorKind, dims: int, transposed: bool
) -> SplittableNode | None:
    arguments = _bound_arguments(node, _TRANSPOSED_ARGUMENTS if transposed else _CONVOLUTION_ARGUMENTS)
    if arguments is None or not all(isinstance(arguments[name], fx.Node) for name in ("input", "weight")):
        return None
    shapes = [*info(arguments["input"]).shapes, *info(arguments["weight"]).shapes]
    if len(shapes) != 2 or any(shape.dtype.is_complex or len(shape.shape) != dims + 2 for shape in shapes):
        return None  # complex convolutions consist of three real ones; or the input is a single sample
    stride, dilation = _per_dimension(arguments["stride"], dims, 1), _per_dimension(arguments["dilation"], dims, 1)
    padding, output_padding = arguments["padding"], _per_dimension(arguments.get("output_padding"), dims, 0)
    if padding == "same" and dilation is not None:
        both = [d * (k - 1) for d, k in zip(dilation, shapes[1].shape[2:], strict=True)]
        if not any(p % 2 for p in both):  # else torch pads the input first
            padding = [int(p) // 2 for p in both]
    padding = _per_dimension(0 if padding == "valid" else padding, dims, 0)
    groups = 1 if arguments["groups"] is None else arguments["groups"]
    if stride is None or dilation is None or padding is None or output_padding is None or not isinstance(groups, int):
        return None
    options = (stride, padding, dilation, output_padding, groups)
    operands = arguments["input"], arguments["weight"], arguments["bias"]
    return _split_operands(node, parameters, kind, *operands, options, dims + 2)


def _bound_arguments(node: fx.Node, names: Sequence[str]) -> dict[str, Any] | None:
    """Returns the node's arguments by name, None for missing ones."""
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | node.kwargs


def _per_dimension(value: Any, dims: int, default: int) -> list[int] | None:
    """Returns a number for each dimension; None if they are computed, or are a name."""
    numbers = [default] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not all(isinstance(k, int) for k in numbers):
        return None
    return list(numbers) * dims if len(numbers) == 1 else list(numbers)
