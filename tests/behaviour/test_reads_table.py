"""The table of all reads: each way a value leaves torch, of each kind of tensor, in the model and in a module of it.

What is read is used as a branch, an index, a size, a factor and the bound of a loop. A pipe is planned on one value and
trains on others, as the plain model over the micro-batches does. Nothing in the table is refused.
"""

import copy
import operator
from typing import Any

import pytest
import torch
from helpers.devices import workers
from helpers.oracle import assert_same_gradients, assert_same_state, parts_of
from torch import nn

import fxpipe

CHUNKS, ROWS = 2, 4
VALUES = (1, 3, 1)  # of the steps; the first one is planned on

# of a tensor that holds one whole number from 0 to 3
READS = {
    "int": lambda t: int(t),
    "float": lambda t: int(float(t) + 0.5),
    "bool": lambda t: int(bool(t > 1)),
    "len": lambda t: len(torch.arange(9)[: t[0]]),
    "iter": lambda t: next(int(row) for row in t),
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist()[0],
    "numpy": lambda t: int(t.numpy()[0]),
    "__index__": lambda t: operator.index(t),
    "range": lambda t: len(range(t)),
    "unpacking": lambda t: (lambda number: int(number))(*t),
    "zip": lambda t: next(int(row) for row, _ in zip(t, "a", strict=True)),
    "comparison": lambda t: sum(1 for number in (1, 2, 3) if t >= number),
    "formatting": lambda t: int(f"{t[0]}"),
}
# of a tensor that has so many rows
READS_OF_A_SIZE = {
    "int": lambda t: int(t.shape[0]),
    "float": lambda t: int(float(t.shape[0]) + 0.5),
    "bool": lambda t: int(bool(t.size(0))),
    "len": lambda t: len(t),
    "iter": lambda t: sum(1 for _ in t),
    "item": lambda t: (t[:, 0] > -9).sum().item(),
    "tolist": lambda t: len(t.tolist()),
    "numpy": lambda t: len(t.detach().numpy()),
    "__index__": lambda t: operator.index(t.shape[0]),
    "range": lambda t: len(range(t.size(0))),
    "unpacking": lambda t: len([*t]),
    "zip": lambda t: sum(1 for _ in zip(t, "abcdefgh", strict=False)),
    "comparison": lambda t: sum(1 for number in (1, 2, 3) if t.numel() >= number * 4),
    "formatting": lambda t: int(f"{t.shape[0]}"),
}
MARKS = {"unpacking": pytest.mark.slow, "item": pytest.mark.anywhere}
SOURCES = ("input", "parameter", "buffer", "changed buffer", "hidden value", "size")


def used(h: torch.Tensor, number: int) -> torch.Tensor:
    h = h * 2 if number > 1 else h  # a branch
    h = h * [1.0, 0.5, 1.5, 0.25][number % 4]  # an index
    h = h + h.new_ones(number + 1, 4).sum(0)  # a size
    h = h * (number + 1)  # a factor
    for i in range(number):  # the bound of a loop
        h = h + h.detach().tanh() * i
    return h


class Part(nn.Module):
    def __init__(self, source: str, way: str):
        super().__init__()
        self.source, self.way = source, way
        self.level = nn.Parameter(torch.ones(1))
        self.register_buffer("fixed", torch.ones(1, dtype=torch.long))
        self.register_buffer("count", torch.ones(1, dtype=torch.long))

    def number(self, h: torch.Tensor, x: torch.Tensor) -> int:
        if self.source == "size":
            number = READS_OF_A_SIZE[self.way](h[h[:, 0] > 0.5])
        else:
            read = READS[self.way]
            if self.source == "input":
                number = read(x[:, :1].amax(0).round().long())
            elif self.source == "hidden value":
                number = read(h.detach()[:, :1].amax(0).round().long())
            elif self.source == "parameter":
                number = read(self.level.detach().round().long())
            elif self.source == "buffer":
                number = read(self.fixed)
            else:
                number = read(self.count)
                self.count.add_(1).remainder_(4)
        return number

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return used(h, self.number(h, x)) * self.level


def linear() -> nn.Linear:
    """One that changes values by little, so that the numbers in them stay."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.mul_(0.01).add_(torch.eye(4))
        layer.bias.zero_()
    return layer


class InAModule(nn.Module):
    def __init__(self, *options: str):
        super().__init__()
        self.first, self.part, self.last = linear(), Part(*options), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(self.first(x), x))


class InTheModel(Part):
    def __init__(self, *options: str):
        super().__init__(*options)
        self.first, self.last = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(self.first(x), x))


def samples(source: str, number: int) -> torch.Tensor:
    """Inputs in each micro-batch of which a read of `source` gives `number`."""
    part = 0.01 * torch.rand(ROWS, 4)
    if source == "size":
        part[:number, 0] = 1.0
    else:
        part[:, 0] = float(number)
    return part.repeat(CHUNKS, 1)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, ())) for way in READS])
def test_what_is_read_is_what_the_plain_model_reads(way, source):
    torch.manual_seed(0)
    kind = (InAModule, InTheModel)[([*READS].index(way) + SOURCES.index(source)) % 2]
    model = kind(source, way)
    plain = copy.deepcopy(model)
    _train(model, plain, source)


def _train(model: nn.Module, plain: nn.Module, source: str) -> None:
    options: Any = {"devices": workers(2), "chunks": CHUNKS, "out_dims": 0}
    with fxpipe.pipeline(model, example_args=(samples(source, VALUES[0]),), **options) as pipe:
        for number in VALUES:
            for each in (model, plain):
                each.zero_grad()
                with torch.no_grad():
                    for name, tensor in (*each.named_parameters(), *each.named_buffers()):
                        if name.endswith({"parameter": "level", "buffer": "fixed"}.get(source, "nothing")):
                            tensor.fill_(number)
            x = samples(source, number)
            pipe.forward_backward(x, target=None, loss_fn=lambda y: y.square().mean())
            for part in parts_of(x, CHUNKS, len(x)):
                (plain(part).square().mean() / CHUNKS).backward()
            assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])
            assert_same_state(model, plain, exact=False)
