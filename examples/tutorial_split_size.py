"""The split-size sweep of PyTorch's model-parallel tutorial, with fxpipe added, and the tuner's choice marked.

    python examples/tutorial_split_size.py                                     small images, two CPU workers or GPUs
    python examples/tutorial_split_size.py --batch 120 --image 128 --rounds 10 the tutorial's size; on two GPUs

The tutorial puts one half of a ResNet-50 on each of two devices. One of them idles at any time, so the tutorial cuts
the mini-batch into splits, and times a training step for every split size. This script times, alternately:

- a single device;
- model parallel: first one half, then the other;
- by hand: the tutorial's `PipelineParallelResNet50`, forward in splits, one backward for all of them;
- fxpipe: the plain model, `fxpipe.pipeline(model, chunks=...).forward_backward(...)`, for the same splits.

It also shows the prediction of `fxpipe.tune`, made before any of them is run.

The halves by hand overlap because GPUs run asynchronously to the Python that starts their work. CPUs do not, so this
gains nothing there: a pipeline on CPUs needs the threads that fxpipe has. A CPU worker has its share of the cores, and
so has "a single device".

Source: S. Li, Single-Machine Model Parallel Best Practices, https://pytorch.org/tutorials/intermediate/
model_parallel_tutorial.html
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe

CLASSES = 100
FEW = 4  # samples to record the graph of a plan with: it serves mini-batches of any size
Step = Callable[[], object]

# ---- the model: plain PyTorch, unaware of the pipeline ----


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, and a residual connection."""

    def __init__(self, channels_in: int, width: int, stride: int = 1):
        super().__init__()
        channels_out = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return self.relu(y)


def layer(channels_in: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (Bottleneck(4 * width, width) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(channels_in, width, stride), *rest)


class ResNet50(nn.Module):
    """Images, batch x 3 x size x size, to scores, batch x CLASSES (He et al., 2015, arXiv 1512.03385, table 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.layer1 = layer(64, 64, 3, stride=1)
        self.layer2 = layer(256, 128, 4, stride=2)
        self.layer3 = layer(512, 256, 6, stride=2)
        self.layer4 = layer(1024, 512, 3, stride=2)
        self.head = nn.Linear(2048, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        x = self.layer4(self.layer3(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def make_model() -> nn.Module:
    return ResNet50()


# ---- the tutorial's methods ----


class ModelParallel(nn.Module):
    """The first half on one device, the second on the other."""

    def __init__(self, model: ResNet50, devices: Sequence[str]):
        super().__init__()
        self.devices = devices
        self.first = nn.Sequential(model.stem, model.layer1, model.layer2).to(devices[0])
        self.second = nn.Sequential(model.layer3, model.layer4, nn.AdaptiveAvgPool2d(1)).to(devices[1])
        self.head = model.head.to(devices[1])

    def end(self, x: Tensor) -> Tensor:
        return self.head(self.second(x.to(self.devices[1])).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.first(x.to(self.devices[0])))


class ByHand(ModelParallel):
    """While the second half computes a split, the first half starts the next split."""

    def __init__(self, model: ResNet50, devices: Sequence[str], split: int):
        super().__init__(model, devices)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        splits = iter(x.to(self.devices[0]).split(self.split))
        before = self.first(next(splits))
        outputs = []
        for part in splits:
            outputs.append(self.end(before))
            before = self.first(part)
        outputs.append(self.end(before))
        return torch.cat(outputs)


# ---- the sweep ----


def median_seconds(steps: dict[str, tuple[int, Step]], rounds: int, devices: Sequence[str]) -> dict[str, float]:
    """Seconds of each step, given with its threads; alternately, since machines drift. The first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    before = torch.get_num_threads()
    for _ in tqdm(range(rounds + 1), desc="timing", unit="round", disable=None):
        for name, (threads, step) in steps.items():
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            step()
            for device in devices:
                if device != "cpu":
                    torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - begin)
    torch.set_num_threads(before)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def training_step(model: nn.Module, images: Tensor, classes: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step() -> None:
        optimizer.zero_grad()
        scores = model(images)
        F.cross_entropy(scores, classes.to(scores.device)).backward()
        optimizer.step()

    return step


def pipeline_step(pipe: fxpipe.Pipeline, images: Tensor, classes: Tensor) -> Step:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.001)

    def step() -> None:
        optimizer.zero_grad()
        pipe.forward_backward(images, target=classes, loss_fn=F.cross_entropy)
        optimizer.step()

    return step


def split_sizes(batch: int) -> list[int]:
    """The tutorial's split sizes up to the size of the mini-batch, and the mini-batch."""
    return [size for size in (1, 2, 3, 4, 6, 8, 10, 12, 20, 24, 40, 60) if size < batch and batch % size == 0] + [batch]


@dataclass(frozen=True)
class Sweep:
    """Seconds of a training step."""

    table: list[tuple[int, float, float, float]]  # split size, by hand, fxpipe, simulated
    lines: dict[str, float]  # single device, model parallel
    chosen: int  # the split size that fxpipe.tune has chosen


