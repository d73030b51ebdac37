"""Recording on a few samples of the example, if the full batch gives the same graph.

Running a model on a large mini-batch several times may take minutes. So the model is recorded on the samples of one
micro-batch, unless forward reads values. Then sizes with the batch are disguised, as dynamic sizes are
(`untracked_sizes`): if the recording stays the same, forward does not depend on the number of samples. The graph is
compared with the model, on real values, at the micro-batch sizes.

All other cases are recorded on all samples, which also gives the right error message. Among them are hooks of the user
and tables outside the modules.
"""

from __future__ import annotations

import time
from dataclasses import replace

from torch import nn

from fxpipe._torch import torch_pytree as pytree
from fxpipe._torch.module_internals import hook_stores
from fxpipe.tracing.fake_tensors import is_faked
from fxpipe.tracing.model_state import container_tensors
from fxpipe.tracing.node_info import info
from fxpipe.tracing.record.batch_numbers import RecordFunction, is_same_recording
from fxpipe.tracing.record.module_hooks import is_computation_hook
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.shapes.input_dims import candidate_dims
from fxpipe.tracing.tensors import slice_samples
from fxpipe.tracing.trace_request import TraceRequest
from fxpipe.tracing.traced import Traced, runs_python
from fxpipe.utils.batch_split import largest_micro_batch, samples_along

LONG_RECORDING = 0.25  # seconds; after shorter recordings, all samples are recorded


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

    sample = pytree.tree_unflatten(slice_samples(values, dims, 0, samples), spec)
    start = time.perf_counter()
    traced = record_on(*sample)
    if time.perf_counter() - start < LONG_RECORDING:
        return None  # further recordings would take longer than all samples
    if any(runs_python(node) or info(node).is_guarded_read for node in traced.nodes):
        return None
    if traced.constants.keys() - container_tensors(model).keys():  # tables outside modules, perhaps one for each size
        return None
    if not is_same_recording(traced, record_on(*sample)):  # a model that remembers its inputs
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
