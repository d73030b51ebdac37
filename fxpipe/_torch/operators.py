"""Operators: their classes and schemas, and those whose names begin with an underscore.

Classes, schemas and most operators are required, and the same from torch 2.11 to 2.14. Optional are `safe_softmax`,
`select_conv_backend` and `conv_memory_format`, and the names of attention on a CPU (see each).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpipe._torch.versions import optional_name, require_attributes, required_names

with required_names():
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

    # A view of the negated memory of a tensor, as `conj` is one of the conjugated.
    neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
    # A tensor of another shape that autograd takes for no view of the first.
    unsafe_view: Any = torch.ops.aten._unsafe_view
    DETACH: Any = torch.ops.aten.detach.default  # what `tensor.detach()` calls
    # RNNs as `nn.LSTM` and the like call them, whose dropout draws.
    RNN_FUNCTIONS: tuple[Any, ...] = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)

require_attributes(torch.ops.aten.add.Tensor, "_schema")

__all__ = [
    "BUILTIN_MODULE",
    "DETACH",
    "MODULE_ALIASES",
    "RNN_FUNCTIONS",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "attention_on_cpu",
    "conv_memory_format",
    "neg_view",
    "safe_softmax",
    "schema_of",
    "select_conv_backend",
    "unsafe_view",
]

# What scaled_dot_product_attention takes, on a CPU, of rows that are masked altogether; None where torch has none:
# then attention with dropout draws from torch's own generator, and waits for other stages that do.
safe_softmax: Callable[[torch.Tensor, int], torch.Tensor] | None = optional_name("torch", "_safe_softmax")

# What fake tensors ask of a convolution: which kernel it would take, and with which memory format. None where torch
# has none: then convolutions are computed where zeros would do.
select_conv_backend: Any = optional_name("torch", "_C._select_conv_backend")
conv_memory_format: Any = optional_name("torch", "_C._conv_determine_backend_memory_format")


def schema_of(overload: Any) -> torch.FunctionSchema:
    """The schema of an overload: its arguments and what it returns, and which of them alias."""
    schema: torch.FunctionSchema = overload._schema
    return schema


def attention_on_cpu() -> dict[Any, Any]:
    """Attention on a CPU -> the same on a GPU, forward and backward. Optional: without it their work counts as none."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
    pairs = [[getattr(torch.ops.aten, name + end, None) for name in names] for end in ("", "_backward")]
    return {cpu: gpu for cpu, gpu in pairs if cpu is not None and gpu is not None}


# How people write the modules that torch functions live in.
MODULE_ALIASES = {
    "torch.nn.functional": "F",
    "torch": "torch",
    "torch._C._nn": "F",
    "torch.functional": "torch",
    "math": "math",
    "torch._ops.aten": "aten",
}
BUILTIN_MODULE = "torch._C"  # of functions in C, which are found in `torch`, and in modules below it
