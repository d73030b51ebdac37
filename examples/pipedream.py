"""A small language model of characters, trained by PipeDream and by synchronous steps.

    python examples/pipedream.py                            three CPU workers
    python examples/pipedream.py --schedule pipedream_2bw   double-buffered weights

Mini-batches stream through the stages without a flush: no stage idles, but the weights that a mini-batch uses are
stale, from up to n - 1 updates ago with n stages. A comparison with synchronous training shows the cost: the same
initial weights, the same text in the same order, the same learning rate. The text is real: the reference of the
Python language, which is part of Python; a token is a byte.

The script prints the number of versions of the weights, both losses, averaged over some mini-batches, the loss of
each model on new text, and how busy the stages were in the last mini-batches of the stream.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe.optim import StageOptimizer

BATCH, CONTEXT, TOKENS = 64, 16, 256
AVERAGED = 20  # mini-batches in a row of the table


class Characters(nn.Module):
    """Some bytes of text (batch x CONTEXT, int64) to the scores of the next one (batch x TOKENS)."""

    def __init__(self, width: int = 32, hidden: int = 192, depth: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.first = nn.Linear(CONTEXT * width, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU()) for _ in range(depth)
        )
        self.head = nn.Linear(hidden, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens).flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def read_text() -> Tensor:
    """The bytes of Python's reference as one long vector of tokens."""
    return torch.tensor(list("\n".join(topics.values()).encode()))


def batches(text: Tensor, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches: pieces of the text from random positions, and the byte after each."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        start = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        yield text[start + torch.arange(CONTEXT)], text[start.squeeze(1) + CONTEXT]


def train_synchronously(model: nn.Module, data: Iterator[tuple[Tensor, Tensor]], rate: float) -> list[float]:
    """Trains the plain model; returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for tokens, following in data:
        loss = F.cross_entropy(model(tokens), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """The loss on some mini-batches of other text."""
    losses = [F.cross_entropy(model(tokens), following) for tokens, following in batches(text, 10, seed=7)]
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu,cpu,cpu", help="a device for each stage, with commas")
    parser.add_argument("--schedule", default="pipedream", choices=("pipedream", "pipedream_2bw"))
    parser.add_argument("--vertical-sync", action="store_true", help="all stages have the same version of the weights")
    parser.add_argument("--steps", type=int, default=400, help="mini-batches (default: 400)")
    options = parser.parse_args()
    devices, rate = options.devices.split(","), 1e-3

    torch.manual_seed(0)
    model = Characters()
    plain = copy.deepcopy(model)
    text = read_text()
    border = len(text) * 9 // 10
    seen, unseen = text[:border], text[border:]
    example, _ = next(batches(seen, 1, seed=1))
    chunks = len(devices) if options.schedule == "pipedream_2bw" else 1
    with fxpipe.pipeline(
        model, devices, chunks, schedule=options.schedule, example_args=(example,), progress=False
    ) as pipe:
        versions = [pipe.plan.weight_versions(j) for j in range(len(devices))]
        print(f"versions of the weights, by stage: {versions}\n")
        optimizer = StageOptimizer(pipe, torch.optim.AdamW, lr=rate)
        stream = pipe.train_stream(
            batches(seen, options.steps, seed=2),
            loss_fn=F.cross_entropy,
            optimizer=optimizer,
            vertical_sync=options.vertical_sync,
        )
        streamed = [loss.item() for loss in stream]
        record = pipe.last_step  # of the last mini-batches
        synchronous = train_synchronously(plain, batches(seen, options.steps, seed=2), rate)
        rows = [
            (
                begin,
                statistics.fmean(streamed[begin : begin + AVERAGED]),
                statistics.fmean(synchronous[begin:][:AVERAGED]),
            )
            for begin in range(0, options.steps, max(AVERAGED, options.steps // 10))
        ]
        headers = ("mini-batches from", f"loss, {options.schedule}", "loss, synchronous")
        print(tabulate(rows, headers=headers, floatfmt=".4f"))
        print(f"\non unseen text: {evaluate(pipe, unseen):.4f} and {evaluate(plain, unseen):.4f}")
        print(f"\n{record}")
        assert stream.applied == (options.steps,) * len(devices), "all stages have made all updates"


if __name__ == "__main__":
    main()
