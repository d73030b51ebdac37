"""torchgpipe's speed benchmarks: a U-Net and a ResNet-101 over 1, 2, 4 and 8 devices, against a plain model on one.

    python tools/bench/published/speed_over_devices.py            as many GPUs as there are; small, on CPU workers

torchgpipe 0.0.7, docs/benchmarks.rst, U-Net (5, 64) on 192 x 192 and ResNet-101 on 224 x 224 images, on Tesla P40.
Mini-batches and micro-batches are those of its benchmarks/unet-speed and benchmarks/resnet101-speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from experiment import Setting, StepFigures, TrainingStep, Workload, main, measure, over, plan_for, simulate
from paper_hardware import P40
from paper_models import ResNet, UNet
from tables import Cell, Plot, Table
from torch import nn


@dataclass(frozen=True)
class Run:
    """A row of a table: samples of a mini-batch, micro-batches, and the paper's samples in a second."""

    name: str
    devices: int
    batch: int
    chunks: int
    throughput: float

    @property
    def is_plain(self) -> bool:
        return self.name == "baseline"

    @property
    def options(self) -> dict[str, object]:
        return {"chunks": self.chunks, "checkpoint": "never" if self.is_plain else "except_last", "schedule": "gpipe"}


@dataclass(frozen=True)
class Benchmark:
    """A model with the sizes of the paper and small ones."""

    name: str
    make_model: Callable[[], nn.Module]
    make_small: Callable[[], nn.Module]
    size: int  # pixels of a side
    small_size: int
    is_mask: bool  # a class for each pixel, of one
    runs: tuple[Run, ...]
    note: str

    def workload(self, run: Run, setting: Setting) -> Workload:
        batch, size = (16, self.small_size) if setting.is_small else (run.batch, self.size)
        model = self.make_small() if setting.is_small else self.make_model()
        images = torch.rand(batch, 3, size, size)
        if self.is_mask:
            return Workload(model, images, torch.ones(batch, 1, size, size), F.binary_cross_entropy_with_logits)
        return Workload(model, images, torch.randint(10, (batch,)), F.cross_entropy)


BENCHMARKS = (
    Benchmark(
        "U-Net (5, 64)",
        UNet,
        lambda: UNet(2, 8, 3),
        192,
        32,
        True,
        (
            Run("baseline", 1, 40, 1, 28.500),
            Run("pipeline-1", 1, 80, 2, 24.456),
            Run("pipeline-2", 2, 512, 32, 35.502),
            Run("pipeline-4", 4, 512, 16, 67.042),
            Run("pipeline-8", 8, 640, 40, 88.497),
        ),
        "3 x 3 convolutions are counted in full, where cuDNN saves work: ours is slower on one to four devices. On "
        "eight it is faster: its cut is better balanced than torchgpipe's, by hand between layers, and every pair of "
        "devices is taken to have a link of its own, where the GPUs of a host share the lanes of its processors.",
    ),
    Benchmark(
        "ResNet-101",
        ResNet,
        lambda: ResNet((1, 1, 2, 1), classes=10),
        224,
        32,
        False,
        (
            Run("baseline", 1, 118, 1, 95.862),
            Run("pipeline-1", 1, 220, 2, 81.796),
            Run("pipeline-2", 2, 25000, 1667, 135.539),
            Run("pipeline-4", 4, 5632, 256, 265.958),
            Run("pipeline-8", 8, 5400, 150, 411.662),
        ),
        "Most convolutions are 1 x 1 or have few channels, and reach less of a P40's peak than the three quarters that "
        "the simulator takes for all: ours is faster throughout. The speed-ups compare pipelines alone.",
    ),
)


def measured(benchmark: Benchmark, setting: Setting) -> dict[str, StepFigures | None]:
    def make(run: Run, devices: list[str]) -> TrainingStep:
        options = run.options | ({"chunks": min(run.chunks, 8)} if setting.is_small else {})
        return TrainingStep(benchmark.workload(run, setting), devices, None if run.is_plain else options)

    steps = {
        run.name: devices and partial(make, run, devices)
        for run in benchmark.runs
        for devices in [setting.first(run.devices)]
    }
    return measure(steps, setting, benchmark.name)


def simulated(benchmark: Benchmark) -> dict[str, StepFigures | None]:
    figures: dict[str, StepFigures | None] = {}
    plans = {}
    for run in benchmark.runs:
        if run.devices not in plans:
            shape = (run.batch, 3, benchmark.size, benchmark.size)
            plans[run.devices] = plan_for(benchmark.make_model, shape, run.devices, P40, **run.options)
        figures[run.name] = simulate(plans[run.devices], batch=run.batch, **run.options)
    return figures


def rows_of(
    benchmark: Benchmark, figures: dict[str, StepFigures | None], samples: Callable[[Run], int]
) -> tuple[dict[str, Cell], ...]:
    rows = []
    base: float | None = None
    for run in benchmark.runs:
        step = figures.get(run.name)
        throughput = samples(run) / step.seconds if step else None
        base = throughput if run.is_plain else base
        speed_up, published = over(throughput, base), run.throughput / benchmark.runs[0].throughput
        rows.append(
            {
                "run": run.name,
                "devices": run.devices,
                "samples/s": throughput,
                "published samples/s": run.throughput,
                "speed-up": speed_up,
                "published speed-up": published,
                "speed-up over published": over(speed_up, published),
            }
        )
    return tuple(rows)


def tables(setting: Setting) -> Iterator[Table]:
    on_cpu = setting.devices[0] == "cpu"
    for benchmark in BENCHMARKS:
        figures = measured(benchmark, setting)
        samples = 16 if setting.is_small else 0
        yield Table(
            f"{benchmark.name}, {setting.where}",
            rows_of(benchmark, figures, lambda run, samples=samples: samples or run.batch),
            (f"{os.cpu_count()} cores, a worker for each device; the baseline has one core.",) if on_cpu else (),
        )
    for benchmark in BENCHMARKS:
        yield Table(
            f"{benchmark.name}, simulated for Tesla P40",
            rows_of(benchmark, simulated(benchmark), lambda run: run.batch),
            (benchmark.note,),
            Plot("run", ("speed-up", "published speed-up"), "speed-up over a plain model"),
        )


if __name__ == "__main__":
    main(tables, __doc__)
