"""What batches of changing lengths cost: a text padded to its longest sample, as data collators pad it.

    python tools/bench/lengths.py [--model gpt | gpt2] [--rounds 8]

What is compared, how, and what came out is in tools/bench/README.md.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT
from tabulate import tabulate
from timing import Contestant, ratios, run_rounds, summarise
from torch import Tensor, nn

import fxpipe

SAMPLES, VOCABULARY = 8, 1000
CHUNKS, WORKERS = 4, 2


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


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "gpt2": gpt2}


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def batches_of(lengths: Sequence[int]) -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (SAMPLES, length)) for length in lengths]


def train(model: Any, batches: Sequence[Tensor]) -> None:
    for ids in batches:
        model.zero_grad()
        loss_of(model(ids), ids).backward()


def train_pipe(pipe: Any, batches: Sequence[Tensor]) -> None:
    for ids in batches:
        pipe.zero_grad()
        pipe.forward_backward(ids, target=ids, loss_fn=loss_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    threads = torch.get_num_threads()
    lengths = [random.randint(20, 80) for _ in range(options.batches)]
    same = [round(sum(lengths) / len(lengths))] * len(lengths)  # as many tokens
    model = MODELS[options.model]()
    plain = copy.deepcopy(model)
    changing, fixed = batches_of(lengths), batches_of(same)
    with fxpipe.pipeline(model, ["cpu"] * WORKERS, CHUNKS, example_args=(changing[0],)) as pipe:
        seconds = []
        for ids in changing:  # the first run over the data, in which graphs are made
            begin = time.perf_counter()
            train_pipe(pipe, [ids])
            seconds.append(time.perf_counter() - begin)
        graphs = len(pipe._fxpipe.graphs)
        train_pipe(pipe, fixed[:1])
        contestants = {
            "plain, changing": Contestant(lambda: train(plain, changing), threads),
            "plain, fixed": Contestant(lambda: train(plain, fixed), threads),
            "pipe, changing": Contestant(lambda: train_pipe(pipe, changing), 1),
            "pipe, fixed": Contestant(lambda: train_pipe(pipe, fixed), 1),
        }
        measured = run_rounds(contestants, options.rounds, options.model, warm_up=1)
    print(
        f"{options.model}: {len(lengths)} batches of {SAMPLES} samples, {len({*lengths})} lengths, {min(lengths)} to "
        f"{max(lengths)}; fixed: {same[0]}; {CHUNKS} micro-batches, {WORKERS} workers"
    )
    print(
        f"first run over the data: {sum(seconds):.2f} s, the second batch {seconds[1]:.2f} s of it; {graphs} graphs; "
        f"slowest of the others {max(seconds[2:]):.2f} s"
    )
    print(tabulate([[name, str(summarise(taken))] for name, taken in measured.items()], ["", "seconds"]))
    by_lengths = ratios(measured["pipe, changing"], measured["pipe, fixed"])
    by_plain = ratios(measured["pipe, changing"], measured["plain, changing"])
    print(f"pipe, changing over fixed: {summarise(by_lengths)}; over plain: {summarise(by_plain)}")


if __name__ == "__main__":
    main()
