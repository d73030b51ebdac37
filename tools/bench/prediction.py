"""Does a step take as long as the plan says? The simulated step against `forward_backward` on two CPU workers.

A machine's speed drifts, and a plan knows but the speed of the moment in which its profile was taken. So in each round
every model is profiled once more, steps of each of its pipelines are timed right after that, and what is compared is
the ratio within a round. The plan that the pipeline was made with is compared, too.

A profile takes medians of many short samples in processor time, which leave out what disturbs the machine now and then.
A step is long enough to be disturbed nearly always, and waits for whichever worker is. So the steps are compared in
three ways: as they are, the fastest of a round, and the undisturbed step of `processor_time.py`. Where the first is far
from the last, the machine is not quiet, and the figure says nothing of the plan.

Two cores at work may also slow each other down, which a plan does not know: its profile is of one core. How much, is
measured in each round: a loop of forward and backward alone, and two of them at once in two threads, each by its
processor time.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from processor_time import Work, noted, undisturbed
from real_models import RealModel
from timing import SETTLE_SECONDS, ratios, summarise, use_one_thread
from tqdm import tqdm

import fxpipe
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.figures import simulate_step
from fxpipe.profiling import Profile
from fxpipe.tracing import Traced

WORKERS = 2
STEPS = 4  # of a pipeline in a round
HEADERS = (
    "model",
    "chunks",
    "ms predicted",
    "undisturbed",
    "fastest",
    "all",
    "predicted / undisturbed",
    "predicted / fastest",
    "predicted / all",
    "first plan / undisturbed",
    "slowdown",
    "ms outside actions",
)


@dataclass(frozen=True)
class Measurement:
    """Of one pipeline in one round; seconds."""

    predicted: float  # the step, by a profile of this round
    planned: float  # the step, by the plan with which the pipeline was made
    steps: tuple[float, ...]  # as they were
    outside: float  # of a step: before the first action and after the last
    slowdown: float  # of two loops at once over one alone, in processor time

    @property
    def fastest(self) -> float:
        return min(self.steps)

    @property
    def typical(self) -> float:
        return statistics.median(self.steps)


@dataclass
class Found:
    """Of one pipeline in all rounds."""

    plan: Plan
    rounds: list[Measurement] = field(default_factory=list)
    work: Work = field(default_factory=dict)  # what its actions took

    @property
    def undisturbed(self) -> float:
        return undisturbed(self.plan, self.work)


class Subject:
    """A model with a pipeline for each number of micro-batches, and two copies that show what two cores are worth."""

    def __init__(self, real: RealModel, chunks: Sequence[int], batch: int, stack: ExitStack):
        self.real, self.samples = real, {c: -(-batch // c) for c in chunks}
        self.traced: Traced = fxpipe.trace(real.model, real.args, real.kwargs, chunks=max(chunks))
        self.pipes = {c: stack.enter_context(self._pipeline(c)) for c in chunks}
        self.found = {c: Found(pipe.plan) for c, pipe in self.pipes.items()}
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
            loss_fn=self.real.loss_fn,
            target=self.real.target,
        )

    def measure(self, is_kept: bool) -> None:
        """A round; the first ones warm up, and are not kept."""
        real, smallest = self.real, min(self.samples.values())
        profile = fxpipe.profile(
            self.traced,
            real.args,
            real.kwargs,
            micro_batch=smallest,
            threads=1,
            loss_fn=real.loss_fn,
            target=real.target,
        )
        for chunks, found in self.found.items():
            work: Work = {}
            measured = self._measure(chunks, profile, work)
            if is_kept:
                found.rounds.append(measured)
                for action, seconds in work.items():
                    found.work.setdefault(action, []).extend(seconds)

    def _measure(self, chunks: int, profile: Profile, work: Work) -> Measurement:
        pipe = self.pipes[chunks]
        predicted = simulate_step(with_seconds(pipe.plan, profile, self.samples[chunks]))
        self._step(pipe)  # its memory is cold, after other models
        with noted(work):
            steps = [self._step(pipe) for _ in range(STEPS)]
        alone, both = (statistics.mean(self._loops(chunks, number)) for number in (1, WORKERS))
        return Measurement(
            predicted=predicted.step_seconds,
            planned=simulate_step(pipe.plan).step_seconds,
            steps=tuple(seconds for seconds, _ in steps),
            outside=statistics.median(outside for _, outside in steps),
            slowdown=both / alone,
        )

    def _step(self, pipe: Any) -> tuple[float, float]:
        """Seconds of a step, from its first action to its last, and of what lies outside these."""
        real = self.real
        pipe.zero_grad(set_to_none=True)
        time.sleep(SETTLE_SECONDS)
        begin = time.perf_counter()
        pipe.forward_backward(*real.args, target=real.target, loss_fn=real.loss_fn, **real.kwargs)
        took = time.perf_counter() - begin
        return pipe.last_step.seconds, took - pipe.last_step.seconds

    def _loops(self, chunks: int, number: int) -> list[float]:
        """As many threads each run half of the micro-batches through a copy of the model: their processor seconds."""
        for model in self.copies:
            model.zero_grad(set_to_none=True)
        time.sleep(SETTLE_SECONDS)
        return [f.result() for f in [self.pool.submit(self._loop, m, chunks) for m in self.copies[:number]]]

    def _loop(self, model: torch.nn.Module, chunks: int) -> float:
        real = self.real
        args = [x.tensor_split(chunks) for x in real.args]
        kwargs = {name: x.tensor_split(chunks) for name, x in real.kwargs.items()}
        begin = time.thread_time()
        for i, target in enumerate(real.target.tensor_split(chunks)[: chunks // 2]):
            output = model(*(parts[i] for parts in args), **{name: parts[i] for name, parts in kwargs.items()})
            real.loss_fn(output, target).backward()
        return time.thread_time() - begin


def with_seconds(plan: Plan, profile: Profile, samples: int) -> Plan:
    """The same plan with the seconds of another profile."""
    costs = {cost.name: cost for cost in profile.nodes}
    stages = []
    for stage in plan.stages:
        forward = sum(costs[name].forward.at(samples) for name in (*stage.nodes, *stage.copies))
        backward = sum(costs[name].backward.at(samples) for name in stage.nodes)
        stages.append(replace(stage, forward_seconds=forward, backward_seconds=backward))
    if profile.loss is not None:
        of_loss = (profile.loss.forward + profile.loss.backward).at(samples)
        stages[-1] = replace(stages[-1], loss_seconds=of_loss)
    return replace(plan, stages=tuple(stages))


def measure_rounds(subjects: dict[str, Subject], rounds: int, warm_up: int = 1) -> None:
    """Models take turns; each round begins with another one; the warm-up is dropped."""
    names = list(subjects)
    for r in tqdm(range(-warm_up, rounds), desc="rounds", disable=None):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            subjects[name].measure(is_kept=r >= 0)


def rows(name: str, subject: Subject) -> list[list[str]]:
    """A row for each number of micro-batches."""
    return [[name, str(chunks), *_figures(found)] for chunks, found in subject.found.items()]


def _figures(found: Found) -> list[str]:
    of, quiet = found.rounds, found.undisturbed
    predicted, planned = [m.predicted for m in of], [m.planned for m in of]
    fastest, typical = [m.fastest for m in of], [m.typical for m in of]
    ms = [f"{1e3 * statistics.median(seconds):.0f}" for seconds in (predicted, [quiet], fastest, typical)]
    return [
        *ms,
        str(summarise([one / quiet for one in predicted])),
        str(summarise(ratios(predicted, fastest))),
        str(summarise(ratios(predicted, typical))),
        f"{statistics.median(planned) / quiet:.2f}",
        str(summarise([m.slowdown for m in of])),
        f"{1e3 * statistics.median(m.outside for m in of):.1f}",
    ]


def load() -> str:
    """How many others run: the averages over one, five and fifteen minutes."""
    return " ".join(f"{x:.1f}" for x in os.getloadavg())
