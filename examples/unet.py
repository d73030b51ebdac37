"""A U-Net whose skips reach over its whole depth, trained as a pipeline and as a plain model.

    python examples/unet.py                              two CPU workers
    python examples/unet.py --devices cuda:0,cuda:1      two GPUs
    python -m fxpipe.inspect examples/unet.py:make_model --input 8x3x64x64

The model is plain PyTorch: its `forward` keeps a list of skips and concatenates them on the way up. It is neither cut
by hand nor written as a Sequential. The task is to find the discs in a noisy drawing. The script prints:

1. the partitions that fxpipe chose, and a plan with four stages, in which portals send skips past the stages in between
   (with two stages there are none);
2. the losses of the pipeline and of the plain model, which start from the same weights and use the same drawings;
3. the time of a training step of both.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe

BATCH, SIZE = 16, 64
TOLERANCE = 1e-3  # micro-batches sum gradients in another order, and every step starts from where the last one ended


# ---- the model: plain PyTorch, unaware of the pipeline ----


def double_conv(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two convolutions. Group norm normalizes each sample, so micro-batches change nothing."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.GroupNorm(4, channels_out),
        nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.GroupNorm(4, channels_out),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """`widths[d]` channels at depth d, where the image is 2**d times smaller; one skip per depth but the last."""

    def __init__(self, channels: int = 3, widths: tuple[int, ...] = (16, 32, 64, 96)):
        super().__init__()
        depths = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(double_conv(i, o) for i, o in itertools.pairwise((channels, *widths[:-1])))
        self.bottom = double_conv(*depths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, here, 2, stride=2) for here, below in reversed(depths))
        self.up = nn.ModuleList(double_conv(2 * here, here) for here, _ in reversed(depths))
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)


def make_model() -> nn.Module:
    return UNet()


# ---- the data ----


def draw_discs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images with three discs in each, BATCH x 3 x SIZE x SIZE, and the discs, BATCH x 1 x SIZE x SIZE."""
    line = torch.linspace(-1, 1, SIZE)
    centre = 1.6 * torch.rand(2, BATCH, 3, 1, 1, generator=generator) - 0.8
    radius = 0.1 + 0.3 * torch.rand(BATCH, 3, 1, 1, generator=generator)
    inside = (line[:, None] - centre[0]) ** 2 + (line[None, :] - centre[1]) ** 2 < radius**2  # BATCH x 3 x SIZE x SIZE
    mask = inside.any(dim=1, keepdim=True).float()
    colour = torch.rand(BATCH, 3, 1, 1, generator=generator)
    noise = 0.5 * torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    return colour + noise + mask * (0.5 + 0.5 * colour), mask


# ---- the comparison ----


def seconds_per_step(contestants: dict[str, tuple[int, Callable[[], float]]], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each contestant, given with its threads; in alternation, since machines drift."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    before = torch.get_num_threads()
    for _ in tqdm(range(rounds), desc="timing", disable=None):
        for name, (threads, step) in contestants.items():
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    torch.set_num_threads(before)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu,cpu", help="a device for each stage, with commas (default: cpu,cpu)")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches in a mini-batch (default: 8)")
    parser.add_argument("--steps", type=int, default=24, help="training steps (default: 24)")
    options = parser.parse_args()
    devices = options.devices.split(",")

    torch.manual_seed(0)
    model = make_model()
    plain = copy.deepcopy(model).to(devices[0])
    generator = torch.Generator().manual_seed(0)
    image, mask = draw_discs(generator)

    pipe = fxpipe.pipeline(model, devices=devices, chunks=options.chunks, example_args=(image,))
    print(pipe.plan)
    print("\nThe same model in four stages:\n")
    in_four = fxpipe.plan(make_model(), 4, example_args=(image,), chunks=options.chunks)
    print(f"{in_four}\n")

    # The pipeline shares the model's parameters, so any optimizer works, created before or after.
    pipe_optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=2e-3)
    loss_fn = F.binary_cross_entropy_with_logits

    def pipe_step() -> float:
        pipe_optimizer.zero_grad()
        loss = pipe.forward_backward(image, target=mask, loss_fn=loss_fn)
        pipe_optimizer.step()
        return loss.item()

    def plain_step() -> float:
        plain_optimizer.zero_grad()
        loss = loss_fn(plain(image.to(devices[0])), mask.to(devices[0]))
        loss.backward()
        plain_optimizer.step()
        return loss.item()

    rows = []
    for step in tqdm(range(options.steps), desc="training", disable=None):
        image, mask = draw_discs(generator)
        rows.append((step, pipe_step(), plain_step()))
    shown = [row for row in rows if row[0] % 4 == 0 or row is rows[-1]]
    print(tabulate(shown, headers=("step", "loss, fxpipe", "loss, plain"), floatfmt=".6f"))
    difference = max(abs(a - b) for _, a, b in rows)
    print(f"largest difference in {len(rows)} steps: {difference:.1e}\n")
    assert difference < TOLERANCE, "the pipeline does not train as the plain model does"

    everything = torch.get_num_threads()
    contestants = {f"plain, {everything} threads": (everything, plain_step), "fxpipe": (everything, pipe_step)}
    if devices[0] == "cpu":
        contestants = {"plain, 1 thread": (1, plain_step), **contestants}
    print("timing steps: half a minute; other work on the machine changes the figures", flush=True)
    times = seconds_per_step(contestants, rounds=7)
    table = [(name, 1000 * seconds, next(iter(times.values())) / seconds) for name, seconds in times.items()]
    print(tabulate(table, headers=("training step", "ms, median", "speed"), floatfmt=(None, ".0f", ".2f")))
    pipe.close()


if __name__ == "__main__":
    main()
