"""What the published experiments have in common: where they run, how they are timed and simulated, their command line.

An experiment is a script with `tables(setting)`, which yields `Table`s: what was measured here, then what the simulator
says of the paper's hardware. Columns with figures of the paper are called "published ...".
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.hardware import Hardware
from fxpipe.planning.plans import Plan

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all benchmarks share

from tables import Table
from timing import Contestant, run_once, run_rounds, use_threads

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """Where measurements run, and how large they are."""

    devices: tuple[str, ...]
    is_small: bool  # sizes for a CPU in place of the paper's
    rounds: int  # timed steps of each

    @property
    def where(self) -> str:
        kind = self.devices[0].partition(":")[0]
        name = torch.cuda.get_device_name() if kind == "cuda" else "CPU workers"
        return f"measured here, {name}{', small' if self.is_small else ''}"

    def first(self, count: int) -> list[str] | None:
        """So many of the devices; None where there are fewer."""
        return list(self.devices[:count]) if count <= len(self.devices) else None


@dataclass(frozen=True)
class Workload:
    """A model and a mini-batch to train it on."""

    model: nn.Module
    inputs: Tensor
    target: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StepFigures:
    """A training step: its seconds, and by device the share in which it computes and the bytes it takes at most."""

    seconds: float
    busy: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()

    @property
    def utilisation(self) -> float | None:
        return statistics.fmean(self.busy) if self.busy else None

    @property
    def gib(self) -> float | None:
        """The memory of all devices together."""
        return sum(self.memory) / 2**30 if self.memory else None


# ---- measured ----


class TrainingStep:
    """A step of a copy of the model with SGD: as a pipeline over the devices or, without options, plain on the first.

    On CPUs each worker runs operations in one thread, as the plain model does.
    """

    def __init__(self, workload: Workload, devices: Sequence[str], options: Mapping[str, Any] | None = None):
        self.devices, self.pipe, self._loss_fn = devices, None, workload.loss_fn
        self._inputs, self._target = workload.inputs.to(devices[0]), workload.target.to(devices[-1])
        self.model = copy.deepcopy(workload.model)
        if options is None:
            self.model.to(devices[0])
        else:
            with use_threads(len(devices)):
                self.pipe = fxpipe.pipeline(self.model, devices=devices, example_args=(self._inputs,), **options)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def __call__(self) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        if self.pipe is not None:
            loss = self.pipe.forward_backward(self._inputs, target=self._target, loss_fn=self._loss_fn)
        else:
            loss = self._loss_fn(self.model(self._inputs), self._target)
            loss.backward()
        self._optimizer.step()
        synchronize(self.devices)
        return loss.item()

    @property
    def contestant(self) -> Contestant:
        return Contestant(self, len(self.devices))  # which workers share out when they start

    def figures(self, seconds: float) -> StepFigures:
        """Figures of a step that took so long, from one more of them."""
        on_gpus = self.devices[0].startswith("cuda")
        for device in self.devices if on_gpus else ():
            torch.cuda.reset_peak_memory_stats(device)
        run_once(self.contestant)
        memory = tuple(torch.cuda.max_memory_allocated(device) for device in self.devices) if on_gpus else ()
        record = None if self.pipe is None else self.pipe.last_step
        busy = () if record is None else tuple(1 - record.bubble(d) for d in range(len(record.devices)))
        return StepFigures(seconds, busy, memory)

    @property
    def planned_bytes(self) -> float:
        """The memory of all devices together, as planned."""
        assert self.pipe is not None
        plan = self.pipe.plan
        return sum(float(plan.memory(stage.index, b=plan.micro_batch)) for stage in plan.stages)

    def close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()


def synchronize(devices: Sequence[str]) -> None:
    for device in devices:
        if device != "cpu":
            torch.get_device_module(device).synchronize(device)


StepMaker = Callable[[], TrainingStep]


def measure(steps: Mapping[str, StepMaker | None], setting: Setting, title: str) -> dict[str, StepFigures | None]:
    """Medians of training steps; None for those that lack devices. Small ones are made together and take turns.

    At the paper's size each has the devices to itself, whose memory it may fill.
    """
    makers = {name: make for name, make in steps.items() if make is not None}
    groups = [[*makers]] if setting.is_small else [[name] for name in makers]
    figures = dict.fromkeys(steps)
    for names in groups:
        with ExitStack() as stack:
            group = {name: stack.enter_context(closing(makers[name]())) for name in names}
            contestants = {name: step.contestant for name, step in group.items()}
            seconds = run_rounds(contestants, setting.rounds, title, warm_up=1)
            figures |= {name: step.figures(statistics.median(seconds[name])) for name, step in group.items()}
    return figures


# ---- simulated ----


def plan_for(
    make_model: Callable[[], nn.Module],
    shape: Sequence[int],
    devices: int,
    hardware: Hardware,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Plan:
    """The plan of a model for hardware that is not here; neither model nor inputs have values. GPipe's schedule."""
    with torch.device("meta"):
        model, inputs = make_model(), torch.zeros(*shape, dtype=dtype)
    defaults = {"schedule": "gpipe", "checkpoint": "except_last" if devices > 1 else "never", "optimizer_state": 0}
    return fxpipe.plan(model, devices, hardware=hardware, example_args=(inputs,), check=False, **defaults | options)


def simulate(plan: Plan, **variation: Any) -> StepFigures:
    """A step of a plan with its update. Copies run on streams of their own, as on GPUs, unless it is told otherwise."""
    simulation = fxpipe.simulate(plan, **{"overlaps": True} | variation)
    seconds = simulation.step_seconds + simulation.update_seconds
    memory = tuple(device.peak for device in simulation.memory)
    return StepFigures(seconds, tuple(busy / seconds for busy in simulation.busy), memory)


def over(ours: float | None, published: float | None) -> float | None:
    """How many times the published figure ours is."""
    return None if ours is None or published is None else ours / published


# ---- command line ----


def default_setting(rounds: int = 5) -> Setting:
    """All GPUs at the paper's size; without one the cores of the CPU, one worker each, at a small size."""
    gpus = tuple(f"cuda:{k}" for k in range(torch.cuda.device_count()))
    return Setting(gpus or ("cpu",) * (os.cpu_count() or 1), not gpus, rounds)


def main(tables: Callable[[Setting], Iterator[Table]], description: str) -> None:
    setting = default_setting()
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--devices", help="with commas (default: all GPUs; without one a CPU worker for each core)")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU (default: the paper's, on GPUs)")
    parser.add_argument("--rounds", type=int, default=setting.rounds, help=f"timed steps (default: {setting.rounds})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables to this file")
    options = parser.parse_args()
    devices = tuple(options.devices.split(",")) if options.devices else setting.devices
    results = []
    for table in tables(Setting(devices, options.small or devices[0] == "cpu", options.rounds)):
        print(table, flush=True)
        results.append(table)
    if options.json:
        options.json.write_text(json.dumps({"tables": [table.as_json() for table in results]}, indent=1))
