"""A script for torchrun: the network is cut while a stage of rank 1 runs; each rank writes what it is told.

    torchrun ... cut_off_training.py <folder>

In <folder>: `in-a-step` asks for the cut, `cut-off` tells that it is done; `error-<rank>` has seconds and error of this
step, and `again-<rank>` those of the next one.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from helpers.rank_models import MIXED_CUTS, Mixed, token_loss, tokens

TIMEOUT = 3.0


def main(folder):
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, t = tokens(7, 5, 0)
    options = {"balance": MIXED_CUTS[2], "timeout": TIMEOUT, "progress": False, "hardware": "cpu"}
    pipe = fxpipe.pipeline(Mixed(), mesh, 3, example_args=(x,), **options)
    pipe.forward_backward(x, target=t, loss_fn=token_loss)

    def cut_off(out, target):
        (folder / "in-a-step").touch()
        while not (folder / "cut-off").exists():
            time.sleep(0.01)
        return token_loss(out, target)

    for name, loss_fn in (("error", cut_off), ("again", token_loss)):
        start = time.monotonic()
        try:
            pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", []))
            text = f"{time.monotonic() - start}\n{type(error).__name__}: {error}\n{notes}"
            (folder / f"part-{rank}").write_text(text)
            (folder / f"part-{rank}").rename(folder / f"{name}-{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
