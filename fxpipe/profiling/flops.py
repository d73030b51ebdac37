"""The FLOPs, the memory traffic and the compute dtype of an operation, from which its seconds on any hardware follow.

An operation takes as long as its arithmetic, its memory traffic or its launch, whichever is longest (Williams,
Waterman and Patterson, Roofline: an insightful visual performance model, CACM 52(4), 2009; the launch is a third roof).
Arithmetic is at the rate of the compute dtype; traffic is each tensor read or written, once. Caches, and kernels that
other devices would choose, are not modelled. A multiplication with its addition counts 2, elementwise work 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fxpipe._torch.functions import overload_writes
from fxpipe._torch.operators import attention_on_cpu
from fxpipe.hardware import NodeWork, Operation
from fxpipe.tracing.tensors import storage_of, tensors_in
from fxpipe.utils.polynomial import Polynomial, SizePoint, fit_counts

_aten = torch.ops.aten

_SAME_WORK = attention_on_cpu()  # operation without a formula -> equivalent operation with one


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    packet = getattr(func, "overloadpacket", func)
    name = str(getattr(packet, "__name__", ""))
    if name.startswith(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")):
        # Each weight is used in each step of each sequence.
        weights = args[1:3] if name.startswith("mkldnn") else [w for w in args[1] if w.dim() > 1]
        rows = args[0].numel() // args[0].shape[-1]
        return int((4 if name.endswith("backward") else 2) * rows * sum(w.numel() for w in weights))
    if name in _PRODUCT_FLOPS:
        return int(_PRODUCT_FLOPS[name](args))
    formula = flop_registry.get(_SAME_WORK.get(packet, packet))
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


# Products with vectors, and sums of products, by the arguments of the operation.
_PRODUCT_FLOPS = {
    "mv": lambda args: 2 * args[0].numel(),
    "addmv": lambda args: 2 * args[1].numel(),
    "dot": lambda args: 2 * args[0].numel(),
    "vdot": lambda args: 2 * args[0].numel(),
    "addr": lambda args: 2 * args[1].numel() * args[2].numel(),
    "addbmm": lambda args: 2 * args[1].numel() * args[2].shape[-1],
    "_trilinear": lambda args: 2 * args[0].shape[0] * args[1].numel(),  # a bilinear layer: weight [out, in, in]
}


OperationCounts = tuple[str, int, int]  # compute dtype, FLOPs, bytes moved


@dataclass(frozen=True, slots=True)
class NodeOperations:
    """The operations that one node ran: `NodeWork` at one size."""

    forward: tuple[OperationCounts, ...] = ()
    backward: tuple[OperationCounts, ...] = ()
    to_inputs: tuple[OperationCounts, ...] = ()


NO_OPERATIONS = NodeOperations()


@functools.lru_cache(maxsize=4096)
def work_of(by_size: tuple[tuple[SizePoint, NodeOperations], ...], here: SizePoint) -> NodeWork:
    """Fits formulas, exact for `here`, to the operations at several numbers of samples and dynamic sizes.

    Sizes at which other operations ran are ignored. Counts known at one size only are taken to grow with the batch.
    """
    ran_here = dict(by_size)[here]

    def operations(which: str) -> tuple[Operation, ...]:
        wanted = [dtype for dtype, _, _ in getattr(ran_here, which)]
        rows = {size: getattr(ran, which) for size, ran in by_size}
        same_types = {size: row for size, row in rows.items() if [dtype for dtype, _, _ in row] == wanted}

        def formula(k: int, i: int) -> Polynomial:
            fitted = fit_counts(tuple((size, row[k][i]) for size, row in same_types.items()), here)
            is_work = all(c >= 0 for _, c in fitted.terms)
            return fitted if is_work else fit_counts(((here, same_types[here][k][i]),), here)

        return tuple(Operation(dtype, formula(k, 1), formula(k, 2)) for k, dtype in enumerate(wanted))

    return NodeWork(*(operations(field.name) for field in fields(NodeOperations)))


# These read no more of their first argument than the size of their result.
_GATHERS = frozenset("embedding gather index index_select take".split())
_ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())


def compute_dtype(func: Any, args: tuple[Any, ...]) -> str:
    """Returns the compute dtype of an operation, by its name; TF32 if torch would use it for float32 on a GPU."""
    dtype = next((t.dtype for t in tensors_in(args) if t.is_floating_point() or t.is_complex()), torch.float32)
    if dtype is torch.float32:
        is_convolution = "conv" in func.overloadpacket.__name__
        backends: Any = torch.backends
        setting = backends.cudnn.conv if is_convolution else backends.cuda.matmul
        return "tfloat32" if setting.fp32_precision == "tf32" else "float32"
    return str(dtype).removeprefix("torch.")


def bytes_moved(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes that an operation reads and writes; 0 for views."""
    name = func.overloadpacket.__name__
    if name in _ALLOCATIONS:
        return 0
    read = {id(t): t for t in tensors_in((args, kwargs))}  # several may be parts of one storage
    storages = {*map(storage_of, read.values())}
    results = [t for t in tensors_in(result) if storage_of(t) not in storages]
    written = [*tensors_in([*overload_writes(func, args, kwargs)])]
    if not results and not written:
        return 0  # a view
    sizes = {key: _tensor_bytes(t) for key, t in read.items()}
    if name in _GATHERS:
        sizes[id(args[0])] = sum(map(_tensor_bytes, results))
    return sum(sizes.values()) + sum(map(_tensor_bytes, (*results, *written)))


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes in memory: an expanded tensor has only one copy of its values."""
    number = tensor.numel() * tensor.element_size()
    return min(number, tensor.untyped_storage().nbytes()) if tensor.layout == torch.strided else number
