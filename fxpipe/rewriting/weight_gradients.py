"""Functions of split stage code: nodes whose weight gradients are computed not in B but later, in W.

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
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge

from fxpipe._torch.autograd import base_of, version_of
from fxpipe._torch.operators import unsafe_view
from fxpipe.rewriting.program import WeightGradientTape, WeightGradientTask

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