def run_sweep(
    devices: Sequence[str], batch: int, image: int, sizes: Sequence[int], schedule: str, rounds: int
) -> Sweep:
    """Times all methods over the split sizes."""
    chunks = {size: -(-batch // size) for size in sizes}
    everything = torch.get_num_threads()
    share = max(1, everything // 2)

    torch.manual_seed(0)
    model = ResNet50()
    images = torch.randn(batch, 3, image, image)
    classes = torch.randint(CLASSES, (batch,))
    single, halves = copy.deepcopy(model).to(devices[0]), copy.deepcopy(model)

    tuning = fxpipe.tune(
        model,
        devices,
        example_args=(images,),
        schedules=[schedule],
        chunks=list(dict.fromkeys(chunks.values())),
        stages_per_device=[2 if schedule in ("zbv", "interleaved_1f1b") else 1],
        optimizer_state=0,
    )
    print(f"{tuning}\n")
    chosen = next(size for size in sizes if chunks[size] == tuning.best.chunks)
    of_plan = fxpipe.tune(tuning.best.plan, schedules=[schedule], chunks=list(chunks.values()))
    simulated = {row.chunks: row.step_seconds for row in of_plan.rows}

    with ExitStack() as stack:
        steps: dict[str, tuple[int, Step]] = {
            "a single device": (share, training_step(single, images.to(devices[0]), classes)),
            "model parallel": (share, training_step(ModelParallel(halves, devices), images, classes)),
        }
        for size in tqdm(sizes, desc="pipelines", disable=None):
            steps[f"by hand {size}"] = (share, training_step(ByHand(halves, devices, size), images, classes))
            pipe = fxpipe.pipeline(
                model,
                plan=tuning.best.plan,
                chunks=chunks[size],
                schedule=schedule,
                example_args=(images[:FEW],),
                check=False,  # the tuner has compared this graph with the model
            )
            steps[f"fxpipe {size}"] = (everything, pipeline_step(stack.enter_context(pipe), images, classes))
        seconds = median_seconds(steps, rounds, devices)

    table = [(n, seconds[f"by hand {n}"], seconds[f"fxpipe {n}"], simulated[chunks[n]]) for n in sizes]
    return Sweep(table, dict(itertools.islice(seconds.items(), 2)), chosen)


def draw(path: str, table: Sequence[tuple[int, float, float, float]], lines: dict[str, float], chosen: int) -> None:
    """Seconds over split sizes. `table`: split size, by hand, fxpipe, simulated."""
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    sizes = [row[0] for row in table]
    for (name, seconds), style in zip(lines.items(), (":", "-."), strict=True):
        axes.axhline(seconds, color="#555555", linestyle=style, linewidth=1.2, label=name)
    styles = (
        ("by hand, as in the tutorial", "#e69f00", "s-"),
        ("fxpipe", "#0072b2", "o-"),
        ("fxpipe, simulated", "#56b4e9", "--"),
    )
    for column, (name, colour, style) in enumerate(styles, start=1):
        axes.plot(sizes, [row[column] for row in table], style, color=colour, label=name, markersize=5)
    at = next(row[2] for row in table if row[0] == chosen)
    axes.plot([chosen], [at], "*", color="#d55e00", markersize=18, zorder=3, label=f"chosen by fxpipe.tune: {chosen}")
    axes.set(xscale="log", xlabel="split size (samples of a micro-batch)", ylabel="seconds for a training step")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0, top=1.05 * max(max(row[1:]) for row in table))
    axes.grid(axis="y", color="#e3e3e3")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
    axes.set_title("ResNet-50 on two devices: a training step over the split size")
    figure.savefig(path, dpi=120)


def main() -> None:
    two_gpus = torch.cuda.is_available() and torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cuda:0,cuda:1" if two_gpus else "cpu,cpu", help="two, with a comma")
    parser.add_argument("--batch", type=int, default=24, help="samples of a mini-batch (default: 24; tutorial: 120)")
    parser.add_argument("--image", type=int, default=64, help="pixels of a side (default: 64; tutorial: 128)")
    parser.add_argument("--splits", help="split sizes, with commas (default: the tutorial's that divide the batch)")
    parser.add_argument("--schedule", default="1f1b", help="of fxpipe (default: 1f1b)")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each (default: 3)")
    parser.add_argument("--output", default="split_size.png", help="the plot (default: split_size.png)")
    options = parser.parse_args()
    devices = options.devices.split(",")
    if len(devices) != 2:
        parser.error("--devices: give two, as in cpu,cpu")
    try:
        asked = {int(size) for size in options.splits.split(",")} if options.splits else split_sizes(options.batch)
    except ValueError:
        parser.error(f"--splits {options.splits}: give whole numbers with commas, as in 4,8,12")
    sizes = sorted(asked)
    if not all(0 < size <= options.batch for size in sizes):
        parser.error(f"--splits: give sizes from 1 to --batch ({options.batch})")
    if not Path(options.output).parent.is_dir():
        parser.error(f"--output {options.output}: there is no such directory")
    sweep = run_sweep(devices, options.batch, options.image, sizes, options.schedule, options.rounds)
    table, lines, chosen = sweep.table, sweep.lines, sweep.chosen
    print("\n".join(f"{name}: {taken:.3g} s" for name, taken in lines.items()))
    rows = [("->" if row[0] == chosen else "", row[0], -(-options.batch // row[0]), *row[1:]) for row in table]
    headers = ("", "split size", "micro-batches", "s by hand", "s fxpipe", "s simulated")
    print(tabulate(rows, headers=headers, floatfmt=".3f"))
    best = min(table, key=lambda row: row[2])
    at = next(row for row in table if row[0] == chosen)
    print(
        f"chosen by fxpipe.tune before any was run: {chosen}, {at[2]:.3g} s; the fastest of all that were run: "
        f"{best[0]}, {best[2]:.3g} s"
    )
    for name, taken in lines.items():
        print(f"{name} takes {taken / at[2]:.2f} times as long")
    try:
        draw(options.output, table, lines, chosen)
        print(f"plot: {options.output}")
    except ImportError:
        print("no plot: it needs matplotlib; pip install fxpipe[plot]")


if __name__ == "__main__":
    main()
