"""Operators: their classes and schemas, and private operators.

Classes, schemas and most operators are required, and unchanged from torch 2.11 to 2.14. Optional are the names of
attention on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpipe._torch.versions import require_attributes, required_names

with required_names():
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket

    # A view with the negative bit, as `conj` returns a view with the conjugate bit.
    neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
    # Reshapes a tensor; autograd does not treat the result as a view.
    unsafe_view: Any = torch.ops.aten._unsafe_view
    DETACH: Any = torch.ops.aten.detach.default  # called by `tensor.detach()`
    DEVICE_OF: Any = torch.ops.prim.device.default  # called by `tensor.device` of a subclass
    # The functions of `nn.LSTM` and other RNNs, whose dropout draws random numbers.
    RNN_FUNCTIONS: tuple[Any, ...] = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)

require_attributes(torch.ops.aten.add.Tensor, "_schema")


def schema_of(overload: Any) -> torch.FunctionSchema:
    schema: torch.FunctionSchema = overload._schema
    return schema


def attention_on_cpu() -> dict[Any, Any]:
    """Maps CPU attention operators to the GPU's, forward and backward; without the names their work is not counted."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
    pairs = [[getattr(torch.ops.aten, name + end, None) for name in names] for end in ("", "_backward")]
    return {cpu: gpu for cpu, gpu in pairs if cpu is not None and gpu is not None}


# Usual names of the modules of torch functions.
MODULE_ALIASES = {
    "torch.nn.functional": "F",
    "torch": "torch",
    "torch._C._nn": "F",
    "torch.functional": "torch",
    "math": "math",
    "torch._ops.aten": "aten",
}
BUILTIN_MODULE = "torch._C"  # the module of C functions, which are attributes of `torch` and its submodules
