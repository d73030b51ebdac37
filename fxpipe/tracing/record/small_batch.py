"""Recording on a few samples of the example, where the whole of it would give the same graph.

A mini-batch may be large, and to run a model on it a few times may take minutes; what runs later are micro-batches. So
the model is recorded on the samples of one micro-batch; and again on them, on the mini-batch and on one more sample, on
fake tensors or, if forward reads values, on real ones. If all these recordings are the same, to the last number and to
the last value that forward reads, forward does the same for each of these sizes: no loop over samples, no branch on
their number. The graph is then compared with the model, on real values, at the sizes of micro-batches.

Anything else is left to recording on all samples: a model that reads other values of all samples than of a few, hooks
of the user's and tables that are kept from call to call outside the modules (which should meet no tensors without
values), a graph that turns out not to be the model's. That also has the right words for what is wrong.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import hook_stores
from fxpipe.tracing.fake_tensors import is_faked, with_fake_tensors
from fxpipe.tracing.model_state import container_tensors
from fxpipe.tracing.record.batch_numbers import RecordFunction, is_same_recording, same_size_reads
from fxpipe.tracing.record.module_hooks import is_computation_hook
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.shapes.input_dims import candidate_dims
from fxpipe.tracing.trace_request import TraceRequest
from fxpipe.tracing.traced import Traced, runs_python
from fxpipe.tracing.verify.equivalence import slice_samples
from fxpipe.utils.batch_split import largest_micro_batch, samples_along

LONG_RECORDING = 0.25  # seconds of a recording


def record_small_batch(request: TraceRequest, record_on: RecordFunction) -> Traced | None:
    """A recording on as many samples as a micro-batch has; None where it takes all samples.

    Raises:
        Exception: something fails that would fail on all samples as well, or is no matter there.
    """
    model = request.model
    if is_faked() or _has_hooks(model):
        return None
    leaves, spec, values = input_leaves(model, request.args, request.kwargs)
    dims = candidate_dims(leaves, request.in_dims)
    sizes = {samples_along(value, dim) for value, dim in zip(values, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        return None  # which input holds samples is found on all of them
    (batch,) = sizes
    samples = max(2, largest_micro_batch(batch, request.chunks))  # a single one has shapes of its own
    if samples >= batch:
        return None

    def samples_of(size: int) -> Any:
        return pytree.tree_unflatten(slice_samples(values, dims, 0, size), spec)

    start = time.perf_counter()
    traced = record_on(*samples_of(samples))
    if time.perf_counter() - start < LONG_RECORDING:
        return None  # fake tensors would take longer than all samples do
    if any(map(runs_python, traced.nodes)):
        return None
    if traced.constants.keys() - container_tensors(model).keys():  # tables of its own, maybe one for each size
        return None
    # The first size once more: a model that remembers what it met does something else the second time. It is seen
    # before tensors without values meet tables of other sizes, in which they would stay.
    inputs = [samples_of(size) for size in (samples, batch, batch + 1)]
    found = 0
    with contextlib.suppress(Exception), with_fake_tensors(model, inputs, always=True) as fakes:
        for args, kwargs in fakes:
            if not _is_same_recording(traced, record_on(args, kwargs)):
                break
            found += 1
    if not all(_is_same_recording(traced, record_on(args, kwargs)) for args, kwargs in inputs[found:]):
        return None
    return replace(traced, leaves=leaves, recorded_samples=samples)


def _has_hooks(model: nn.Module) -> bool:
    """Returns whether a module within the model has hooks of the user's."""
    return any(
        not is_computation_hook(hook)
        for module in model.modules()
        if module is not model
        for store in hook_stores(module)
        for hook in store.values()
    )


def _is_same_recording(base: Traced, other: Traced) -> bool:
    if not is_same_recording(base, other) or not same_size_reads(base, other):
        return False
    if len(base.constants) != len(other.constants) or base.draws_from_stream != other.draws_from_stream:
        return False
    return all(_tensor_kind(t) == _tensor_kind(other.constants[name]) for name, t in base.constants.items())


def _tensor_kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.layout
