"""Pipelines over several processes: the stages and plan of a pipe in one process, with one row per process.

    mesh = init_device_mesh("cpu", (2,))                    # under torchrun, in every process
    pipe = fxpipe.pipeline(model, devices=mesh, chunks=8, schedule="1f1b", example_args=(x,))
    loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)

Each process, a *rank*, runs the row of one device; with `data_parallel=` there are several *replicas* of the pipe. A
model too large for one process is built on the meta device and planned without values; then `load` or `initialize`
gives each rank the values of its stages.

If `torchrun --max-restarts` restarts failed processes, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: otherwise torch 2.13
gives them the previous processes' store, and gloo may connect to outdated addresses.

From the bottom: `connection`, `failures`, `rank_group`; `packets`, `rank_exchange`; `held_tensors`, `replicas`,
`rank_engine` (from sums of stages to `.grad`), `rank_state`, `rank_stream`, `pipeline`; `initialization` (the first
values).
"""

from fxpipe.distributed.initialization import initialize, load
from fxpipe.distributed.pipeline import DistributedPipeline, clip_grad_norm_, pipeline_over_ranks

__all__ = ["DistributedPipeline", "clip_grad_norm_", "initialize", "load", "pipeline_over_ranks"]
