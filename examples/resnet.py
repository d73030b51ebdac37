"""A small ResNet, with batch norm and in-place operations, in an ordinary training loop around a pipeline.

    python examples/resnet.py                              two CPU workers
    python examples/resnet.py --devices cuda:0,cuda:1      two GPUs
    python -m fxpipe.inspect examples/resnet.py:make_model --input 8x3x32x32

The loop is the usual one: `loss_fn(pipe(x), y).backward()`. Residual sums and activations work in place,
wherever the model is cut. The task is to recognize the direction of noisy stripes. The script prints the partitions,
the losses of the pipeline and of the plain model, the accuracy of both in evaluation, and the time of a training step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe

BATCH, SIZE, CLASSES = 64, 32, 8
TOLERANCE = 1e-3  # on CPU they agree nearly to the last bit


# ---- the model: plain PyTorch, unaware of the pipeline ----


class Residual(nn.Module):
    """Two convolutions with batch norm, and a residual connection."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Images, batch x 3 x size x size, to scores, batch x classes."""

    def __init__(self, classes: int = CLASSES, widths: tuple[int, ...] = (16, 32, 64), depth: int = 2):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        self.blocks = nn.ModuleList()
        width = widths[0]
        for i, wider in enumerate(widths):
            for j in range(depth):
                self.blocks.append(Residual(width, wider, stride=2 if i > 0 and j == 0 else 1))
                width = wider
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def make_model() -> nn.Module:
    return ResNet()


# ---- the data ----


def draw_stripes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy stripes in one of CLASSES directions, BATCH x 3 x SIZE x SIZE, and the directions, BATCH."""
    direction = torch.randint(CLASSES, (BATCH,), generator=generator)
    angle = (torch.pi * direction / CLASSES)[:, None, None]
    phase = 2 * torch.pi * torch.rand(BATCH, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.sin(0.8 * (x * torch.cos(angle) + y * torch.sin(angle)) + phase)
    noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    return stripes[:, None] + noise, direction


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


def accuracy(model: nn.Module, images: Tensor, classes: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1).cpu() == classes).float().mean().item()
    model.train()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu,cpu", help="a device for each stage, with commas (default: cpu,cpu)")
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch (default: 4)")
    parser.add_argument("--steps", type=int, default=24, help="training steps (default: 24)")
    options = parser.parse_args()
    devices = options.devices.split(",")
    everything = torch.get_num_threads()

    torch.manual_seed(0)
    model = make_model()
    plain = copy.deepcopy(model).to(devices[0])
    generator = torch.Generator().manual_seed(0)
    images, classes = draw_stripes(generator)

    pipe = fxpipe.pipeline(model, devices=devices, chunks=options.chunks, example_args=(images,))
    print(f"{pipe.plan}\n")

    pipe_optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9)
    loss_fn = F.cross_entropy

    def pipe_step() -> float:
        pipe_optimizer.zero_grad()
        scores = pipe(images)
        loss = loss_fn(scores, classes.to(scores.device))
        loss.backward()
        pipe_optimizer.step()
        return loss.item()

    def plain_step() -> float:
        plain_optimizer.zero_grad()
        loss = loss_fn(plain(images.to(devices[0])), classes.to(devices[0]))
        loss.backward()
        plain_optimizer.step()
        return loss.item()

    def plain_step_in_micro_batches() -> float:
        # Batch norm normalizes each input by its statistics, and in a pipeline the input is a
        # micro-batch; so the pipeline is compared with the plain model run over the same micro-batches, each with its
        # share of the mini-batch as weight. Training amplifies rounding from step to step, so the order is the
        # pipeline's too: all forwards, then all backwards, the last micro-batch first. So is the number of threads,
        # which the workers share: the order in which a convolution adds up its products depends on it.
        torch.set_num_threads(max(1, everything // len(devices)))
        plain_optimizer.zero_grad()
        losses = []
        for part in torch.arange(BATCH).tensor_split(options.chunks):
            loss = loss_fn(plain(images[part].to(devices[0])), classes[part].to(devices[0]))
            losses.append(loss * (len(part) / BATCH))
        for loss in reversed(losses):
            loss.backward()
        plain_optimizer.step()
        torch.set_num_threads(everything)
        return sum(loss.item() for loss in losses)

    rows = []
    for step in tqdm(range(options.steps), desc="training", disable=None):
        images, classes = draw_stripes(generator)
        rows.append((step, pipe_step(), plain_step_in_micro_batches()))
    shown = [row for row in rows if row[0] % 4 == 0 or row is rows[-1]]
    print(tabulate(shown, headers=("step", "loss, fxpipe", "loss, plain"), floatfmt=".6f"))
    difference = max(abs(a - b) for _, a, b in rows)
    print(f"largest difference in {len(rows)} steps: {difference:.1e}")
    assert difference < TOLERANCE, "the pipeline does not train as the plain model does"

    # Evaluation reads the running statistics, which the pipeline updates in the order of the micro-batches.
    images, classes = draw_stripes(generator)
    found, expected = accuracy(pipe, images, classes), accuracy(plain, images.to(devices[0]), classes)
    print(f"accuracy on new images: fxpipe {found:.1%}, plain {expected:.1%}\n")
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer.cpu(), plain.get_buffer(name).cpu(), rtol=1e-2, atol=1e-2)

    contestants = {f"plain, {everything} threads": (everything, plain_step), "fxpipe": (everything, pipe_step)}
    if devices[0] == "cpu":
        contestants = {"plain, 1 thread": (1, plain_step), **contestants}
    times = seconds_per_step(contestants, rounds=7)
    table = [(name, 1000 * seconds, next(iter(times.values())) / seconds) for name, seconds in times.items()]
    print(tabulate(table, headers=("training step", "ms, median", "speed"), floatfmt=(None, ".0f", ".2f")))
    pipe.close()


if __name__ == "__main__":
    main()
