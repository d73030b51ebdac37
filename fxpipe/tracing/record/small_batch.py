"""Recording on a few samples of the example, if the full batch gives the same graph.

Running a model on a large mini-batch several times may take minutes. So the model is recorded on the samples of one
micro-batch, and then again on these, on the mini-batch and on one more sample: with fake tensors, or with real ones if
forward reads values. If all recordings agree, including numbers and read values, forward does not depend on the
number of samples. The graph is then compared with the model, on real values, at the micro-batch sizes.

All other cases are recorded on all samples, which also gives the right error message. Among them are hooks of the user
and tables outside the modules, which must not receive tensors without values.
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
from fxpipe.errors import TraceError
from fxpipe.tracing.fake_tensors import NEEDS_VALUES_ERRORS, is_faked, with_fake_tensors
from fxpipe.tracing.model_state import container_tensors
from fxpipe.tracing.record.batch_numbers import RecordFunction, is_same_recording, same_size_reads
from fxpipe.tracing.record.module_hooks import is_computation_hook
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.record.recorder import expecting_size_reads
from fxpipe.tracing.shapes.input_dims import candidate_dims
from fxpipe.tracing.trace_request import TraceRequest
from fxpipe.tracing.traced import Traced, runs_python
from fxpipe.tracing.verify.equivalence import slice_samples
from fxpipe.utils.batch_split import largest_micro_batch, samples_along

LONG_RECORDING = 0.25  # seconds; shorter recordings are not worth a second one


def record_small_batch(request: TraceRequest, record_on: RecordFunction) -> Traced | None:
    """Records on the number of samples of a micro-batch; returns None if all samples are needed.

    Raises an error that recording on all samples may or may not raise, too.
    """
    model = request.model
    if is_faked() or _has_hooks(model):
        return None
    leaves, spec, values = input_leaves(model, request.args, request.kwargs)
    dims = candidate_dims(leaves, request.in_dims)
    sizes = {samples_along(value, dim) for value, dim in zip(values, dims, strict=True) if dim is not None}
    if len(sizes) != 1:
        return None
    (batch,) = sizes
    samples = max(2, largest_micro_batch(batch, request.chunks))  # the shapes of a single sample are special
    if samples >= batch:
        return None

    def samples_of(size: int) -> Any:
        return pytree.tree_unflatten(slice_samples(values, dims, 0, size), spec)

    start = time.perf_counter()
    traced = record_on(*samples_of(samples))
    if time.perf_counter() - start < LONG_RECORDING:
        return None  # fake tensors would take longer than all samples
    if any(map(runs_python, traced.nodes)):
        return None
    if traced.constants.keys() - container_tensors(model).keys():  # tables outside modules, perhaps one for each size
        return None
    with expecting_size_reads(traced.size_reads):
        # The first size again, with values, detects a model that remembers its inputs.
        if not _is_same_recording(traced, record_on(*samples_of(samples))):
            return None
        inputs = [samples_of(size) for size in (batch, batch + 1)]
        count = 0
        with contextlib.suppress(*NEEDS_VALUES_ERRORS, TraceError), with_fake_tensors(model, inputs, True) as fakes:
            for args, kwargs in fakes:
                if not _is_same_recording(traced, record_on(args, kwargs)):
                    return None
                count += 1
        if not all(_is_same_recording(traced, record_on(args, kwargs)) for args, kwargs in inputs[count:]):
            return None
    return replace(traced, leaves=leaves, recorded_samples=samples)


def _has_hooks(model: nn.Module) -> bool:
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
