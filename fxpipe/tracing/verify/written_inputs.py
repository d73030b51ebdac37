"""Inputs that forward writes to: after a step, the caller's tensors hold what the model would have written.

    cache[:, pos] = k        a tensor that is split into micro-batches: each part is written back to its rows
    seen += 1                a tensor that is not split, and is the same after all micro-batches: it is written back

A stage writes to a clone, and the pipeline returns its final value like an output. It is copied to the caller's tensor
when forward (in `forward_backward`: the step) has succeeded.

Planning refuses, with the line that writes, an input that is not split and would differ between micro-batches, and an
input whose shape changes. Each step refuses tensors that overlap in memory, and leaves that require grad, which torch
does not allow to be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.errors import ArgumentError
from fxpipe.tracing.model_state import slots_of
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.tensors import storage_of
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify.effects import Effects


def refuse_differing_writes(traced: Traced) -> None:
    """Raises `CannotRecord` if micro-batches would write different values to an input that is not split."""
    effects, batched = traced.effects, traced.batch_placeholders
    assert effects is not None
    if traced.is_whole:
        return
    changed = set[int]().union(*effects.written_classes)
    nodes: set[fx.Node] = set()
    classes: set[int | None] = set()  # that at some point hold a value that differs between micro-batches
    for node in traced.graph.nodes:
        alias = effects.alias.get(node)
        if node.op == "placeholder":
            differs = node in batched
        elif node.op == "get_attr":
            differs = alias in changed or str(node.target) in traced.assigned
        elif (number := info(node).number) is not None:
            differs = bool(number.free_symbols)
        else:
            sources = node.all_input_nodes
            differs = info(node).is_random or any(
                source in nodes or effects.alias.get(source) in classes for source in sources
            )
        if differs:
            nodes.add(node)
            place = effects.place.get(node, -1)
            classes |= {alias, *(effects.written_classes[place] if place >= 0 else ())} - {None}
    for node in effects.written_inputs:
        if node not in batched and effects.alias[node] in classes:
            raise CannotRecord(
                f"{_write_to(traced, effects, node)}, which is "
                "not cut into micro-batches, and what it writes depends on samples, on random numbers or on buffers "
                "that change, so that each micro-batch would leave something else in it; return the new value, keep "
                "it in a buffer (register_buffer), or give it a dimension for the samples (in_dims=)",
                is_final=True,
            )


def refuse_unwritable_inputs(
    traced: Traced, leaves: Sequence[Any], in_one: bool = False, others: Mapping[str, Any] | None = None
) -> None:
    """Raises `ArgumentError` if an input that the graph writes cannot be written: it requires grad, or overlaps.

    Args:
        in_one: forward and backward run in one call: then inputs that require grad are refused, else only leaves.
        others: by name, inputs of the step's other micro-batches, before any write.
    """
    effects = traced.effects
    assert effects is not None
    if not effects.written_inputs:
        return
    values = {leaf.path: value for leaf, value in zip(traced.leaves, leaves, strict=True)}
    values |= {f"the model's {slot.name!r}": tensor for slot, tensor in slots_of(traced.model).items()}
    extents = {
        name: _memory_extent(value)
        for name, value in {**values, **(others or {})}.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }
    for node in effects.written_inputs:
        path, leaf = traced.leaves[traced.place_of(node)].path, leaves[traced.place_of(node)]
        what = _write_to(traced, effects, node)
        if leaf.requires_grad and leaf.is_leaf and traced.state.grad:
            raise ArgumentError(
                f"{what}, and the tensor given is a leaf that requires grad, which torch lets nobody write to; give a "
                "copy (x.clone()), or write to a copy in forward"
            )
        if leaf.requires_grad and in_one:
            raise ArgumentError(
                f"{what}, and the tensor given requires grad: forward_backward would leave it in the graph of what it "
                "was; give a copy (x.clone()), or call the pipe itself"
            )
        if any(stride == 0 and size > 1 for size, stride in zip(leaf.shape, leaf.stride(), strict=True)):
            raise ArgumentError(
                f"{what}, and the tensor given is expanded: several of its elements are one in memory; give a copy "
                "(x.clone())"
            )
        own = extents[path]
        for other, extent in extents.items():
            if other != path and own[0] == extent[0] and own[1] < extent[2] and extent[1] < own[2]:
                raise ArgumentError(
                    f"{what}, and its memory overlaps with that of {other}, which would change with it; give a copy of "
                    "one of them (x.clone())"
                )


def _write_to(traced: Traced, effects: Effects, node: fx.Node) -> str:
    classes = zip(effects.nodes, effects.written_classes, strict=True)
    writer = next(n for n, written in classes if effects.alias[node] in written)
    return f"forward writes to the input {traced.leaves[traced.place_of(node)].path} at {info(writer).source}"


def _memory_extent(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the storage of a tensor, its first byte, and the byte after its last."""
    if not tensor.numel():
        return storage_of(tensor), 0, 0
    start = int(tensor.storage_offset())
    stop = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return storage_of(tensor), start * tensor.itemsize, stop * tensor.itemsize
