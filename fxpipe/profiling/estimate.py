"""Seconds that cannot be measured, estimated: a clock that goes on by what each operation would take on some hardware.

An operation takes as long as its arithmetic or its memory traffic does, whichever is longer (Williams, Waterman and
Patterson, Roofline: an insightful visual performance model, CACM 52(4), 2009). Arithmetic is that of the formulas of
`torch.utils.flop_counter`; the traffic is each tensor that is read or written, once. No hardware reaches its peak, and
nothing is said of launches and caches: what such seconds are good for is their proportions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fxpipe.profiling.clock import Clock
from fxpipe.profiling.rounds import Measured, Rounds
from fxpipe.progress import progress
from fxpipe.tracing.checking.effects import Effects
from fxpipe.tracing.recording.fake import running
from fxpipe.tracing.traced import Traced

# These read no more of their first argument than they return.
_PICKING = frozenset("embedding gather index index_select take".split())
_EMPTY = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_SAME_WORK = {  # operations without a formula -> those that have it
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _ATTENTION,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _ATTENTION_BACKWARD,
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one device can do at most."""

    name: str
    flops_per_second: float
    bytes_per_second: float  # of its memory


A100 = Hardware("NVIDIA A100 80GB", 312e12, 2.0e12)  # dense bfloat16; its data sheet


def estimate(traced: Traced, effects: Effects, leaves: Sequence[Any], hardware: Hardware) -> dict[fx.Node, Measured]:
    """What `measure` finds, on tensors without values; to be used in a block of `tracing.fake.faked`."""
    with (
        running(),
        torch.inference_mode(False),
        Roofline(hardware) as roofline,
        progress("estimating", len(effects.nodes)) as step,
    ):
        clock = Clock(lambda: roofline.seconds)
        rounds = Rounds(traced, effects, leaves, clock, repeats=1, deadline=0.0, step=step, warms_up=False)
        rounds.run()
    return {node: rounds.measured(node) for node in effects.nodes}


class Roofline(TorchDispatchMode):
    """While it is active, `seconds` is what the operations so far would have taken."""

    def __init__(self, hardware: Hardware):
        super().__init__()
        self.hardware = hardware
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # a question, which fake tensors are often asked
            return result
        arithmetic = flops(func, args, kwargs, result) / self.hardware.flops_per_second
        self.seconds += max(arithmetic, traffic(func, args, kwargs, result) / self.hardware.bytes_per_second)
        return result


def flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Of the operations that do the work: products of matrices, convolutions, attention; 0 for all others."""
    name = func.overloadpacket.__name__
    if name.startswith("mkldnn_rnn_layer"):  # each weight meets each step of each sequence; twice on the way back
        rows = args[0].numel() // args[0].shape[-1]
        each = 2 * rows * (args[1].numel() + args[2].numel())
        return int(2 * each if name.endswith("backward") else each)
    formula = flop_registry.get(_SAME_WORK.get(func.overloadpacket, func.overloadpacket))
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def traffic(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that an operation reads and writes; 0 for views."""
    name = func.overloadpacket.__name__
    if name in _EMPTY:
        return 0
    read = {_storage(t): t for t in _tensors((args, kwargs))}
    made = [t for t in _tensors(result) if _storage(t) not in read]
    written = list(_changed(func, args, kwargs))
    if not made and not written:
        return 0  # a view
    sizes = {storage: _bytes(t) for storage, t in read.items()}
    if name in _PICKING:
        sizes[_storage(args[0])] = sum(map(_bytes, made))
    return sum(sizes.values()) + sum(map(_bytes, (*made, *written)))


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
            yield from _tensors(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    """What is there to be read: an expanded tensor has but one copy of its values."""
    number = tensor.numel() * tensor.element_size()
    return min(number, tensor.untyped_storage().nbytes()) if tensor.layout == torch.strided else number
