"""Arithmetic of an operation: products of matrices, convolutions, attention, recurrent layers.

An operation counts 2 for each multiplication with its addition; what touches every element but once (sums, norms,
activations) counts nothing. Most formulas are those of `torch.utils.flop_counter`; here is what it does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fxpipe._torch.operators import attention_on_cpu
from fxpipe.hardware import NodeWork, Operation
from fxpipe.utils.polynomial import Polynomial, SizePoint, fit_counts

_aten = torch.ops.aten

_SAME_WORK = attention_on_cpu()  # operations without a formula -> those that have it


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Counts the FLOPs of the operations that do the work; 0 for all others."""
    packet = getattr(func, "overloadpacket", func)
    name = str(getattr(packet, "__name__", ""))
    if name.startswith(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")):
        once = _recurrent_flops(name, args)
        return 2 * once if name.endswith("backward") else once
    if name in _PRODUCT_FLOPS:
        return int(_PRODUCT_FLOPS[name](args))
    formula = flop_registry.get(_SAME_WORK.get(packet, packet))
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _recurrent_flops(name: str, args: Sequence[Any]) -> int:
    """Counts the FLOPs of a recurrent layer: each weight meets each step of each sequence."""
    weights = args[1:3] if name.startswith("mkldnn") else [w for w in args[1] if w.dim() > 1]
    rows = args[0].numel() // args[0].shape[-1]
    return int(2 * rows * sum(w.numel() for w in weights))


# Products with vectors, and sums of products: by the operation's own arguments.
_PRODUCT_FLOPS = {
    "mv": lambda args: 2 * args[0].numel(),
    "addmv": lambda args: 2 * args[1].numel(),
    "dot": lambda args: 2 * args[0].numel(),
    "vdot": lambda args: 2 * args[0].numel(),
    "addr": lambda args: 2 * args[1].numel() * args[2].numel(),
    "addbmm": lambda args: 2 * args[1].numel() * args[2].shape[-1],
    "_trilinear": lambda args: 2 * args[0].shape[0] * args[1].numel(),  # a bilinear layer: weight [out, in, in]
}


# -- Operations as they ran for some batch sizes, and as formulas for every one --------------------------------------

OperationCounts = tuple[str, int, int]  # the type in which it computes, its arithmetic, bytes moved


@dataclass(frozen=True, slots=True)
class NodeOperations:
    """The operations that one node ran; as `NodeWork`, at one size."""

    forward: tuple[OperationCounts, ...] = ()
    backward: tuple[OperationCounts, ...] = ()
    to_inputs: tuple[OperationCounts, ...] = ()


def work_of(by_size: Mapping[SizePoint, NodeOperations], here: SizePoint) -> NodeWork:
    """Derives formulas from what ran for several numbers of samples, and dynamic sizes; right in any case for `here`.

    Sizes for which other operations ran are left out; what is known for one number only grows with the batch.
    """
    return _work_of(tuple(by_size.items()), here)


@functools.lru_cache(maxsize=4096)
def _work_of(by_size: tuple[tuple[SizePoint, NodeOperations], ...], here: SizePoint) -> NodeWork:
    ran_here = dict(by_size)[here]

    def operations(which: str) -> tuple[Operation, ...]:
        wanted = [dtype for dtype, _, _ in getattr(ran_here, which)]
        rows = {size: getattr(ran, which) for size, ran in by_size}
        same_types = {size: row for size, row in rows.items() if [dtype for dtype, _, _ in row] == wanted}
        return tuple(
            Operation(
                dtype,
                *(_fit_to_polynomial(tuple((s, row[k][i]) for s, row in same_types.items()), here) for i in (1, 2)),
            )
            for k, dtype in enumerate(wanted)
        )

    return NodeWork(*(operations(field.name) for field in fields(NodeOperations)))


@functools.lru_cache(maxsize=4096)
def _fit_to_polynomial(counted: tuple[tuple[SizePoint, int], ...], here: SizePoint) -> Polynomial:
    fitted = fit_counts(counted, here)
    is_work = all(c >= 0 for _, c in fitted.terms)
    return fitted if is_work else fit_counts(((here, dict(counted)[here]),), here)
