"""Every value that leaves torch is accounted for: what forward reads is the plain model's, or an error of ours."""

import copy
from collections.abc import Callable
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

# -- a buffer that forward changes, read in many ways ----------------------------------------------------------------

SLOTS = 3
READS_OF_A_BUFFER = {  # beside those of test_reads_table
    "int of an element": lambda ptr: int(ptr[0]),
    "index": lambda ptr: [0, 1, 2][ptr],
    "array": lambda ptr: int(np.asarray(ptr)[0]),
    "bool": lambda ptr: 2 if bool(ptr == 2) else 1 if bool(ptr == 1) else 0,
    "contains": lambda ptr: next(i for i in range(SLOTS) if i in ptr),
    "equal": lambda ptr: next(i for i in range(SLOTS) if torch.equal(ptr, torch.tensor([i]))),
}
ON_DEVICES = ("index", "contains")


class Bank(nn.Module):
    """Keeps the last rows that it has seen, and reads where the next one goes."""

    def __init__(self, read: Any):
        super().__init__()
        self.read = read
        self.register_buffer("rows", torch.zeros(SLOTS, 4))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        p = self.read(self.ptr)
        self.rows[p] = h.detach().mean(0)
        self.ptr[0] = (p + 1) % SLOTS
        return h + self.rows.sum(0)


class WithBank(Layered, first=4, last=4):
    def __init__(self, read: Any):
        super().__init__()
        self.bank = Bank(read)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.bank(self.first(x)))


def assert_same_steps(model: nn.Module, batches: list[torch.Tensor], **more: Any) -> None:
    """Steps of a pipe, planned on the first batch, are those of the plain model over the micro-batches.

    Raises:
        FxpipeError: some step is refused.
    """
    plain = copy.deepcopy(model)
    options: Any = dict(devices=workers(2), chunks=CHUNKS, example_args=(batches[0],), **more)
    with fxpipe.pipeline(model, **options) as pipe:
        for x in batches:
            pipe.zero_grad()
            plain.zero_grad()
            pipe.forward_backward(x, target=None, loss_fn=lambda y: y.square().mean())
            for part in parts_of(x, CHUNKS, len(x)):
                (plain(part).square().mean() / CHUNKS).backward()
            assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])
            assert_same_state(model, plain, exact=False)


def batches() -> list[torch.Tensor]:
    return list(torch.rand(STEPS, 8, 4, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.anywhere if way in ON_DEVICES else ()) for way in READS_OF_A_BUFFER]
)
def test_a_buffer_that_it_changes_is_read_by_a_module(way):
    assert_same_steps(WithBank(READS_OF_A_BUFFER[way]), batches())


class IsBareBank(Bank):
    """Calls no module, so that there is nothing to be recorded before the line that reads."""

    def __init__(self, read: Any):
        super().__init__(read)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.weight) @ self.weight


@pytest.mark.parametrize("way", READS_OF_A_BUFFER)
def test_a_model_of_one_piece_that_reads_a_buffer_that_it_changes_is_never_wrong(way):
    with pytest.raises(FxpipeError, match=r"test_reads.py:\d+"):
        assert_same_steps(IsBareBank(READS_OF_A_BUFFER[way]), batches())


# -- sizes that depend on values -------------------------------------------------------------------------------------

SIZES = {  # dim 0 of what these give depends on values
    "where": lambda t: torch.where(t[:, 0] > 0.5)[0],
    "nonzero": lambda t: (t[:, 0] > 0.5).nonzero(),
    "mask": lambda t: t[t[:, 0] > 0.5],
    "unique": lambda t: torch.unique((t[:, 0] > 0.5).long())[1:],
}
READS_OF_A_SIZE = {  # beside those of test_reads_table
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
        self.first, self.choosing, self.last = nn.Linear(4, 4), Choosing(*options), nn.Linear(4, 4)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(4))
            self.first.bias.zero_()

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
    [*((r, "where") for r in READS_OF_A_SIZE), *(pytest.param("len", s, marks=pytest.mark.anywhere) for s in SIZES)],
)
def test_a_size_that_depends_on_values_is_read_by_a_module(read, size, of_input):
    assert_same_steps(ChoosingInside(SIZES[size], READS_OF_A_SIZE[read], of_input), chosen(0, 2, 3), out_dims=0)


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
    model = nn.Sequential(nn.Linear(4, 4), SlicedInside(), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    assert_same_steps(model, batches(), out_dims=0)


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
    torch.manual_seed(0)
    with pytest.raises(TraceError, match=r"test_reads.py:\d+; .*"):
        fxpipe.pipeline(ReadsASizeLate().eval(), ["cpu"], chunks=1, example_args=(torch.randn(8, 4),))


class GoesByText(nn.Module):
    """A branch on a number that was made a text, of an input that is the same for all samples."""

    def __init__(self, goes: Callable[[str], bool]):
        super().__init__()
        self.lin, self.goes = nn.Linear(4, 4), goes

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        h = self.lin(x)
        return h * 2 if self.goes(f"{number}") else h - 1


TEXTS = {
    "larger": lambda text: int(text) > 1,  # 2 and the next number are on one side
    "equal": lambda text: text == "5",
    "sign": lambda text: int(text) < 0,
    "truth": lambda text: "True" in text,
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_branch_on_the_text_of_a_number_goes_either_way(name):
    model, x = GoesByText(TEXTS[name]), torch.randn(4, 4)
    numbers = [torch.tensor(n) for n in ((True, False) if name == "truth" else (2, 1, 5, -3))]
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu"], chunks=CHUNKS, example_args=(x, numbers[0])) as pipe:
        for number in numbers:
            torch.testing.assert_close(pipe(x, number), plain(x, number))
