"""A script for torchrun: trains, saves every second step, and goes on from the last checkpoint when started again.

    torchrun --nproc-per-node 2 --max-restarts 1 restartable_training.py <folder> <step>

In that step rank 1 kills itself while a stage runs, the first time. Each rank writes its losses to a file in <folder>.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from helpers.rank_models import MIXED_CUTS, Mixed, token_loss, tokens

STEPS, SAVED_EVERY = 6, 2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def make_pipe(devices):
    torch.manual_seed(0)
    x, _ = tokens(7, 5, 0)
    options = {"example_args": (x,), "balance": MIXED_CUTS[2], "progress": False, "hardware": "cpu"}
    pipe = fxpipe.pipeline(Mixed(), devices, 3, **options)
    return pipe, torch.optim.Adam(pipe.parameters(), 0.01)


def train_step(pipe, optimizer, step, loss_fn=token_loss):
    x, t = tokens(7, 5, step)
    loss = pipe.forward_backward(x, target=t, loss_fn=loss_fn)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_of(pipe, optimizer):
    """With the state of the generator, from which dropout draws."""
    optimizer_state = get_optimizer_state_dict(pipe, optimizer, options=FLAT)
    return {"model": pipe.state_dict(), "optimizer": optimizer_state, "generator": torch.get_rng_state()}


def kill_this_process(out, target):
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder, killed_step):
    dist.init_process_group("gloo")
    rank, is_first_start = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    pipe, optimizer = make_pipe(init_device_mesh("cpu", (dist.get_world_size(),)))
    checkpoints = sorted(path.parent for path in folder.glob("step-*/.metadata"))  # which is written last
    if checkpoints:
        state = state_of(pipe, optimizer)
        dcp.load(state, checkpoint_id=checkpoints[-1])
        pipe.load_state_dict(state["model"])
        set_optimizer_state_dict(pipe, optimizer, state["optimizer"], options=FLAT)
        torch.set_rng_state(state["generator"])
    start = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
    for step in range(start, STEPS):
        is_last = is_first_start and rank == 1 and step == killed_step
        loss = train_step(pipe, optimizer, step, kill_this_process if is_last else token_loss)
        with (folder / f"losses-{rank}").open("a") as file:
            file.write(f"{step} {loss!r}\n")
        if (step + 1) % SAVED_EVERY == 0:
            dcp.save(state_of(pipe, optimizer), checkpoint_id=folder / f"step-{step + 1}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
