"""Skips products if only sizes count: zeros replace their results.

Counts depend on shapes, strides and dtypes, and nearly all arithmetic of a model is in matrix products and
convolutions. So a dispatch mode returns zeros for these, with the memory layout of the real results:

- matrix products, contiguous;
- convolutions that oneDNN would run, in the memory format that torch chooses. (Other kernels lay out some gradients
  differently; so does oneDNN for a 1d convolution, which runs as a strided 2d convolution.)

All else is computed. An operation that returns values to Python, or whose result has a data-dependent size, raises an
error if a product has been skipped before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.modes import TorchDispatchMode
from fxpipe._torch.operators import conv_memory_format, select_conv_backend
from fxpipe.tracing.tensors import tensors_in

_aten = torch.ops.aten

_MATMUL_DIMENSIONS = {_aten.mm.default: 2, _aten.addmm.default: 2, _aten.bmm.default: 3, _aten.baddbmm.default: 3}
_VALUE_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class ValuesNeededError(Exception):
    """Values are needed that may differ from the model's."""


class SkipMatmul(TorchDispatchMode):
    """While it is active, products of tensors on the CPU are zeros.

    Args:
        nodes: nodes of a graph at which it may be active.
        has_zeros: values already differ from the model's.
    """

    def __init__(self, nodes: Collection[fx.Node] = (), has_zeros: bool = False):
        super().__init__()
        self.nodes = nodes
        self.has_zeros = has_zeros  # set by the first skipped product

    def at(self, node: fx.Node) -> contextlib.AbstractContextManager[object]:
        return self if node in self.nodes else contextlib.nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        zeros = _zeros(func, args) if _are_plain(args) else None
        if zeros is not None:
            self.has_zeros = True
            return zeros
        if self.has_zeros and _needs_values(func, args):
            raise ValuesNeededError(f"{func} of what may be zeros in place of a product")
        return func(*args, **(kwargs or {}))


def _are_plain(args: Any) -> bool:
    """Returns whether all tensors are on the CPU, with one dtype; with several, the real kernel may raise an error."""
    tensors = list(tensors_in(args))
    return len({t.dtype for t in tensors}) == 1 and all(
        type(t) in (torch.Tensor, nn.Parameter)
        and t.device.type == "cpu"
        and t.layout == torch.strided
        and (t.is_floating_point() or t.is_complex())
        for t in tensors
    )


def _zeros(func: Any, args: tuple[Any, ...]) -> Any:
    """Makes the zeros that replace the result of a product; None if it must be computed."""
    if func in _MATMUL_DIMENSIONS:
        return _matmul_zeros(_MATMUL_DIMENSIONS[func], *args)
    if func is _aten.convolution.default:
        _, _, bias, *numbers = args
        return _convolution_zeros(func, args, *args[:3], *numbers, None if bias is None else list(bias.shape))
    if func is _aten.convolution_backward.default:
        _, data, weight, bias_sizes, *numbers, _ = args
        return _convolution_zeros(func, args, data, weight, None, *numbers, bias_sizes)
    return None


def _matmul_zeros(dimensions: int, *tensors: torch.Tensor) -> torch.Tensor | None:
    *added, left, right = tensors
    shape = (*left.shape[:-1], right.shape[-1])
    fit = left.dim() == right.dim() == dimensions and left.shape[:-2] == right.shape[:-2]
    if not fit or left.shape[-1] != right.shape[-2]:
        return None  # the real one reports the error
    for bias in added:
        bias.expand(shape)
    return torch.zeros(shape, dtype=left.dtype, device="cpu")


def _convolution_zeros(func: Any, args: tuple[Any, ...], data: torch.Tensor, weight: torch.Tensor, *others: Any) -> Any:
    if data.dim() == 3 and not (data.is_contiguous() and weight.is_contiguous()):
        return None
    if select_conv_backend is None or conv_memory_format is None:
        return None
    kernels = select_conv_backend(data, weight, *others)  # as fake tensors do
    if kernels.name != "Mkldnn":
        return None
    memory_format = conv_memory_format(data, weight, kernels)

    def zeros(shape_of: torch.Tensor) -> torch.Tensor:
        of_bias = torch.contiguous_format if shape_of.dim() == 1 else memory_format
        return torch.empty(shape_of.shape, dtype=data.dtype, device="cpu", memory_format=of_bias).zero_()

    return pytree.tree_map_only(torch.Tensor, zeros, func(*pytree.tree_map_only(torch.Tensor, _meta_like, args)))


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _needs_values(func: Any, args: tuple[Any, ...]) -> bool:
    if _VALUE_TAGS.isdisjoint(func.tags):
        return False
    if func is _aten.index.Tensor:  # the sizes do not depend on integer indices, but on masks
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    return True
