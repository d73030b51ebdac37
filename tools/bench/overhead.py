"""What a pipeline costs beside the model's own operations: for each action, and for a whole model in one stage.

    python tools/bench/overhead.py

And what a step takes to compare the Python state that forward reads, of GPT-2 small.

What is compared, how, and what came out is in tools/bench/README.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from models import WORKLOADS
from tabulate import tabulate
from timing import Contestant, ratios, run_rounds, summarise, use_one_thread
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import fxpipe

MICRO_BATCHES = 64
MODES = (("1f1b", "never"), ("gpipe", "never"), ("1f1b", "always"))


class Trivial(nn.Module):
    """One operation with a parameter: next to nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def mean(y: Tensor) -> Tensor:
    return y.mean()


def micro_batches(model: nn.Module, x: Tensor) -> None:
    """What the actions of one stage are made of: forward, loss and backward of each micro-batch."""
    for part in x.tensor_split(MICRO_BATCHES):
        (mean(model(part)) / MICRO_BATCHES).backward()


def actions(rounds: int) -> list[list[str]]:
    """Microseconds of CPU for each action of a stage of one operation, beyond plain torch's on the same micro-batches.

    All of it runs in one thread, so its CPU time is what it takes, also where others are at the machine.
    """
    x = torch.randn(MICRO_BATCHES, 4, requires_grad=True)
    plain = Trivial()
    with ExitStack() as stack:
        contestants = {"plain": Contestant(lambda: micro_batches(plain, x), 1)}
        for schedule, checkpoint in MODES:
            pipe = stack.enter_context(
                fxpipe.pipeline(
                    Trivial(), ["cpu"], MICRO_BATCHES, example_args=(x,), schedule=schedule, checkpoint=checkpoint
                )
            )
            contestants[f"{schedule}, {checkpoint}"] = Contestant(_step(pipe, x), 1)
        seconds = run_rounds(contestants, rounds, "actions", clock=time.process_time)
    plain_actions = [1e6 * own / (2 * MICRO_BATCHES) for own in seconds["plain"]]
    rows = [["plain loop", "", str(2 * MICRO_BATCHES), str(summarise(plain_actions)), ""]]
    for (schedule, checkpoint), name in zip(MODES, list(contestants)[1:], strict=True):
        count = MICRO_BATCHES * (3 if checkpoint == "always" else 2)
        extra = [1e6 * (ours - own) / count for ours, own in zip(seconds[name], seconds["plain"], strict=True)]
        of_plain = [1e-6 * e * 2 * MICRO_BATCHES / own for e, own in zip(extra, seconds["plain"], strict=True)]
        rows.append([schedule, checkpoint, str(count), str(summarise(extra)), str(summarise(of_plain))])
    return rows


def _step(pipe: Any, x: Tensor) -> Callable[[], object]:
    return lambda: pipe.forward_backward(x, loss_fn=mean)


def one_stage(rounds: int, batch: int) -> list[list[str]]:
    """A model as one stage and one micro-batch, over the plain model."""
    rows = []
    for name, make in WORKLOADS.items():
        torch.manual_seed(0)
        work = make(batch)
        with fxpipe.pipeline(copy.deepcopy(work.model), ["cpu"], 1, example_args=(work.input,)) as pipe:

            def plain(work: Any = work) -> None:
                work.loss_fn(work.model(work.input), work.target).backward()

            def ours(pipe: Any = pipe, work: Any = work) -> None:
                pipe.forward_backward(work.input, target=work.target, loss_fn=work.loss_fn)

            clear = (work.model.zero_grad, pipe.zero_grad)
            seconds = run_rounds(
                {"plain": Contestant(plain, 1, clear[0]), "ours": Contestant(ours, 1, clear[1])}, rounds, name
            )
        rows.append([name, str(summarise(ratios(seconds["ours"], seconds["plain"])))])
    return rows


def guards() -> list[list[str]]:
    """Microseconds in which a step compares the Python state that GPT-2 small reads, median of 200.

    The width is small: the state is of the configuration and of 12 layers of modules.
    """
    config = GPT2Config(n_embd=48, bos_token_id=1, eos_token_id=1, vocab_size=512)
    traced = fxpipe.trace(GPT2LMHeadModel(config), (torch.zeros(2, 8, dtype=torch.long),), check=False, progress=False)
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        assert traced.python_state.holds()
        seconds.append(time.perf_counter() - start)
    return [["GPT-2 small", f"{1e6 * statistics.median(seconds):.1f}"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds (default: 25)")
    parser.add_argument("--batch", type=int, default=8, help="samples in a mini-batch of a model (default: 8)")
    options = parser.parse_args()
    use_one_thread()
    headers = ["schedule", "recomputed", "actions", "µs each, beyond the loop's", "over the loop's"]
    print(f"\none stage of one operation\n\n{tabulate(actions(options.rounds), headers, disable_numparse=True)}")
    headers = ["model", "µs a step to compare what forward reads of Python"]
    print(f"\n{tabulate(guards(), headers, disable_numparse=True)}")
    headers = ["model", "one stage, one micro-batch, over the plain model"]
    print(f"\n{tabulate(one_stage(options.rounds, options.batch), headers, disable_numparse=True)}")


if __name__ == "__main__":
    main()
