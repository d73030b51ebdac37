"""Time and memory of a step on one GPU: the plain model, one stage, two stages on it; eager and compiled.

    python tools/bench/gpu.py
    python tools/bench/gpu.py --models gpt --schedules 1f1b --checkpoints never --rounds 30 --json gpu.json
    python tools/bench/gpu.py --device cpu --size toy --rounds 2        # to see that it runs

What each table is meant to show is in tools/bench/README.md.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, sequence_loss
from tabulate import tabulate
from timing import Contestant, ratios, run_rounds, summarise
from torch import Tensor, nn

import fxpipe
from fxpipe.utils import accelerator

SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
CHECKPOINTS = ("never", "except_last", "always")
PLAIN = "plain"
TOLERANCE = 2e-2  # of losses: convolutions of a GPU compute in TF32 unless they are told otherwise


# ---- what is trained ----


@dataclass(frozen=True)
class Workload:
    model: nn.Module
    input: Tensor
    target: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]


class Bottleneck(nn.Module):
    """Three convolutions with a way around them (He et al., Deep Residual Learning, 2015)."""

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        self.convolutions = nn.Sequential(
            *convolution(channels_in, width, 1),
            nn.ReLU(),
            *convolution(width, width, 3, stride),
            nn.ReLU(),
            *convolution(width, 4 * width, 1),
        )
        is_alike = stride == 1 and channels_in == 4 * width
        self.way = nn.Identity() if is_alike else nn.Sequential(*convolution(channels_in, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.way(x))


def convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Group norm instead of batch norm: the whole mini-batch then has the loss of its micro-batches."""
    layer = nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
    return layer, nn.GroupNorm(min(32, channels_out), channels_out)


def resnet(depths: tuple[int, ...], width: int, classes: int) -> nn.Sequential:
    blocks: list[nn.Module] = []
    channels = width
    for level, depth in enumerate(depths):
        for k in range(depth):
            blocks.append(Bottleneck(channels, width << level, stride=2 if level and not k else 1))
            channels = 4 * (width << level)
    stem = (*convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def make_gpt(batch: int, is_toy: bool) -> Workload:
    """GPT-2 small but for its head, which is not tied to its embedding: 163 million parameters."""
    words, length, width, depth, heads = (101, 16, 32, 2, 4) if is_toy else (50257, 1024, 768, 12, 12)
    tokens = torch.randint(words, (batch, length + 1))
    return Workload(GPT(words, length, width, depth, heads), tokens[:, :-1], tokens[:, 1:], sequence_loss)


def make_resnet(batch: int, is_toy: bool) -> Workload:
    """ResNet-50 but for its norms: 26 million parameters."""
    depths, width, side, classes = ((1, 1), 8, 32, 5) if is_toy else ((3, 4, 6, 3), 64, 224, 1000)
    image, wanted = torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))
    return Workload(resnet(depths, width, classes), image, wanted, F.cross_entropy)


WORKLOADS: dict[str, Callable[[int, bool], Workload]] = {"gpt": make_gpt, "resnet": make_resnet}
BATCHES = {"gpt": 16, "resnet": 128}


# ---- contestants ----


