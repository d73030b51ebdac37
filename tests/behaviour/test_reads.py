"""Every value that leaves torch is accounted for: what forward reads is the plain model's, or an error of ours."""

import copy
import operator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.devices import workers
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state, parts_of
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError, TraceError

CHUNKS, STEPS = 2, 4


def assert_same_steps(model: nn.Module, batches: list[torch.Tensor], before: Any = None, **more: Any) -> None:
    """Steps of a pipe, planned on the first batch, are those of the plain model over the micro-batches.

    `before` is called with the number of a step and each of the models.

    Raises:
        FxpipeError: some step is refused.
    """
    plain = copy.deepcopy(model)
    options: Any = dict(devices=workers(2), chunks=CHUNKS, example_args=(batches[0],), **more)
    with fxpipe.pipeline(model, **options) as pipe:
        for step, x in enumerate(batches):
            for each in (model, plain):
                each.zero_grad()
                before(step, each) if before else None
            pipe.forward_backward(x, target=None, loss_fn=lambda y: y.square().mean())
            for part in parts_of(x, CHUNKS, len(x)):
                (plain(part).square().mean() / CHUNKS).backward()
            assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])
            assert_same_state(model, plain, exact=False)


def batches() -> list[torch.Tensor]:
    return list(torch.rand(STEPS, 8, 4, generator=torch.Generator().manual_seed(0)))


def linear() -> nn.Linear:
    """One that changes values by little, so that the numbers in them stay."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.mul_(0.01).add_(torch.eye(4))
        layer.bias.zero_()
    return layer


# -- sizes that depend on values -------------------------------------------------------------------------------------

SIZES = {  # dim 0 of what these give depends on values
    "where": lambda t: torch.where(t[:, 0] > 0.5)[0],
    "nonzero": lambda t: (t[:, 0] > 0.5).nonzero(),
    "mask": lambda t: t[t[:, 0] > 0.5],
    "unique": lambda t: torch.unique((t[:, 0] > 0.5).long())[1:],
}
FORWARDS_OF_A_SIZE = {
    "len": lambda h, some: h if len(some) == 0 else h * 2,
    "iteration": lambda h, some: h + sum((row.sum() for row in some), torch.zeros(())),
    "range": lambda h, some: h + sum((some[i].sum() for i in range(some.shape[0])), torch.zeros(())),
    "unbind": lambda h, some: h + len(some.unbind()),
    "split": lambda h, some: h + len(some.split(2)) if len(some.shape) else h,
    "chunk": lambda h, some: h + len(torch.chunk(some, 3)),
}


class Choosing(nn.Module):
    def __init__(self, size: Any, read: Any, of_input: bool):
        super().__init__()
        self.inner, self.size, self.read, self.of_input = nn.Linear(4, 4), size, read, of_input

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.read(h, self.size(x if self.of_input else h * 1)))


class ChoosingInside(nn.Module):
    def __init__(self, *options: Any):
        super().__init__()
        self.first, self.choosing, self.last = linear(), Choosing(*options), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.choosing(self.first(x), x))


def chosen(*counts: int) -> list[torch.Tensor]:
    """Batches of which so many samples of each micro-batch are chosen."""
    return [
        torch.cat([torch.cat([torch.ones(n, 4), torch.zeros(4 - n, 4)]) + 0.01 * torch.rand(4, 4)] * CHUNKS)
        for n in counts
    ]


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize(
    ("read", "size"),
    [*((r, "where") for r in FORWARDS_OF_A_SIZE), *(pytest.param("len", s, marks=pytest.mark.anywhere) for s in SIZES)],
)
def test_a_size_that_depends_on_values_is_read_by_a_module(read, size, of_input):
    assert_same_steps(ChoosingInside(SIZES[size], FORWARDS_OF_A_SIZE[read], of_input), chosen(0, 2, 3), out_dims=0)


def test_texts_for_people_and_sizes_for_functions_keep_nothing_whole():
    def read(h, some):
        text = f"{h.sum()} {some}"
        assert text
        assert repr(h)
        rows, columns = (*some.shape, 1)[:2]
        return h + some.new_ones(rows, columns).sum() + some.reshape(some.shape).view(rows, columns).sum()

    model = ChoosingInside(SIZES["mask"], read, False)
    with fxpipe.pipeline(model, devices=["cpu"], chunks=CHUNKS, example_args=(chosen(0)[0],), out_dims=0) as p:
        assert p.plan.why == ()
    assert_same_steps(model, chosen(0, 2, 3), out_dims=0)


class SlicedInside(Layered, lin=4):
    """A number of rows that only the stage knows goes on through further functions."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        rows = (h.sum(1) > 2).sum()
        return self.lin(h) * len(h[:rows] * 2)


