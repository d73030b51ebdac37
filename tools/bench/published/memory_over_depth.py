"""Memory over depth: the largest models of torchgpipe's and GPipe's tables, over 1, 2, 4 and 8 devices.

    python tools/bench/published/memory_over_depth.py             as many GPUs as there are
    python tools/bench/published/memory_over_depth.py --deepest   the models over 8 devices, too: minutes of planning

U-Net (B, C) with mini-batches of 32 images of 192 x 192 and SGD, AmoebaNet-D (L, D) with 128 of 224 x 224 and RMSProp:
torchgpipe 0.0.7, docs/benchmarks.rst, on Tesla P40. AmoebaNet-D and Transformer-L also in GPipe, arXiv 1811.06965,
table 1, on Cloud TPU v2 and v3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from experiment import Setting, TrainingStep, Workload, main, measure, over, plan_for, simulate
from models import GPT
from paper_hardware import P40, TPU_V3
from paper_models import AmoebaNetD, UNet
from tables import Cell, Plot, Table
from torch import nn

from fxpipe.hardware import GiB, Hardware

MOST_DEVICES = 4  # of a model that is planned without being asked for


@dataclass(frozen=True)
class Entry:
    """A model of a table: devices, micro-batches, and GiB of all devices together as published."""

    name: str
    make_model: Callable[[], nn.Module]
    devices: int
    chunks: int
    parameters: str  # as published
    published: dict[str, float]  # by source

    @property
    def options(self) -> dict[str, object]:
        recompute = "never" if self.name.startswith("baseline") else "except_last"
        return {"chunks": self.chunks, "schedule": "gpipe", "checkpoint": recompute}


@dataclass(frozen=True)
class Series:
    """A table: models of one kind, ever deeper and wider."""

    name: str
    shape: tuple[int, ...]
    hardware: Hardware
    optimizer_state: float  # bytes for each byte of a parameter
    entries: tuple[Entry, ...]
    has_model_memory: bool  # is what is published activations only
    dtype: torch.dtype = torch.float32
    note: str = ""


def unet(kind: str, blocks: int, channels: int, devices: int, chunks: int, parameters: str, gib: float) -> Entry:
    name = f"{kind} ({blocks}, {channels})"
    return Entry(name, partial(UNet, blocks, channels), devices, chunks, parameters, {"torchgpipe": gib})


def amoebanet(
    kind: str, layers: int, filters: int, devices: int, parameters: str, gib: float | None, gpipe: float
) -> Entry:
    published = {"torchgpipe": gib, "GPipe": gpipe * 1e9 / 2**30}
    chunks = 1 if kind == "baseline" else 128
    known = {name: value for name, value in published.items() if value is not None}
    return Entry(
        f"{kind} ({layers}, {filters})", partial(AmoebaNetD, layers, filters), devices, chunks, parameters, known
    )


def transformer(kind: str, layers: int, devices: int, chunks: int, parameters: str, gpipe: float) -> Entry:
    make = partial(GPT, tokens=32_000, length=1024, width=2048, depth=layers, heads=32)
    return Entry(f"{kind} {layers}", make, devices, chunks, parameters, {"GPipe": gpipe * 1e9 / 2**30})


SERIES = (
    Series(
        "U-Net (B, C)",
        (32, 3, 192, 192),
        P40,
        0,
        (
            unet("baseline", 6, 72, 1, 1, "362.2M", 20.3),
            unet("pipeline-1", 11, 128, 1, 32, "2.21B", 20.5),
            unet("pipeline-2", 24, 128, 2, 32, "4.99B", 43.4),
            unet("pipeline-4", 24, 160, 4, 32, "7.80B", 79.1),
            unet("pipeline-8", 48, 160, 8, 128, "15.82B", 154.1),
        ),
        False,
        note="Published is what torch's allocator had reserved, ours what tensors take, with other cuts.",
    ),
    Series(
        "AmoebaNet-D (L, D), activations",
        (128, 3, 224, 224),
        P40,
        1,
        (
            amoebanet("baseline", 18, 208, 1, "81.5M", None, 6.26),
            amoebanet("pipeline-1", 18, 416, 1, "319.0M", 0.91, 3.46),
            amoebanet("pipeline-2", 18, 544, 2, "542.7M", 3.39, 8.11),
            amoebanet("pipeline-4", 36, 544, 4, "1.06B", 6.91, 15.21),
            amoebanet("pipeline-8", 72, 512, 8, "1.84B", 10.83, 26.24),
        ),
        True,
        note="torchgpipe's are what the allocator had reserved, with a cut between cells; ours is what tensors take. "
        "GPipe's are of TPUs, where XLA fuses operations and keeps less than PyTorch for the baseline, with which "
        "torchgpipe ran out of memory, as a P40 would here.",
    ),
    Series(
        "Transformer-L, activations",
        (32, 1024),
        TPU_V3,
        1,
        (
            transformer("naive-1", 3, 1, 1, "282.2M", 3.15),
            transformer("pipeline-1", 13, 1, 32, "785.8M", 6.4),
            transformer("pipeline-8", 103, 8, 32, "5.3B", 50.9),
        ),
        True,
        torch.long,
        "GPipe does not say how many micro-batches it had, here 32; each layer is then kept as its input alone. Of "
        "naive-1 it is said that the batch is 32, which PyTorch's operations cannot hold in 3 GB: XLA fuses them.",
    ),
)


def parameters_of(entry: Entry) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in entry.make_model().parameters())


def row(series: Series, entry: Entry, gib: float | None) -> dict[str, Cell]:
    row: dict[str, Cell] = {
        "model": entry.name,
        "devices": entry.devices,
        "parameters": f"{parameters_of(entry) / 1e6:,.1f}M",
        "published parameters": entry.parameters,
        "GiB": gib,
    }
    for name in dict.fromkeys(name for one in series.entries for name in one.published):
        row[f"published GiB, {name}"] = entry.published.get(name)
        row[f"over {name}"] = over(gib, entry.published.get(name))
    return row


# ---- measured ----


def measured(setting: Setting) -> Table:
    """Of U-Nets: on GPUs what torch's allocator has given at most."""
    series = SERIES[0]
    rows = []
    for entry in series.entries if not setting.is_small else ():
        devices = setting.first(entry.devices)
        options = None if entry.options["checkpoint"] == "never" else entry.options
        make = partial(make_step, entry.make_model, series.shape, devices, options) if devices else None
        figures = measure({"unet": make}, setting, entry.name)["unet"]
        rows.append(row(series, entry, figures.gib if figures else None))
    notes = () if rows else ("torch does not count memory of CPUs: nothing is measured but that a step of each runs.",)
    return Table(f"Memory of {series.name}, {setting.where}", tuple(rows or small_rows(setting)), notes)


