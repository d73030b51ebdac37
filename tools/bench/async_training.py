"""Training with and without a flush: GPipe, 1F1B, zero bubble, PipeDream and PipeDream-2BW on CPU workers.

    python tools/bench/async_training.py
    python tools/bench/async_training.py --rounds 3 --mini-batches 12      # a small size

All train the same model on mini-batches of one size, each stage updated by its own AdamW. Contestants take turns within
a round. Told of each, as medians with quartiles:

- milliseconds per sample, of a run of so many mini-batches, with the warm-up and the drain of a stream in it;
- busy: the seconds in which workers were at an action, over all they had; of a stream between its warm-up and its
  drain, of a synchronous one over its last step, update included. An action that waits for a core, or for the
  interpreter, counts as busy: with fewer free cores than stages this says little;
- weights: the versions of them that stages have held, and memory: how much the process has grown while it trained, at
  most, in a process of its own (on Linux).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from models import make_gpt
from tabulate import tabulate
from timing import Contestant, ratios, run_rounds, summarise

import fxpipe
from fxpipe.optim import StageOptimizer

NAMES = ("gpipe", "1f1b", "zero_bubble", "pipedream", "pipedream_2bw")
STREAMS = ("pipedream", "pipedream_2bw")
BATCH, CHUNKS, WORKERS = 8, 4, 2


class Trainer:
    """A pipe that trains a copy of the model by one schedule."""

    def __init__(self, stack: ExitStack, name: str, plan: fxpipe.Plan, mini_batches: int):
        self.name, self.mini_batches = name, mini_batches
        self.workload = make_gpt(BATCH)
        example = (self.workload.input,)
        cuts = [stage.nodes[-1] for stage in plan.stages[:-1]]
        pipe = fxpipe.pipeline(
            copy.deepcopy(self.workload.model), ["cpu"] * WORKERS, 1 if name == "pipedream" else CHUNKS, schedule=name,
            balance=cuts, example_args=example, check=False, hardware="cpu", progress=False,
        )  # fmt: skip
        self.pipe = stack.enter_context(pipe)
        self.optimizer = StageOptimizer(self.pipe, torch.optim.AdamW, lr=1e-4)
        self.versions: tuple[int, ...] = (1,) * WORKERS
        self.busy: list[float] = []

    def run(self) -> None:
        x, t, loss_fn = self.workload.input, self.workload.target, self.workload.loss_fn
        if self.name in STREAMS:
            data = itertools.repeat((x, t), self.mini_batches)
            stream = self.pipe.train_stream(data, loss_fn=loss_fn, optimizer=self.optimizer)
            for _ in stream:
                pass
            self.versions = stream.versions_held
        else:
            for _ in range(self.mini_batches):
                self.pipe.forward_backward(x, target=t, loss_fn=loss_fn, optimizer=self.optimizer)
        self.busy.append(busy_share(self.pipe.last_step, self.name in STREAMS))


def busy_share(record: Any, is_stream: bool) -> float:
    """Computes the share of time in which workers were at an action; of a stream in the middle of what is recorded."""
    rows = [[one for one in record.actions if one.device == d] for d in range(WORKERS)]
    begin, end = 0.0, max(one.end for one in record.actions)
    if is_stream:
        begin = max(row[len(row) // 4].start for row in rows)
        end = min(row[-len(row) // 4].end for row in rows)
    busy = sum(max(0.0, min(one.end, end) - max(one.start, begin)) for row in rows for one in row)
    return busy / (WORKERS * (end - begin))


def make_plan() -> fxpipe.Plan:
    workload = make_gpt(BATCH)
    return fxpipe.plan(
        workload.model, WORKERS, example_args=(workload.input,), chunks=CHUNKS, hardware="cpu", check=False
    )


def peak_growth(name: str, mini_batches: int) -> int:
    """Bytes by which a process of its own grows while it trains, at most."""
    command = [sys.executable, __file__, "--memory-of", name, "--mini-batches", str(mini_batches)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(output.splitlines()[-1]))


def print_growth(name: str, mini_batches: int) -> None:
    """Prints by how much the process grows while it trains, at most: gradients, state, versions, activations."""
    with ExitStack() as stack:
        trainer = Trainer(stack, name, make_plan(), mini_batches)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM, the peak, begins anew
        trainer.run()
        print(json.dumps(resident("VmHWM") - before))


def resident(field: str) -> int:
    """Returns a figure of the process's memory, in bytes, as Linux has it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{field}:")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mini-batches", type=int, default=24, help="of a run (default: 24)")
    parser.add_argument("--memory-of", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(WORKERS)  # of which each worker has one
    if options.memory_of:
        print_growth(options.memory_of, options.mini_batches)
        return
    plan, load = make_plan(), os.getloadavg()
    with ExitStack() as stack:
        trainers = {name: Trainer(stack, name, plan, options.mini_batches) for name in NAMES}
        runs: dict[str, Callable[[], None]] = {name: trainer.run for name, trainer in trainers.items()}
        for run in runs.values():
            run()
        for trainer in trainers.values():
            trainer.busy.clear()
        seconds = run_rounds({name: Contestant(run, 1) for name, run in runs.items()}, options.rounds, "runs")
    samples = BATCH * options.mini_batches
    rows = [
        (
            name,
            str(summarise([1e3 * one / samples for one in own])),
            str(summarise(ratios(seconds["1f1b"], own))),
            str(summarise([100 * one for one in trainers[name].busy])),
            ", ".join(map(str, trainers[name].versions)),
            f"{peak_growth(name, options.mini_batches) / 2**20:.0f}",
        )
        for name, own in seconds.items()
    ]
    headers = ("schedule", "ms per sample", "times as fast as 1f1b", "busy, %", "versions", "memory, MiB")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    print(f"load average {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
