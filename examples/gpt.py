"""A small GPT with tied embedding and head, trained as a pipeline and as a plain model.

    python examples/gpt.py                              two CPU workers
    python examples/gpt.py --devices cuda:0,cuda:1      two GPUs
    python -m fxpipe.inspect examples/gpt.py:make_model --input 16x64:int64

The first stage embeds tokens with the same weight that the last stage uses to score them. fxpipe keeps one Parameter
for both: each stage uses a view of it, the gradients of the stages are added, and the optimizer has a single
tensor, as in the plain model. The text is real: the reference of the Python language, which is part of Python; a
token is a byte.

The script prints the partitions, the losses of the pipeline and of the plain model (same initial weights, same text),
and the time of a training step of both.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import fxpipe

BATCH, LENGTH, TOKENS = 16, 64, 256
TOLERANCE = 1e-3  # micro-batches sum gradients in another order, and every step starts from where the last one ended


# ---- the model: plain PyTorch, unaware of the pipeline ----


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each after a layer norm and with a residual connection."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens (batch x length, int64) to the scores of the next token (batch x length x tokens)."""

    def __init__(self, tokens: int = TOKENS, length: int = LENGTH, width: int = 192, depth: int = 4, heads: int = 6):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model() -> nn.Module:
    return GPT()


def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


# ---- the data ----


def read_text() -> Tensor:
    """The bytes of Python's reference as one long vector of tokens."""
    return torch.tensor(list("\n".join(topics.values()).encode()))


def sample_lines(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of the text from random places, BATCH x LENGTH, and the same pieces one token later."""
    start = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    piece = text[start + torch.arange(LENGTH + 1)]
    return piece[:, :-1], piece[:, 1:]


# ---- the comparison ----


def seconds_per_step(contestants: dict[str, tuple[int, Callable[[], float]]], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each contestant, given with its threads; in alternation, since machines drift."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    before = torch.get_num_threads()
    for _ in tqdm(range(rounds), desc="timing", disable=None):
        for name, (threads, step) in contestants.items():
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    torch.set_num_threads(before)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu,cpu", help="a device for each stage, with commas (default: cpu,cpu)")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches in a mini-batch (default: 8)")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    options = parser.parse_args()
    devices = options.devices.split(",")

    torch.manual_seed(0)
    model = make_model()
    plain = copy.deepcopy(model).to(devices[0])
    text = read_text()
    generator = torch.Generator().manual_seed(0)
    tokens, following = sample_lines(text, generator)

    pipe = fxpipe.pipeline(model, devices=devices, chunks=options.chunks, example_args=(tokens,))
    print(f"{pipe.plan}\n")

    pipe_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def pipe_step() -> float:
        pipe_optimizer.zero_grad()
        loss = pipe.forward_backward(tokens, target=following, loss_fn=loss_fn)
        pipe_optimizer.step()
        return loss.item()

    def plain_step() -> float:
        plain_optimizer.zero_grad()
        loss = loss_fn(plain(tokens.to(devices[0])), following.to(devices[0]))
        loss.backward()
        plain_optimizer.step()
        return loss.item()

    rows = []
    for step in tqdm(range(options.steps), desc="training", disable=None):
        tokens, following = sample_lines(text, generator)
        rows.append((step, pipe_step(), plain_step()))
    shown = [row for row in rows if row[0] % 10 == 0 or row is rows[-1]]
    print(tabulate(shown, headers=("step", "loss, fxpipe", "loss, plain"), floatfmt=".6f"))
    difference = max(abs(a - b) for _, a, b in rows)
    print(f"largest difference in {len(rows)} steps: {difference:.1e}\n")
    assert difference < TOLERANCE, "the pipeline does not train as the plain model does"
    assert model.head.weight is model.embedding.weight, "the weight is still one Parameter"

    everything = torch.get_num_threads()
    contestants = {f"plain, {everything} threads": (everything, plain_step), "fxpipe": (everything, pipe_step)}
    if devices[0] == "cpu":
        contestants = {"plain, 1 thread": (1, plain_step), **contestants}
    times = seconds_per_step(contestants, rounds=7)
    table = [(name, 1000 * seconds, next(iter(times.values())) / seconds) for name, seconds in times.items()]
    print(tabulate(table, headers=("training step", "ms, median", "speed"), floatfmt=(None, ".0f", ".2f")))
    pipe.close()


if __name__ == "__main__":
    main()
