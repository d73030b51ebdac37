"""A stage whose backward is split: its gradients of weights come not in B but later, in W.

It is split for the parameters that the stage uses only as the weight or the bias of nodes that `weight_gradients` can
split: linear, convolutions, matrix products, embeddings. A parameter that something else uses too (a norm of it in the
loss, a cast, a reparametrization) stays with B, and so do the nodes that use it and the other parameters of these: the
gradient of a parameter is then made in one piece and summed over its uses in the order of autograd, the last use first.

`x @ w.t()` is `linear(x, w)` if nothing else uses `w.t()`. Autograd adds such a gradient up when it comes through the
transposition, not through the product; so with more than one other use, where the order matters, `w` stays with B.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
ParameterNames = dict[fx.Node, str]  # of a stage, with their names in the model

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
_CONVOLUTIONS: dict[Any, tuple[OperatorKind, int, bool]] = {}  # function -> kind, dimensions, is it transposed
for _dims, _is_transposed in itertools.product((1, 2, 3), (False, True)):
    _name = f"conv_transpose{_dims}d" if _is_transposed else f"conv{_dims}d"
    _function, _packet = getattr(F, _name), getattr(_aten, _name)
    _overload = _packet.input if "input" in _packet.overloads() else _packet.default
    _kind = convolution_kind(_function, _dims, _is_transposed)
    _CONVOLUTIONS |= dict.fromkeys((_function, _overload), (_kind, _dims, _is_transposed))
_CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_TRANSPOSITIONS = {(0, 1), (1, 0), (-1, -2), (-2, -1)}


@dataclass(frozen=True, slots=True)
class SplitStageCode:
    """The code of a stage whose weights get their gradients in W: it takes a `WeightGradientTape` first."""

    run: fx.GraphModule
    split_parameters: frozenset[str]  # whose gradients W computes; none: the stage's own code, which takes no tape


def split_stage_backward(stage: Stage) -> SplitStageCode:
    """Splits the backward of a stage: of those parameters of which it can."""
    run = stage_code(stage)
    parameters = _parameters(stage, run.graph)
    uses = _splittable_nodes(run.graph, parameters)
    if not uses:
        return SplitStageCode(run, frozenset())
    split = fx.GraphModule({}, _with_splits(run.graph, uses), class_name=type(run).__name__)
    return SplitStageCode(split, frozenset(parameters[p] for use in uses.values() for p in use.parameters))


def stage_code(stage: Stage) -> fx.GraphModule:
    """The code of a stage, as `split_into_stages` wrote it."""
    assert isinstance(stage.run, fx.GraphModule)
    return stage.run


@dataclass(frozen=True, slots=True)
class SplittableNode:
    """A node, and how it is split."""

    parameters: tuple[fx.Node, ...]  # whose gradients W then computes
    reads: tuple[fx.Node, ...]  # as what it reads them: themselves, or one transposed
    make: Callable[[], Callable[..., Any]]  # what to call instead
    args: tuple[Any, ...]  # behind the tape
    kwargs: dict[str, Any]


def _parameters(stage: Stage, graph: fx.Graph) -> ParameterNames:
    """Returns the parameters of a stage that may require grad; not the buffers, which F changes."""
    attributes = zip((n for n in graph.nodes if n.op == "placeholder"), stage.attributes, strict=False)
    return {node: name for node, name in attributes if name not in stage.changed_buffers and name not in stage.assigns}


def _splittable_nodes(graph: fx.Graph, parameters: ParameterNames) -> dict[fx.Node, SplittableNode]:
    """Finds the nodes to split."""
    uses = {node: use for node in graph.nodes if (use := _splittable_node(node, parameters)) is not None}
    while True:
        reads = {read for use in uses.values() for read in use.reads}
        kept = {p for use in uses.values() for p in use.parameters if not _is_covered(p, uses, reads)}
        if not kept:
            return uses
        uses = {node: use for node, use in uses.items() if kept.isdisjoint(use.parameters)}


def _is_covered(parameter: fx.Node, uses: dict[fx.Node, SplittableNode], reads: set[fx.Node]) -> bool:
    """Returns whether every use of the parameter is split, and its gradient is summed in the order of the uses."""
    transposed = [user for user in parameter.users if user not in uses]
    if any(len(user.users) > 1 or user not in reads for user in transposed):
        return False
    return not transposed or len(parameter.users) <= 2


def _with_splits(graph: fx.Graph, uses: dict[fx.Node, SplittableNode]) -> fx.Graph:
    new = fx.Graph()
    taken, name = {node.name for node in graph.nodes}, "tape"
    while name in taken:  # nodes keep their names, by which the place of an exception is found
        name = f"_{name}"
    tape = new.placeholder(name)
    copies: dict[fx.Node, fx.Node] = {}
    gone = {read for use in uses.values() for read in use.reads if read not in use.parameters}
    for node in graph.nodes:
        if node in gone:
            continue
        use = uses.get(node)
        if use is None:
            copies[node] = new.node_copy(node, copies.__getitem__)
        else:
            args, kwargs = fx.map_arg((use.args, use.kwargs), copies.__getitem__)
            copies[node] = new.create_node("call_function", use.make(), (tape, *args), kwargs, name=node.name)
            copies[node].meta = dict(node.meta)
    new.lint()
    return new


# -- the split of each kind of node ------------------------------------------------------------------------------------


def _splittable_node(node: fx.Node, parameters: ParameterNames) -> SplittableNode | None:
    if node.op not in ("call_function", "call_method"):
        return None
    if any(info(user).opaque is not None for user in node.users):
        return None  # its Python may put a hook on the value, and W's gradient would be the one before the hook
    function: Any = node.target
    if function in (F.linear, _aten.linear.default):
        arguments = _bound_arguments(node, ("input", "weight", "bias"))
        return None if arguments is None else _split_product(node, parameters, LINEAR, *arguments.values())
    operands = () if node.kwargs else node.args
    if function in _PRODUCTS and len(operands) == 2:
        return _split_product(node, parameters, MATMUL, *operands, None)
    if function in (torch.addmm, _aten.addmm.default, "addmm") and len(operands) == 3:
        return _split_product(node, parameters, ADDMM, operands[1], operands[2], operands[0])
    if function in (torch.bmm, _aten.bmm.default, "bmm") and len(operands) == 2 and _static_rank(operands[1]) == 3:
        return _split_operands(node, parameters, BMM, *operands, None)
    if function in _CONVOLUTIONS:
        return _split_convolution(node, parameters, function)
    if function is F.embedding or function is _aten.embedding.default:
        place = 1 if function is F.embedding else 0
        table = node.args[place] if len(node.args) > place else None
        if not isinstance(table, fx.Node) or table not in parameters or node.args[1 - place] is table:
            return None
        make = functools.partial(split_embedding, function, parameters[table], place)
        return SplittableNode((table,), (table,), make, node.args, node.kwargs)
    return None


def _split_product(
    node: fx.Node, parameters: ParameterNames, kind: OperatorKind, x: Any, w: Any, b: Any
) -> SplittableNode | None:
    """A product with a parameter, or with one transposed."""
    if _static_rank(w) != 2:
        return None
    if b is None and w not in parameters and (parameter := _transposed_parameter(w, parameters)) is not None:
        use = _split_operands(node, parameters, MATMUL if kind is LINEAR else LINEAR, x, parameter, None)
        return None if use is None else replace(use, reads=(w,))
    return _split_operands(node, parameters, kind, x, w, b)


def _split_operands(
    node: fx.Node, parameters: ParameterNames, kind: OperatorKind, x: Any, w: Any, b: Any, options: tuple[Any, ...] = ()
) -> SplittableNode | None:
    """Splits a node by its operands; None where a node makes `w` or `b`, or where one parameter has two parts in it."""
    used = [n for n in (w, b) if n is not None]
    if not isinstance(x, fx.Node) or x in used or w is b or not all(n in parameters for n in used):
        return None
    names = parameters[w], None if b is None else parameters[b]
    casts = any(autocast.enabled for autocast in state_of(node).autocast)
    make = functools.partial(split_node, kind, names, casts)
    return SplittableNode(tuple(used), tuple(used), make, (x, w, b, *options), {})


def _split_convolution(
    node: fx.Node, parameters: ParameterNames, function: Callable[..., Any]
) -> SplittableNode | None:
    kind, dims, transposed = _CONVOLUTIONS[function]
    arguments = _bound_arguments(node, _TRANSPOSED_ARGUMENTS if transposed else _CONVOLUTION_ARGUMENTS)
    if arguments is None or not isinstance(arguments["weight"], fx.Node) or _is_complex(arguments["weight"]):
        return None  # complex: made of three real ones
    shape = _static_shape(arguments["weight"])
    if shape is None or len(shape) != dims + 2:
        return None
    stride, dilation = _per_dimension(arguments["stride"], dims, 1), _per_dimension(arguments["dilation"], dims, 1)
    padding, output_padding = arguments["padding"], _per_dimension(arguments.get("output_padding"), dims, 0)
    groups = 1 if arguments["groups"] is None else arguments["groups"]
    if padding == "valid":
        padding = 0
    elif padding == "same" and dilation is not None:
        both = [d * (k - 1) for d, k in zip(dilation, shape[2:], strict=True)]
        padding = None if any(p % 2 for p in both) else [p // 2 for p in both]  # odd: torch pads the input before
        if padding is None:
            return None
    padding = _per_dimension(padding, dims, 0)
    if stride is None or dilation is None or padding is None or output_padding is None or not isinstance(groups, int):
        return None
    options = (stride, padding, dilation, output_padding, groups)
    return _split_operands(node, parameters, kind, arguments["input"], arguments["weight"], arguments["bias"], options)


def _bound_arguments(node: fx.Node, names: Sequence[str]) -> dict[str, Any] | None:
    """The node's arguments by name, None for those that are not given."""
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | node.kwargs


