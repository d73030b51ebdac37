"""A stage with split backward: gradients of weights are computed not in B but later, in W.

W takes the parameters that the stage uses only as the weight or the bias of nodes that can be split: linear,
convolutions, matrix products, embeddings. A parameter with another use (a norm of it in the loss, a cast, a
reparametrization) stays in B, and so do the nodes that use it and their other parameters: a gradient is computed either
in B or in W, and summed over its uses in autograd's order, the last use first.

A split node runs as before, but on a detached weight, so that autograd does not see the weight. The tape gets the
gradient edge of its output, and a function from the gradient at this edge to the gradients of weight and bias:

    F    y = F.linear(x, w.detach(), b.detach())      on the tape: the edge of y, x
    B    asks autograd for the gradients of received values, of all other parameters, and at the edges
    W    gradient.t() @ x

Only x, which autograd would also keep, and the gradient at the edge are kept. W runs the kernels of autograd's formulas
on operands of the same strides, so the gradients have the same bits. If x requires no gradient, the node is unchanged,
and W runs its autograd backward.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd.graph import GradientEdge

from fxpipe._torch.autograd import base_of, version_of
from fxpipe._torch.operators import unsafe_view
from fxpipe.rewriting.program import Stage, WeightGradientTape, WeightGradientTask
from fxpipe.tracing.node_info import info, state_of

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # x, the weight and the bias
WeightBiasGradients = tuple[torch.Tensor | None, torch.Tensor | None]  # gradients of the weight and of the bias


class OperatorResult(NamedTuple):
    value: torch.Tensor
    core: torch.Tensor  # the result of the autograd node, with the same memory: `value` may be a view of it
    x: torch.Tensor | None  # input for the gradients of weight and bias; None: only the arriving gradient is needed


class OperatorKind(NamedTuple):
    """A kind of node: its operands are `x`, the weight `w` and the bias `b`, then constant options."""

    name: str
    run: Callable[..., OperatorResult]  # (x, w, b, wants w, *options); `w` may be detached
    weight_gradients: Callable[..., WeightBiasGradients]  # (gradient, x, w, b, wants w, wants b, *options)


def _product(
    function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, wants_w: bool
) -> OperatorResult:
    bias = () if b is None else (b,)
    # `matmul` copies `x` if it has gaps and the second operand requires grad.
    if function in (F.linear, torch.matmul) and wants_w and x.dim() > 2 and not x.is_contiguous():
        flat = _as_matrix(x)
        y = function(flat, w)
        y = unsafe_view(y, (*x.shape[:-1], y.shape[-1]))
        if b is not None:
            y = y.add_(b)
        return OperatorResult(y, y, flat)
    y = function(x, w, *bias)
    base = base_of(y)  # `linear` returns a view of its product
    return OperatorResult(y, y if base is None else base, x if wants_w else None)


def _linear_gradients(
    gradient: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, wants_w: bool, wants_b: bool
) -> WeightBiasGradients:
    # Autograd selects by the strides of the second operand (`mm_mat2_backward` in FunctionsManual.cpp), here `w.t()`.
    w_gradient = None
    if wants_w and w.stride() == (w.shape[1], 1):
        w_gradient = _as_matrix(gradient).t().mm(_as_matrix(x).conj())
    elif wants_w:
        w_gradient = _as_matrix(x).t().conj().mm(_as_matrix(gradient)).t()
    return w_gradient, gradient.sum_to_size(b.shape) if wants_b and b is not None else None


def _matmul_gradients(
    gradient: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, wants_w: bool, wants_b: bool
) -> WeightBiasGradients:
    of_transposed, of_b = _linear_gradients(gradient, x, w.t(), b, wants_w, wants_b)
    return None if of_transposed is None else of_transposed.t(), of_b


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


LINEAR = OperatorKind("linear", functools.partial(_product, F.linear), _linear_gradients)
MATMUL = OperatorKind("matmul", functools.partial(_product, torch.matmul), _matmul_gradients)
ADDMM = OperatorKind("addmm", functools.partial(_product, lambda x, w, b: torch.addmm(b, x, w)), _matmul_gradients)
BMM = OperatorKind(
    "bmm",
    functools.partial(_product, torch.bmm),
    lambda gradient, x, *_: (x.transpose(1, 2).conj().bmm(gradient), None),
)


def convolution_kind(function: Callable[..., torch.Tensor], transposed: bool) -> OperatorKind:
    """Makes the kind of `function`; options: stride, padding, dilation, output padding (lists), groups."""

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, wants_w: bool, *options: Any) -> OperatorResult:
        stride, padding, dilation, output_padding, groups = options
        more = (output_padding, groups, dilation) if transposed else (dilation, groups)
        y = function(x, w, b, stride, padding, *more)
        return OperatorResult(y, y, x)

    def weight_gradients(
        gradient: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        b: torch.Tensor | None,
        wants_w: bool,
        wants_b: bool,
        *options: Any,
    ) -> WeightBiasGradients:
        stride, padding, dilation, output_padding, groups = options
        sizes = None if b is None else list(b.shape)
        _, of_w, of_b = torch.ops.aten.convolution_backward(
            *(gradient, x, w, sizes, stride, padding, dilation, transposed, output_padding, groups),
            [False, wants_w, wants_b],
        )
        return of_w, of_b

    return OperatorKind(function.__name__, run, weight_gradients)


def split_node(kind: OperatorKind, names: tuple[str, str | None], casts: bool) -> Callable[..., torch.Tensor]:
    """Makes a split node: a function of (tape, x, weight, bias, *options). Without a tape it runs the plain node.

    Args:
        names: the names of the weight and the bias.
        casts: the node ran under autocast, so W also runs backward through the cast of the weight.
    """
    w_name, b_name = names[0], names[1] or ""
    by_wants = {(True, True): (w_name, b_name), (True, False): (w_name,), (False, True): (b_name,)}
    cast: Callable[..., Operands] = cast_operands if casts else lambda *operands: operands

    def call(
        tape: WeightGradientTape | None, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *options: Any
    ) -> torch.Tensor:
        wants = wants_w, wants_b = w.requires_grad, b is not None and b.requires_grad
        if tape is None or not (wants_w or wants_b) or not torch.is_grad_enabled():
            return kind.run(*cast(x, w, b), wants_w, *options).value
        if not x.requires_grad:
            ran = kind.run(*cast(x, w, b), wants_w, *options)
            edge = _gradient_edge(ran.core)
            weights = [t for t in (w, b) if t is not None and t.requires_grad]
            tape.note(edge, _autograd_task(by_wants[wants], edge, weights))
            return ran.value
        own_x, own_w, own_b = cast(x, tape.detached(w_name, w), None if b is None else tape.detached(b_name, b))
        ran = kind.run(own_x, own_w, own_b, wants_w, *options)
        kept = None if ran.x is None else ran.x.detach()
        version, dtype = 0 if kept is None else version_of(kept), w.dtype

        def weight_gradients(gradient: torch.Tensor) -> list[torch.Tensor]:
            if kept is not None and version_of(kept) != version:  # as autograd checks saved tensors
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"the input that {w_name} was applied to, of shape {tuple(kept.shape)}, is at version "
                    f"{version_of(kept)}; expected version {version} instead"
                )
            gradients = kind.weight_gradients(gradient, kept, own_w, own_b, wants_w, wants_b, *options)
            return [g.to(dtype) if casts else g for g in gradients if g is not None]

        tape.note(_gradient_edge(ran.core), WeightGradientTask(by_wants[wants], weight_gradients))
        return ran.value

    return _with_name(call, kind.name)


def split_embedding(function: Callable[..., torch.Tensor], name: str, place: int) -> Callable[..., torch.Tensor]:
    """Makes an embedding a function of (tape, ...); its table, the parameter `name`, is argument `place`."""

    def call(tape: WeightGradientTape | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = function(*args, **kwargs)
        if tape is not None and y.requires_grad:
            edge = _gradient_edge(y)
            tape.note(edge, _autograd_task((name,), edge, [args[place]]))
        return y

    return _with_name(call, getattr(function, "__name__", "embedding").partition(".")[0])


def _gradient_edge(result: torch.Tensor) -> GradientEdge:
    """`get_gradient_edge` of a node's result, in half the time."""
    assert result.grad_fn is not None
    return GradientEdge(result.grad_fn, result.output_nr)


def _autograd_task(names: tuple[str, ...], edge: GradientEdge, weights: list[torch.Tensor]) -> WeightGradientTask:
    """Makes the task of a node whose backward leads to weights only."""
    return WeightGradientTask(names, lambda gradient: torch.autograd.grad([edge], weights, [gradient]))


def cast_operands(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Operands:
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, w, b
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast(x), cast(w), None if b is None else cast(b)


def _with_name(function: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    function.__name__ = function.__qualname__ = f"split_{name}"
    function.__module__ = __name__
    return function


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