def make_step(
    make_model: Callable[[], nn.Module], shape: tuple[int, ...], devices: list[str], options: dict[str, object] | None
) -> TrainingStep:
    images, mask = torch.rand(*shape), torch.rand(shape[0], 1, *shape[2:])
    return TrainingStep(Workload(make_model(), images, mask, F.binary_cross_entropy_with_logits), devices, options)


def small_rows(setting: Setting) -> Iterator[dict[str, Cell]]:
    """Of small U-Nets on two workers, what is planned."""
    for blocks in (1, 2, 4):
        for mode in ("never", "except_last"):
            options = {"chunks": 4, "schedule": "gpipe", "checkpoint": mode}
            step = make_step(partial(UNet, blocks, 8, 3), (8, 3, 32, 32), list(setting.devices[:1]) * 2, options)
            planned = step.planned_bytes / 2**20
            figures = measure({"unet": lambda step=step: step}, setting, f"U-Net ({blocks}, 8)")["unet"]
            yield {
                "model": f"({blocks}, 8), recomputing {mode}",
                "planned MiB": planned,
                "ms": 1e3 * figures.seconds if figures else None,
                "published": "on GPUs only",
            }


# ---- simulated ----


def simulated_gib(series: Series, entry: Entry) -> float:
    """Of all devices together. On one device a plan may need more than there is: it is made for the like with more."""
    roomy = replace(series.hardware, memory=1000 * GiB)
    options = entry.options | {"optimizer_state": series.optimizer_state}
    plan = plan_for(entry.make_model, series.shape, entry.devices, roomy, series.dtype, **options)
    static = sum(stage.parameter_bytes + stage.state_bytes for stage in plan.stages)
    return sum(simulate(plan).memory) / 2**30 - (static / 2**30 if series.has_model_memory else 0.0)


def tables(setting: Setting, deepest: bool = False) -> Iterator[Table]:
    yield measured(setting)
    for series in SERIES:
        entries = [entry for entry in series.entries if deepest or entry.devices <= MOST_DEVICES]
        rows = [
            row(series, entry, simulated_gib(series, entry) if entry in entries else None) for entry in series.entries
        ]
        left = () if len(entries) == len(series.entries) else ("Over 8 devices only with --deepest.",)
        columns = tuple(name for name in rows[0] if "GiB" in name)
        yield Table(
            f"Memory of {series.name}, simulated for {series.hardware.name}",
            tuple(rows),
            (series.note, *left),
            Plot("model", columns, "GiB of all devices"),
        )


if __name__ == "__main__":
    deepest = "--deepest" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--deepest"]
    main(partial(tables, deepest=deepest), __doc__)
