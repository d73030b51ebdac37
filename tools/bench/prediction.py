"""Does a step take as long as the plan says? The simulated step against `forward_backward` on two CPU workers.

A machine's speed drifts, and a plan knows but the speed of the moment in which its profile was taken. So in each round
every model is profiled once more, one step of each of its pipelines is timed right after that, and what is compared is
the ratio within a round. The plan that the pipeline was made with is compared, too.

The profile is taken with one core at work, while a step keeps two busy, which may slow each other down. How much, is
measured in each round as `throughput.py` does it: a loop of forward and backward alone, and two of them at once in two
threads. With a slowdown s, the simulated seconds in which both workers compute count s times; there are
busy_0 + busy_1 - step of them, since in a step of two stages at least one computes at any time.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from real_models import RealModel
from timing import SETTLE_SECONDS, ratios, summarise, use_one_thread
from tqdm import tqdm

import fxpipe
from fxpipe.inspect.figures import PlanFigures, plan_figures
from fxpipe.plans import Plan
from fxpipe.profiling import Profile
from fxpipe.tracing import Traced

WORKERS = 2
HEADERS = (
    "model",
    "chunks",
    "ms predicted",
    "ms measured",
    "predicted / measured",
    "by the first plan",
    "slowdown",
    "with slowdown",
    "ms outside actions",
)


@dataclass(frozen=True)
class Measurement:
    """Of one pipeline in one round; seconds."""

    predicted: float  # the step, by a profile of this round
    planned: float  # the step, by the plan with which the pipeline was made
    corrected: float  # predicted, with what is computed at the same time slowed down
    measured: float
    outside: float  # of the measured: before the first action and after the last
    slowdown: float  # of two loops at once over one alone


Round = dict[int, Measurement]  # of one model; by number of micro-batches


class Subject:
    """A model with a pipeline for each number of micro-batches, and two copies that show what two cores are worth."""

    def __init__(self, real: RealModel, chunks: Sequence[int], batch: int, stack: ExitStack):
        self.real, self.samples = real, {c: -(-batch // c) for c in chunks}
        self.traced: Traced = fxpipe.trace(real.model, real.args, real.kwargs, chunks=max(chunks))
        self.pipes = {c: stack.enter_context(self._pipeline(c)) for c in chunks}
        self.copies = [copy.deepcopy(real.model) for _ in range(WORKERS)]
        self.pool = stack.enter_context(ThreadPoolExecutor(WORKERS, initializer=use_one_thread))

    def _pipeline(self, chunks: int) -> Any:
        return fxpipe.pipeline(
            copy.deepcopy(self.real.model),
            devices=["cpu"] * WORKERS,
            chunks=chunks,
            example_args=self.real.args,
            example_kwargs=self.real.kwargs,
            schedule="1f1b",
            checkpoint="never",
        )

    def measure(self) -> Round:
        real, smallest = self.real, min(self.samples.values())
        profile = fxpipe.profile(self.traced, real.args, real.kwargs, micro_batch=smallest, threads=1)
        return {chunks: self._measure(chunks, profile) for chunks in self.pipes}

    def _measure(self, chunks: int, profile: Profile) -> Measurement:
        pipe = self.pipes[chunks]
        predicted = plan_figures(with_seconds(pipe.plan, profile, self.samples[chunks]))
        measured, outside = self._step(pipe)
        slowdown = self._loops(chunks, WORKERS) / self._loops(chunks, 1)
        return Measurement(
            predicted=predicted.step_seconds,
            planned=plan_figures(pipe.plan).step_seconds,
            corrected=slowed(predicted, slowdown),
            measured=measured,
            outside=outside,
            slowdown=slowdown,
        )

    def _step(self, pipe: Any) -> tuple[float, float]:
        """Seconds of a step, and how many of them lie outside its actions."""
        real = self.real
        pipe.zero_grad(set_to_none=True)
        time.sleep(SETTLE_SECONDS)
        begin = time.perf_counter()
        pipe.forward_backward(*real.args, target=real.target, loss_fn=real.loss_fn, **real.kwargs)
        took = time.perf_counter() - begin
        return took, took - pipe.last_step.seconds

    def _loops(self, chunks: int, number: int) -> float:
        """Seconds in which as many threads each run half of the micro-batches through a copy of the model."""
        for model in self.copies:
            model.zero_grad(set_to_none=True)
        time.sleep(SETTLE_SECONDS)
        begin = time.perf_counter()
        for future in [self.pool.submit(self._loop, model, chunks) for model in self.copies[:number]]:
            future.result()
        return time.perf_counter() - begin

    def _loop(self, model: torch.nn.Module, chunks: int) -> None:
        real = self.real
        args = [x.tensor_split(chunks) for x in real.args]
        kwargs = {name: x.tensor_split(chunks) for name, x in real.kwargs.items()}
        for i, target in enumerate(real.target.tensor_split(chunks)[: chunks // 2]):
            output = model(*(parts[i] for parts in args), **{name: parts[i] for name, parts in kwargs.items()})
            real.loss_fn(output, target).backward()


def with_seconds(plan: Plan, profile: Profile, samples: int) -> Plan:
    """The same plan with the seconds of another profile."""
    costs = {cost.name: cost for cost in profile.nodes}
    stages = []
    for stage in plan.stages:
        forward = sum(costs[name].forward.at(samples) for name in (*stage.nodes, *stage.copies))
        backward = sum(costs[name].backward.at(samples) for name in stage.nodes)
        stages.append(replace(stage, forward_seconds=forward, backward_seconds=backward))
    return replace(plan, stages=tuple(stages))


def slowed(figures: PlanFigures, slowdown: float) -> float:
    """The step, if what two workers compute at the same time takes so many times as long."""
    step = figures.step_seconds
    both = sum(step * (1 - bubble) for bubble in figures.bubble) - step
    return step + both * (slowdown - 1)


def measure_rounds(
    subjects: dict[str, Subject], rounds: int, warm_up: int = 1
) -> dict[str, list[dict[int, Measurement]]]:
    """Models take turns; each round begins with another one; the warm-up is dropped."""
    found: dict[str, list[dict[int, Measurement]]] = {name: [] for name in subjects}
    names = list(subjects)
    for r in tqdm(range(-warm_up, rounds), desc="rounds", disable=None):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            measured = subjects[name].measure()
            if r >= 0:
                found[name].append(measured)
    return found


def rows(name: str, found: Sequence[Round]) -> list[list[str]]:
    """A row for each number of micro-batches."""
    made = []
    for chunks in found[0]:
        of = [one[chunks] for one in found]
        measured = [m.measured for m in of]
        middle = summarise(measured)
        made.append(
            [
                name,
                str(chunks),
                f"{1e3 * statistics.median(m.predicted for m in of):.0f}",
                f"{1e3 * middle.median:.0f}  {1e3 * middle.first_quartile:.0f}–{1e3 * middle.third_quartile:.0f}",
                str(summarise(ratios([m.predicted for m in of], measured))),
                str(summarise(ratios([m.planned for m in of], measured))),
                str(summarise([m.slowdown for m in of])),
                str(summarise(ratios([m.corrected for m in of], measured))),
                f"{1e3 * statistics.median(m.outside for m in of):.1f}",
            ]
        )
    return made


def load() -> str:
    """How many others run: the averages over one, five and fifteen minutes."""
    return " ".join(f"{x:.1f}" for x in os.getloadavg())
