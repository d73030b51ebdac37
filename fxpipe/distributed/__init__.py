"""One pipe over several processes: the stages and the plan of the one-process pipe, and the code that runs its rows.

    mesh = init_device_mesh("cpu", (2,))                    # under torchrun, in every process
    pipe = fxpipe.pipeline(model, devices=mesh, chunks=8, schedule="1f1b", example_args=(x,))
    loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)

Each process, a *rank*, runs the row of one device; with `data_parallel=` there are several *replicas* of the pipe. A
model that is too large for one process is built on the meta device: it is planned without values, and then `load` or
`initialize` gives each rank those of its own stages:

    with torch.device("meta"):
        model = Model()
    pipe = fxpipe.pipeline(model, devices=mesh, chunks=8, schedule="1f1b", example_args=(x,))
    fxpipe.distributed.load(pipe, "checkpoint")

Where `torchrun --max-restarts` starts failed processes again, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: else torch 2.13
gives them the store of the ones before, and gloo may connect to the addresses of these.

From the bottom:

- `connection` (transfers between ranks, of one generation), `failures` (what each rank says when a step has failed),
  `rank_group` (both together: a block that ends well on all ranks or on none)
- `packets` (values as messages), `packet_link` (what a row receives before its actions and sends after them),
  `rank_step` (a step with this rank's stages)
- `held_tensors` (who has which parameter, and tied ones), `gradient_reduction` (sums over replicas), `device_sums` (the
  same in memory of devices), `replicas` (the part of each in a step), `step_report` (what the ranks tell each other at
  its end), `rank_gradients` (from sums of stages to `.grad`)
- `agreement` (all ranks have the same model, plan and versions), `rank_engine` (whole steps), `rank_state` (graphs,
  recorded on all ranks together), `rank_stream`, `rank_train_stream` (streams: of one stage, and its loop), `pipeline`
- `materialization` (memory for this rank's tensors), `checkpoint_readers`, `checkpoint_loading`, `initialization`,
  `clip_grad_norm`
"""

from fxpipe.distributed.checkpoint_loading import load
from fxpipe.distributed.clip_grad_norm import clip_grad_norm_
from fxpipe.distributed.initialization import initialize
from fxpipe.distributed.pipeline import DistributedPipeline, pipeline_over_ranks

__all__ = ["DistributedPipeline", "clip_grad_norm_", "initialize", "load", "pipeline_over_ranks"]