@dataclass(frozen=True)
class Setting:
    """One line of the table; a plain model has no schedule."""

    stages: int
    schedule: str
    checkpoint: str
    is_compiled: bool

    def __str__(self) -> str:
        stages = PLAIN if not self.stages else f"{self.stages} stage{'s' * (self.stages > 1)}"
        parts = (stages, self.schedule, self.checkpoint, "compiled" if self.is_compiled else "eager")
        return ", ".join(filter(None, parts))


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Plain first: it is what the others are compared with. One stage has but one order, whatever the schedule."""
    for is_compiled in {"both": (False, True), "eager": (False,), "compiled": (True,)}[options.modes]:
        yield Setting(0, "", "", is_compiled)
        for stages in (1, 2):
            schedules = options.schedules.split(",") if stages > 1 else ["1f1b"]
            for schedule, checkpoint in itertools.product(schedules, options.checkpoints.split(",")):
                yield Setting(stages, schedule, checkpoint, is_compiled)


@dataclass(frozen=True)
class Trained:
    """A model with its step, forward, loss and backward, which returns when the device has been told to do them."""

    model: nn.Module
    step: Callable[[], Tensor]
    device: torch.device
    predicted: float | None = None  # seconds of a step, simulated; None: of the plain model

    def prepare(self) -> None:
        self.model.zero_grad(set_to_none=True)
        synchronise(self.device)

    def run(self) -> float:
        loss = self.step()
        synchronise(self.device)
        return loss.item()

    @property
    def contestant(self) -> Contestant:
        return Contestant(self.run, torch.get_num_threads(), self.prepare)


@contextmanager
def trained(setting: Setting, workload: Workload, device: torch.device, chunks: int) -> Iterator[Trained]:
    model = copy.deepcopy(workload.model).to(device)
    if not setting.stages:
        module: Any = torch.compile(model) if setting.is_compiled else model

        def plain_step() -> Tensor:
            loss = workload.loss_fn(module(workload.input), workload.target)
            loss.backward()
            return loss.detach()

        yield Trained(model, plain_step, device)
        return
    with fxpipe.pipeline(
        model,
        [device] * setting.stages,
        chunks,
        example_args=(workload.input,),
        schedule=setting.schedule,
        checkpoint=setting.checkpoint,
        compile=setting.is_compiled,
        loss_fn=workload.loss_fn,
        target=workload.target,
    ) as pipe:

        def step() -> Tensor:
            loss: Tensor = pipe.forward_backward(workload.input, target=workload.target, loss_fn=workload.loss_fn)
            return loss

        yield Trained(model, step, device, predicted_seconds(pipe.plan))


def predicted_seconds(plan: fxpipe.Plan) -> float:
    """Simulates a step whose stages all share one device: it is no shorter than all that they do."""
    simulation = fxpipe.simulate(plan)
    return max(simulation.step_seconds, sum(simulation.busy))


def synchronise(device: torch.device) -> None:
    accelerator.synchronize(accelerator.with_index(device))


# ---- what is measured ----


@dataclass(frozen=True)
class StepMemory:
    """The most bytes at one time in a step, beyond what is there between steps."""

    allocated: int  # of tensors
    reserved: int  # that torch's allocator takes of the device for them: also what waits to be used by a stream again


@dataclass(frozen=True)
class Found:
    """Of one setting beside the plain model in the same rounds."""

    setting: Setting
    seconds: list[float]
    plain_seconds: list[float]
    peak: StepMemory | None  # None on a CPU
    queued: float  # seconds until the host is through with a step, of which the device may still have to do a part
    predicted: float | None


def measure(setting: Setting, workload: Workload, plain: Trained, loss: float, options: argparse.Namespace) -> Found:
    with trained(setting, workload, plain.device, options.chunks) as ours:
        ours.prepare()
        found = ours.run()
        if not abs(found - loss) < TOLERANCE * abs(loss):
            raise RuntimeError(f"{setting} has loss {found}, but the plain model has {loss}")
        seconds = run_rounds({PLAIN: plain.contestant, "ours": ours.contestant}, options.rounds, str(setting))
        plain.prepare()  # its gradients are no part of the peak
        return Found(setting, seconds["ours"], seconds[PLAIN], peak_of(ours), queued_seconds(ours), ours.predicted)


def peak_of(ours: Trained) -> StepMemory | None:
    if not accelerator.counts_memory(ours.device):
        return None
    ours.prepare()
    torch.accelerator.empty_cache()  # else memory of earlier steps is reserved already
    before = accelerator.memory_figures(ours.device)
    accelerator.reset_peak(ours.device)
    ours.run()
    return StepMemory(
        accelerator.peak_allocated_bytes(ours.device) - before.allocated,
        accelerator.peak_reserved_bytes(ours.device) - before.reserved,
    )


def queued_seconds(ours: Trained) -> float:
    """While the device is still at something else: who waits for it at any place takes longer than that."""
    ours.prepare()
    if ours.device.type == "cuda":
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second and more
    begin = time.perf_counter()
    ours.step()
    seconds = time.perf_counter() - begin
    synchronise(ours.device)
    return seconds


def table(found: list[Found], form: str = "simple") -> str:
    plain_peak = {one.setting.is_compiled: one.peak for one in found if not one.setting.stages}
    rows = []
    for one in found:
        summary, peak = summarise(one.seconds), plain_peak[one.setting.is_compiled]
        rows.append(
            {
                "setting": str(one.setting),
                "ms, median": f"{1000 * summary.median:.1f}",
                "quartiles": f"{1000 * summary.first_quartile:.1f}–{1000 * summary.third_quartile:.1f}",
                "times plain, eager": summarise(ratios(one.plain_seconds, one.seconds)),
                "ms, predicted": "" if one.predicted is None else f"{1000 * one.predicted:.1f}",
                "ms, queued": f"{1000 * one.queued:.1f}",
                "peak, MiB": "" if one.peak is None else f"{one.peak.allocated / 2**20:,.0f}",
                "of plain": "" if one.peak is None or not peak else f"{one.peak.allocated / peak.allocated:.2f}",
                "reserved, MiB": "" if one.peak is None else f"{one.peak.reserved / 2**20:,.0f}",
            }
        )
    return tabulate(rows, headers="keys", disable_numparse=True, tablefmt=form)


# ---- main ----


def on_device(workload: Workload, device: torch.device) -> Workload:
    return Workload(workload.model, workload.input.to(device), workload.target.to(device), workload.loss_fn)


def train(name: str, options: argparse.Namespace) -> list[Found]:
    torch.manual_seed(0)
    device = torch.device(options.device)
    workload = on_device(WORKLOADS[name](options.batch or BATCHES[name], options.size == "toy"), device)
    found = []
    with trained(Setting(0, "", "", False), workload, device, 1) as plain:
        plain.prepare()
        loss = plain.run()
        for setting in settings(options):
            found.append(measure(setting, workload, plain, loss, options))
            print(f"{setting}: {1000 * summarise(found[-1].seconds).median:.1f} ms", flush=True)
            if setting.is_compiled:
                torch.compiler.reset()
    return found


def find_environment(device: torch.device) -> dict[str, str]:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    tf32 = {name: getattr(backend, "fp32_precision", "") for name, backend in
            (("convolutions", torch.backends.cudnn.conv), ("products", torch.backends.cuda.matmul))}  # fmt: skip
    return {"torch": torch.__version__, "device": where, "python": platform.python_version(), "float32": str(tf32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--models", default="gpt,resnet", help="of gpt, resnet, with commas (default: both)")
    parser.add_argument("--size", choices=("full", "toy"), default="full", help="default: full")
    parser.add_argument("--batch", type=int, help="samples in a mini-batch (default: 16 for gpt, 128 for resnet)")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches in a mini-batch (default: 8)")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="of two stages, with commas (default: all)")
    parser.add_argument("--checkpoints", default=",".join(CHECKPOINTS), help="with commas (default: all)")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--eager", dest="modes", action="store_const", const="eager", help="leave out what is compiled")
    modes.add_argument("--compiled", dest="modes", action="store_const", const="compiled", help="leave out what is not")
    parser.set_defaults(modes="both")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file, too")
    options = parser.parse_args()
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: there is no GPU here; --device cpu --size toy shows that it runs")

    environment = find_environment(torch.device(options.device))
    print(tabulate(environment.items()))
    tables = [", ".join(f"{name} {value}" for name, value in environment.items())]
    result: dict[str, Any] = {"environment": environment, "chunks": options.chunks, "models": {}}
    for name in options.models.split(","):
        batch = options.batch or BATCHES[name]
        title = f"{name}: forward and backward of {batch} samples in {options.chunks} micro-batches"
        print(f"\n{title}\n")
        found = train(name, options)
        print(f"\n{table(found)}\n", flush=True)
        result["models"][name] = [
            {"setting": str(f.setting), "seconds": f.seconds, "plain": f.plain_seconds,
             "peak": f.peak and asdict(f.peak), "queued": f.queued, "predicted": f.predicted} for f in found
        ]  # fmt: skip
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
        tables += [title, table(found, "github")]
        if options.markdown:
            options.markdown.write_text("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