def test_a_module_that_slices_by_a_hidden_value_runs():
    assert_same_steps(nn.Sequential(linear(), SlicedInside(), nn.Linear(4, 4)), batches(), out_dims=0)


class ReadsASizeLate(nn.Module):
    """A hidden size goes through numpy, and the rest of forward cannot run as Python: it keeps an attribute."""

    def __init__(self):
        super().__init__()
        self.gate, self.lin, self.previous = nn.Linear(4, 1), nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = int(torch.tensor(torch.nonzero(self.gate(x)[..., 0] > 0.2).shape[0] % 4).numpy())
        h = x.clone()
        h[..., number] = 0
        h = self.lin(h)
        out = h + self.previous
        self.previous = h.detach().mean(0)
        return out


def test_a_hidden_size_that_is_seen_when_sizes_are_known_is_refused():
    with pytest.raises(TraceError, match=r"test_reads.py:\d+; .*"):
        fxpipe.pipeline(ReadsASizeLate().eval(), ["cpu"], chunks=1, example_args=(torch.randn(8, 4),))


# -- the table of all reads ------------------------------------------------------------------------------------------
#
# Each way a value leaves torch, of each kind of tensor, in the model and in a module of it. What is read is used as a
# branch, an index, a size, a factor and the bound of a loop. A pipe is planned on one value and trains on others, as
# the plain model over the micro-batches does. Nothing in the table is refused.

ROWS = 4
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
    "text": lambda t: next(number for number in range(4) if f"{t[0]}" == str(number)),
    "int of an element": lambda t: int(t[0]),
    "index": lambda t: [0, 1, 2, 3][t],
    "array": lambda t: int(np.asarray(t)[0]),
    "contains": lambda t: next(number for number in range(4) if number in t),
    "equal": lambda t: next(number for number in range(4) if torch.equal(t, torch.tensor([number], device=t.device))),
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
    "text": lambda t: next(number for number in range(5) if f"{t.shape[0]}" == str(number)),
}
MARKS = {"unpacking": pytest.mark.slow} | dict.fromkeys(("item", "index", "contains"), pytest.mark.anywhere)
SOURCES = ("input", "parameter", "buffer", "changed buffer", "hidden value", "size")


def used(h: torch.Tensor, number: int) -> torch.Tensor:
    h = h * 2 if number > 1 else h  # a branch
    h = h * [1.0, 0.5, 1.5, 0.25][number % 4]  # an index
    h = h + h.new_ones(number + 1, 4).sum(0)  # a size
    h = h * (number + 1)  # a factor
    for i in range(number):  # the bound of a loop
        h = h + h.detach().tanh() * i
    return h


def whole_one() -> torch.Tensor:
    return torch.ones(1, dtype=torch.long)


class Part(Layered, level=lambda: nn.Parameter(torch.ones(1)), fixed=whole_one, count=whole_one):
    def __init__(self, source: str, way: str):
        super().__init__()
        self.source, self.way = source, way

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


@pytest.mark.parametrize(
    ("way", "source"),
    [
        pytest.param(way, source, marks=MARKS.get(way, ()))
        for way in READS
        for source in SOURCES
        if source != "size" or way in READS_OF_A_SIZE
    ],
)
def test_what_is_read_is_what_the_plain_model_reads(way, source):
    kind = (InAModule, InTheModel)[([*READS].index(way) + SOURCES.index(source)) % 2]

    @torch.no_grad()
    def fill(step, model):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith({"parameter": "level", "buffer": "fixed"}.get(source, "nothing")):
                tensor.fill_(VALUES[step])

    assert_same_steps(kind(source, way), [samples(source, number) for number in VALUES], fill, out_dims=0)


# -- a model of one piece -------------------------------------------------------------------------------------------


class Bank(nn.Module):
    """Keeps the last rows that it has seen, and reads where the next one goes.

    Calls no module, so that there is nothing to be recorded before the line that reads.
    """

    def __init__(self, read: Any):
        super().__init__()
        self.read, self.weight = read, nn.Parameter(torch.randn(4, 4))
        self.register_buffer("rows", torch.zeros(4, 4))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, p = x @ self.weight, self.read(self.ptr)
        self.rows[p] = h.detach().mean(0)
        self.ptr[0] = (p + 1) % 4
        return (h + self.rows.sum(0)) @ self.weight


@pytest.mark.parametrize("way", ["int of an element", "index", "array", "bool", "contains", "equal"])
def test_a_model_of_one_piece_that_reads_a_buffer_that_it_changes_is_never_wrong(way):
    with pytest.raises(FxpipeError, match=r"test_reads.py:\d+"):
        assert_same_steps(Bank(READS[way]), batches())
