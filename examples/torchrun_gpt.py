"""The GPT of examples/gpt.py, trained as a pipeline over processes: one for each device, on one machine or several.

    torchrun --nproc-per-node 2 examples/torchrun_gpt.py
    torchrun --nproc-per-node 2 examples/torchrun_gpt.py --schedule zero_bubble --checkpoint checkpoints

Model, plan and training loop do not differ from one process, except: you pass a mesh of processes instead of
devices, inputs and targets are needed on one rank each, and the optimizer of a rank has the parameters of its stages.

With --checkpoint, `torch.distributed.checkpoint` saves the state after the last step, under the model's keys,
and another run, on any number of processes, continues from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import loss_fn, make_model, read_text, sample_lines
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fxpipe

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # keys by parameter: no rank needs the keys of other ranks


def state_of(pipe: fxpipe.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The part of this rank."""
    return {"model": pipe.state_dict(), "optimizer": get_optimizer_state_dict(pipe, optimizer, options=FLAT)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="1f1b", help="of fxpipe.pipeline (default: 1f1b)")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches in a mini-batch (default: 8)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--checkpoint", type=Path, help="a folder to save to, and to go on from")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pipe",))
    torch.manual_seed(0)
    text, generator = read_text(), torch.Generator().manual_seed(0)
    tokens, following = sample_lines(text, generator)

    pipe = fxpipe.pipeline(
        make_model(), devices=mesh["pipe"], chunks=options.chunks, schedule=options.schedule, example_args=(tokens,)
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    if dist.get_rank() == 0:
        print(f"{pipe.plan}\n")
    if options.checkpoint and (options.checkpoint / ".metadata").exists():  # which is written last
        state = state_of(pipe, optimizer)
        dcp.load(state, checkpoint_id=options.checkpoint)
        pipe.load_state_dict(state["model"])
        set_optimizer_state_dict(pipe, optimizer, state["optimizer"], options=FLAT)

    for step in range(options.steps):
        tokens, following = sample_lines(text, generator)  # only the first and the last stage's rank need theirs
        optimizer.zero_grad()
        loss = pipe.forward_backward(tokens, target=following, loss_fn=loss_fn)
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step:3}: loss {loss.item():.6f}", flush=True)
    if options.checkpoint:
        dcp.save(state_of(pipe, optimizer), checkpoint_id=options.checkpoint)
    print(f"rank {dist.get_rank()}: loss {loss.item():.6f}\n{pipe.last_step}", flush=True)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
