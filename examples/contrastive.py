"""Contrastive learning of two towers, as CLIP does it: each image is compared with each text of the batch.

    python examples/contrastive.py                              two CPU workers
    python examples/contrastive.py --devices cuda:0,cuda:1      two GPUs
    python examples/contrastive.py --memory --batch 2048        the memory of a step, plain and as a pipeline

The towers run in micro-batches, the similarities and the loss once for the whole batch. With `checkpoint="always"` the
towers need the memory of one micro-batch, whatever the batch is. The script prints the losses of the pipeline and of
the plain model on the whole batch, which agree.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe

WIDTH, FEATURES = 128, 64
TOLERANCE = 1e-4


class TwoTowers(nn.Module):
    """Images and texts, batch x width each, to the loss of their similarities. Unaware of the pipeline."""

    def __init__(self, width: int = WIDTH, depth: int = 4):
        super().__init__()

        def tower() -> nn.Sequential:
            layers = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
            return nn.Sequential(*layers, nn.Linear(width, FEATURES))

        self.image, self.text = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        image, text = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
        similarities = image @ text.t() * self.scale.exp()
        places = torch.arange(len(similarities), device=similarities.device)
        return (F.cross_entropy(similarities, places) + F.cross_entropy(similarities.t(), places)) / 2


def batches(batch: int, width: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images, and texts that are noisy maps of them."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=generator) / width**0.5
    for _ in range(steps):
        images = torch.randn(batch, width, generator=generator)
        yield images, images @ mixing + 0.1 * torch.randn(batch, width, generator=generator)


def train(model: nn.Module, parameters: nn.Module, options: argparse.Namespace) -> list[float]:
    """Trains by the usual loop; returns the losses."""
    optimizer = torch.optim.SGD(parameters.parameters(), 0.1)
    losses = []
    for images, texts in batches(options.batch, options.width, options.steps):
        optimizer.zero_grad()
        loss = model(images, texts)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pipeline_of(model: nn.Module, options: argparse.Namespace) -> fxpipe.Pipeline:
    example = next(batches(min(options.batch, 64), options.width, 1))
    return fxpipe.pipeline(
        model, options.devices.split(","), options.chunks, checkpoint="always", example_args=example, progress=False
    )


def print_memory(options: argparse.Namespace) -> None:
    """Prints what a step adds to the peak memory of a process, of the plain model and of the pipeline."""
    import resource

    model = TwoTowers(options.width, options.depth)
    runs = pipeline_of(model, options) if options.memory == "pipe" else model
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = train(runs, model, argparse.Namespace(**vars(options) | {"steps": 1}))[0]
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{options.memory}: loss {loss:.6f}, a step adds {peak:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu,cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--memory", nargs="?", const="both", choices=("both", "plain", "pipe"))
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.memory == "both":
        for one in ("plain", "pipe"):  # each in a process, since peaks are counted by process
            subprocess.run([sys.executable, *sys.argv, "--memory", one], check=True)
        return
    if options.memory is not None:
        return print_memory(options)
    plain = TwoTowers(options.width, options.depth)
    model = copy.deepcopy(plain)
    with pipeline_of(model, options) as pipe:
        print(pipe.plan)
        losses = train(pipe, model, options), train(plain, plain, options)
    rows = [(step, *pair) for step, pair in enumerate(zip(*losses, strict=True))]
    print(tabulate(rows, ["step", "loss, fxpipe", "loss, plain"], floatfmt=".6f"))
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"largest difference in {options.steps} steps: {difference:.1e}")
    if difference > TOLERANCE:
        raise SystemExit("the pipeline and the plain model disagree")


if __name__ == "__main__":
    main()
