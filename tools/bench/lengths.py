"""What batches of changing sizes cost: texts padded to their longest sample, pictures of several sizes.

    python tools/bench/lengths.py [--model gpt | gpt2 | unet] [--rounds 8] [--batches 30] [--no-plain]

What is compared, how, and what came out is in tools/bench/README.md.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, UNet
from tabulate import tabulate
from timing import Contestant, ratios, run_rounds, summarise
from torch import Tensor, nn

import fxpipe

SAMPLES, VOCABULARY = 8, 1000
CHUNKS, WORKERS = 4, 2
WARM_UP = 1

Size = tuple[int, ...]  # a length; a height and a width
Batch = tuple[Tensor, Tensor]  # input and target


@dataclass(frozen=True)
class Workload:
    """A model, with batches of any size."""

    make: Callable[[], nn.Module]
    size: Callable[[], Size]  # draws one
    same: Callable[[float], Size]  # the size of so many elements, as nearly as can be
    batch: Callable[[Size], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]


# -- texts -----------------------------------------------------------------------------------------------------------


def gpt() -> nn.Module:
    """Six layers of width 128."""
    return GPT(VOCABULARY, length=1024, width=128, depth=6, heads=4)


def gpt2() -> nn.Module:
    """GPT-2 small of transformers, with random weights; its logits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(GPT2Config(use_cache=False, vocab_size=VOCABULARY))

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids).logits

    return Logits().eval()  # without dropout


def text_of(size: Size) -> Batch:
    ids = torch.randint(0, VOCABULARY, (SAMPLES, *size))
    return ids, ids


def text_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def text(make: Callable[[], nn.Module]) -> Workload:
    return Workload(make, lambda: (random.randint(20, 80),), lambda number: (round(number),), text_of, text_loss)


# -- pictures --------------------------------------------------------------------------------------------------------

SIDES = range(32, 97, 8)  # the U-Net halves them three times


def pictures_of(size: Size) -> Batch:
    return torch.randn(SAMPLES, 3, *size), torch.randint(4, (SAMPLES, *size))


def nearest_area(number: float) -> Size:
    return min(itertools.product(SIDES, SIDES), key=lambda size: abs(math.prod(size) - number))


def pictures() -> Workload:
    return Workload(
        UNet, lambda: (random.choice(SIDES), random.choice(SIDES)), nearest_area, pictures_of, F.cross_entropy
    )


WORKLOADS = {"gpt": text(gpt), "gpt2": text(gpt2), "unet": pictures()}


def train(model: Any, loss: Callable[[Tensor, Tensor], Tensor], batches: Sequence[Batch]) -> None:
    for x, target in batches:
        model.zero_grad()
        loss(model(x), target).backward()


def train_pipe(pipe: Any, loss: Callable[[Tensor, Tensor], Tensor], batches: Sequence[Batch]) -> None:
    for x, target in batches:
        pipe.zero_grad()
        pipe.forward_backward(x, target=target, loss_fn=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="gpt")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--no-plain", action="store_true", help="the pipe alone")
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    threads, workload = torch.get_num_threads(), WORKLOADS[options.model]
    sizes = [workload.size() for _ in range(options.batches)]
    elements = sum(map(math.prod, sizes)) / len(sizes)
    same = workload.same(elements)
    model = workload.make()
    plain = copy.deepcopy(model)
    changing, fixed = [workload.batch(size) for size in sizes], [workload.batch(same) for _ in sizes]
    with fxpipe.pipeline(model, ["cpu"] * WORKERS, CHUNKS, example_args=changing[0][:1]) as pipe:
        seconds = []
        for batch in changing:  # the first run over the data, in which graphs are made
            begin = time.perf_counter()
            train_pipe(pipe, workload.loss, [batch])
            seconds.append(time.perf_counter() - begin)
        graphs = len(pipe._fxpipe.graphs)
        runs: dict[str, tuple[Callable[[], None], int]] = {
            "pipe, changing": (functools.partial(train_pipe, pipe, workload.loss, changing), 1),
            "pipe, one size": (functools.partial(train_pipe, pipe, workload.loss, fixed), 1),
        }
        if not options.no_plain:
            runs["plain, changing"] = functools.partial(train, plain, workload.loss, changing), threads
            runs["plain, one size"] = functools.partial(train, plain, workload.loss, fixed), threads
        processor: dict[str, list[float]] = {name: [] for name in runs}

        def noted(name: str, run: Callable[[], None]) -> None:
            begin = time.process_time()
            run()
            processor[name].append(time.process_time() - begin)

        contestants = {
            name: Contestant(functools.partial(noted, name, run), number) for name, (run, number) in runs.items()
        }
        before = os.getloadavg()[0]
        measured = run_rounds(contestants, options.rounds, options.model, warm_up=WARM_UP)
    processor = {name: taken[WARM_UP:] for name, taken in processor.items()}
    print(
        f"{options.model}: {len(sizes)} batches of {SAMPLES} samples, {len({*sizes})} sizes, "
        f"{'x'.join(map(str, min(sizes)))} to {'x'.join(map(str, max(sizes)))}; one size: {'x'.join(map(str, same))}, "
        f"{math.prod(same) / elements - 1:+.1%} elements; {CHUNKS} micro-batches, {WORKERS} workers; "
        f"load {before:.1f} to {os.getloadavg()[0]:.1f}"
    )
    print(
        f"first run over the data: {sum(seconds):.2f} s, the second batch {seconds[1]:.2f} s of it; {graphs} graphs; "
        f"slowest of the others {max(seconds[2:]):.2f} s"
    )
    table = [[name, str(summarise(taken)), str(summarise(processor[name]))] for name, taken in measured.items()]
    print(tabulate(table, ["", "seconds", "of a processor"]))
    for what, taken in (("seconds", measured), ("of a processor", processor)):
        changes = ratios(taken["pipe, changing"], taken["pipe, one size"])
        print(f"pipe, changing over one size, {what}: {summarise(changes)}")


if __name__ == "__main__":
    main()