def _per_dimension(value: Any, dims: int, default: int) -> list[int] | None:
    """One number for each dimension; None where they are computed."""
    numbers = [default] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not all(isinstance(k, int) for k in numbers):
        return None
    return list(numbers) * dims if len(numbers) == 1 else list(numbers)


def _transposed_parameter(node: Any, parameters: ParameterNames) -> fx.Node | None:
    """The parameter of which this node is the transposition."""
    if not isinstance(node, fx.Node) or not node.args or node.args[0] not in parameters or node.kwargs:
        return None
    is_it = (
        (node.target in ("t", _aten.t.default) and len(node.args) == 1)
        or (node.target is getattr and node.args[1] in ("T", "mT"))
        or (
            node.target in ("transpose", torch.transpose, _aten.transpose.int)
            and tuple(node.args[1:]) in _TRANSPOSITIONS
        )
        or (node.target is torch.t)
    )
    parameter = node.args[0]
    return parameter if is_it and isinstance(parameter, fx.Node) else None


def _static_shape(node: Any) -> tuple[int, ...] | None:
    """Returns the shape of a parameter, or of what is made of one; None where it depends on sizes of inputs."""
    shapes = info(node).full_shapes if isinstance(node, fx.Node) else None
    if not shapes or any(size.free_symbols for size in shapes[0].shape):
        return None
    return tuple(int(size) for size in shapes[0].shape)


def _static_rank(node: Any) -> int | None:
    shape = _static_shape(node)
    return None if shape is None else len(shape)


def _is_complex(node: fx.Node) -> bool:
    return bool(info(node).shapes[0].dtype.is_complex)
