"""What a step of AdamW takes: one optimizer for all stages, one for each stage, and one that overlaps with the step.

    python tools/bench/updates.py

Two stages of a GPT on two CPU workers. Gradients stay as they are, so that each contestant steps as often as it likes;
the last row is a whole step, forward and backward too.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import ExitStack

import torch
from models import make_gpt
from tabulate import tabulate
from timing import Contestant, ratios, run_rounds, summarise

import fxpipe
from fxpipe.optim import StageOptimizer

BATCH, CHUNKS, WORKERS = 16, 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    workload = make_gpt(BATCH)
    torch.set_num_threads(WORKERS)  # of which each worker has one
    plan = fxpipe.plan(workload.model, WORKERS, example_args=(workload.input,), chunks=CHUNKS, hardware="cpu")
    with ExitStack() as stack:

        def pipe() -> fxpipe.Pipeline:
            model = copy.deepcopy(workload.model)
            made = fxpipe.pipeline(model, ["cpu"] * WORKERS, plan=plan, example_args=(workload.input,), check=False)
            return stack.enter_context(made)

        def train(one: fxpipe.Pipeline, optimizer: StageOptimizer | None = None) -> None:
            one.forward_backward(workload.input, target=workload.target, loss_fn=workload.loss_fn, optimizer=optimizer)

        def train_and_step(one: fxpipe.Pipeline, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
            def run() -> None:
                train(one)
                optimizer.step()
                optimizer.zero_grad()

            return run

        plain_pipe, stage_pipe, *others = (pipe() for _ in range(5))
        for one in (plain_pipe, stage_pipe, *others):
            train(one)
        plain = torch.optim.AdamW(plain_pipe.parameters())
        by_stage = StageOptimizer(stage_pipe, torch.optim.AdamW)
        overlapping = StageOptimizer(others[2], torch.optim.AdamW, overlap=True)
        updates = run_rounds(
            {
                "one optimizer, one core": Contestant(plain.step, 1),
                "one optimizer, both cores in each operation": Contestant(plain.step, WORKERS),
                "StageOptimizer, a core for each stage": Contestant(by_stage.step, 1),
            },
            rounds,
            "updates",
        )
        steps = run_rounds(
            {
                "whole step, one optimizer": Contestant(
                    train_and_step(others[0], torch.optim.AdamW(others[0].parameters())), 1
                ),
                "whole step, StageOptimizer": Contestant(
                    train_and_step(others[1], StageOptimizer(others[1], torch.optim.AdamW)), 1
                ),
                "whole step, overlap=True": Contestant(lambda: train(others[2], overlapping), 1),
            },
            rounds,
            "steps",
        )
    for seconds in (updates, steps):
        first = next(iter(seconds))
        rows = [
            (name, str(summarise([1e3 * t for t in own])), str(summarise(ratios(seconds[first], own))))
            for name, own in seconds.items()
        ]
        print(tabulate(rows, headers=("", "ms", "times as fast"), disable_numparse=True), end="\n\n")


if __name__ == "__main__":
    main()
