"""Reimplementations, with a generator, of torch's random functions that take none.

They give the results of torch's functions after `manual_seed`, bit for bit: the same kernels on the same numbers in the
same order (ATen: `Dropout.cpp`, `RNN.cpp`, `transformers/attention.cpp`; the tests compare them). So workers do not
wait for the generator of the process. For unsupported arguments a function returns `NotImplemented` before it draws.

This holds on a CPU. On a GPU other kernels draw, and only the RNNs are reimplemented (`ANY_DEVICE_KERNELS`): cuDNN
draws their dropout from a separate state, which torch's seed does not set and which continues from call to call, so
recomputation would get another mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fxpipe._torch.operators import RNN_FUNCTIONS, safe_softmax

# (generator, *arguments of the function) -> its result.
RngKernel = Callable[..., Any]
_aten: Any = torch.ops.aten


def dropout(
    generator: Generator, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not 0 < p < 1 or input.numel() == 0:
        return F.dropout(input, p, training, inplace)  # draws nothing
    noise = torch.empty_like(input).bernoulli_(1 - p, generator=generator).div_(1 - p)
    return input.mul_(noise) if inplace else input.mul(noise)


def _channel_dropout(*dims: int) -> RngKernel:
    """Makes dropout of full channels, for inputs of `dims` dimensions; torch accepts others, by further rules."""

    def channel_dropout(
        generator: Generator, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or not 0 < p < 1 or input.numel() == 0 or input.dim() not in dims:
            return NotImplemented
        noise = _channel_noise(input).bernoulli_(1 - p, generator=generator).div_(1 - p)
        return input.mul_(noise) if inplace else input.mul(noise)

    return channel_dropout


def _channel_noise(input: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:2], *(1,) * (input.dim() - 2)))


def attention(
    generator: Generator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes attention with dropout step by step, as torch does on a CPU: `_scaled_dot_product_attention_math`."""
    high = query.dtype in (torch.float32, torch.float64)  # others are computed in float32, with casts between the steps
    if not high or enable_gqa or not 0 < dropout_p < 1 or (scale or 1) <= 0 or torch.is_autocast_enabled("cpu"):
        return NotImplemented
    if safe_softmax is None:
        return NotImplemented
    mask = attn_mask
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril_()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    weights = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    return torch.matmul(dropout(generator, safe_softmax(weights, -1), dropout_p), value)


def _multi_head_attention(generator: Generator, *args: Any, **kwargs: Any) -> Any:
    """Runs torch's code with the random functions of this file."""

    def attend(*operands: Any) -> Any:
        attended = attention(generator, *operands)
        return (
            F.scaled_dot_product_attention(*operands) if attended is NotImplemented else attended
        )  # p is 1: draws nothing

    def drop(input: Tensor, p: float) -> Tensor:
        return dropout(generator, input, p)

    query = args[0] if args else kwargs["query"]
    if torch.is_autocast_enabled("cpu") or query.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    theirs = F.multi_head_attention_forward
    own: dict[str, Any] = {
        "dropout": drop,
        "scaled_dot_product_attention": attend,
        "has_torch_function": lambda _: False,
    }
    ours = FunctionType(theirs.__code__, {**F.__dict__, **own}, theirs.__name__, theirs.__defaults__)
    return ours(*args, **kwargs)


def _recurrent(function: Callable[..., Any]) -> RngKernel:
    """Makes an RNN that runs layer by layer, with dropout in between."""

    def run(generator: Generator, input: Tensor, hx: Any, params: Any, *options: Any, **more: Any) -> Any:
        if more or len(options) != 6 or not isinstance(params, (tuple, list)):  # a packed sequence
            return NotImplemented
        has_biases, layers, p, train, bidirectional, batch_first = options
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        each = len(params) // layers
        parts = [state.split(2 if bidirectional else 1) for state in states]
        ends: list[Sequence[Tensor]] = []
        x = input.transpose(0, 1) if batch_first else input
        for layer in range(layers):
            if layer and train and p:
                x = dropout(generator, x, p)
            initial = [part[layer].contiguous() for part in parts]
            weights = params[layer * each : (layer + 1) * each]
            x, *end = function(
                x, initial if len(initial) > 1 else initial[0], weights, has_biases, 1, 0.0, train, bidirectional, False
            )
            ends.append(end)
        return (x.transpose(0, 1) if batch_first else x, *map(torch.cat, zip(*ends, strict=True)))

    return run


_RECURRENT = (
    *RNN_FUNCTIONS,
    *(_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input),
)
RNG_KERNELS: dict[Any, RngKernel] = {
    **dict.fromkeys((F.dropout, torch.dropout, _aten.dropout.default), dropout),
    torch.feature_dropout: _channel_dropout(2, 3, 4, 5),
    F.dropout1d: _channel_dropout(3),
    F.dropout2d: _channel_dropout(4),
    F.dropout3d: _channel_dropout(5),
    **dict.fromkeys((F.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default), attention),
    F.multi_head_attention_forward: _multi_head_attention,
    **{function: _recurrent(function) for function in _RECURRENT},
}
ANY_DEVICE_KERNELS = frozenset(_RECURRENT)
