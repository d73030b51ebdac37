"""Arithmetic of an operation: products of matrices, convolutions, attention, recurrent layers.

An operation counts 2 for each multiplication with its addition; what touches every element but once (sums, norms,
activations) counts nothing. Most formulas are those of `torch.utils.flop_counter`; here is what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_SAME_WORK = {  # operations without a formula -> those that have it
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Of the operations that do the work; 0 for all others."""
    packet = getattr(func, "overloadpacket", func)
    name = str(getattr(packet, "__name__", ""))
    if name.startswith(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")):
        once = _recurrent(name, args)
        return 2 * once if name.endswith("backward") else once
    if name in _PRODUCTS:
        return int(_PRODUCTS[name](args))
    formula = flop_registry.get(_SAME_WORK.get(packet, packet))
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _recurrent(name: str, args: Sequence[Any]) -> int:
    """Each weight meets each step of each sequence."""
    weights = args[1:3] if name.startswith("mkldnn") else [w for w in args[1] if w.dim() > 1]
    rows = args[0].numel() // args[0].shape[-1]
    return int(2 * rows * sum(w.numel() for w in weights))


# Products with vectors, and sums of products: by the operation's own arguments.
_PRODUCTS = {
    "mv": lambda args: 2 * args[0].numel(),
    "addmv": lambda args: 2 * args[1].numel(),
    "dot": lambda args: 2 * args[0].numel(),
    "vdot": lambda args: 2 * args[0].numel(),
    "addr": lambda args: 2 * args[1].numel() * args[2].numel(),
    "addbmm": lambda args: 2 * args[1].numel() * args[2].shape[-1],
    "_trilinear": lambda args: 2 * args[0].shape[0] * args[1].numel(),  # a bilinear layer: weight [out, in, in]
}
