"""What forward writes to its inputs: the caller's tensors hold afterwards what the plain model leaves in them."""

import copy
import inspect
import re
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.every_cut import EveryCut
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, StateError, TraceError

BATCH = 7  # in 3 chunks: 3, 2, 2
LAYOUTS = [
    pytest.param({"devices": ["cpu"], "chunks": 1}, id="one device, one micro-batch"),
    pytest.param({"devices": ["cpu"] * 3, "chunks": 3}, id="three stages"),
    pytest.param({"devices": ["cpu"] * 3, "chunks": 3, "checkpoint": "always"}, id="three stages, recomputed"),
]


class Case(Layered, one=4, two=4, three=4, relu=lambda: nn.ReLU(inplace=True)):
    """Layers for a forward that writes."""


class State(Case):
    """Written in several stages, read before and after."""

    def forward(self, x, state):
        h = self.one(x)
        state.mul_(0.5)
        h = self.two(h + state)
        with torch.no_grad():
            state[:, 1:] += h[:, 1:]
        h = self.three(self.relu(h))
        state.add_(h.detach().sum(1, keepdim=True))
        return h + state


class Cache(Case):
    """A cache of keys, written at a position that grows, and a counter of its own for each sample."""

    def forward(self, x, cache, lengths):
        k = self.one(x)
        cache[:, :2].copy_(k.detach()[:, None].expand(-1, 2, -1))
        cache.select(1, 2).add_(k.detach())
        lengths += 1
        return self.three(self.two(k) + cache.sum(1) * lengths[:, None])


class ReluFirst(Case):
    def forward(self, x, other):
        return self.three(self.two(self.one(self.relu(x)))) + other


class Counter(Case):
    """Not cut into micro-batches, and the same for all."""

    def forward(self, x, seen):
        seen += 1
        return self.three(self.two(self.one(x))) / seen


class OfData(Case):
    def forward(self, x, state):
        h = self.three(self.two(self.one(x)))
        state.data.add_(h.detach())
        return h


class Writer(nn.Module):
    def forward(self, h, state):
        state.add_(np.random.default_rng(0).integers(1, 2).item())
        return h * 2


class InAModule(Case, writer=Writer):
    """By a module that is kept whole, and by a function that is."""

    def forward(self, x, state):
        h = self.writer(self.one(x), state)
        return self.three(self.two(subtract(h, state)))


@fxpipe.leaf
def subtract(h, state):
    state.sub_(h.detach())
    return h - 1


def example_of(case):
    x = torch.randn(BATCH, 4)
    if case is Cache:
        return x, torch.randn(BATCH, 5, 4), torch.arange(BATCH)
    return x, torch.zeros(4) if case is Counter else torch.randn(BATCH, 4)


def pair(case, **options):
    plain = case()
    args = example_of(case)
    before = [x.clone() for x in args]
    model = copy.deepcopy(plain)
    leaf_modules = ["writer"] if case is InAModule else ()
    pipe = fxpipe.pipeline(model, example_args=args, leaf_modules=leaf_modules, **options)
    assert all(map(torch.equal, args, before)), "planning has written to the example"
    return plain, model, pipe


CASES = [State, Cache, ReluFirst, OfData, InAModule, Counter]


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_next_call_sees_what_the_plain_model_would_have_left(case, options):
    if case is Counter:
        options = options | {"in_dims": (0, None)}
    plain, model, pipe = pair(case, **options)
    with pipe:
        _, *ours = example_of(case)
        want = [t.clone() for t in ours]
        for step in range(4):
            x = torch.randn(BATCH if step < 3 else BATCH - 2, 4)
            if step == 3 and case is not Counter:
                ours, want = [t[2:].clone() for t in ours], [t[2:].clone() for t in want]
            target, theirs = torch.randn_like(x), x.clone()
            if step == 1:
                F.mse_loss(plain(theirs, *want), target).backward()
                pipe.forward_backward(x, *ours, target=target, loss_fn=F.mse_loss)
            else:
                y, z = plain(theirs, *want), pipe(x, *ours)
                torch.testing.assert_close(z, y)
                F.mse_loss(y, target).backward()
                F.mse_loss(z, target).backward()
            torch.testing.assert_close(ours, want)
            assert torch.equal(x, theirs), "the first input"
        assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])
        assert_same_state(model, plain)


@pytest.mark.parametrize("case", [State, Cache], ids=lambda case: case.__name__)
def test_cut_anywhere_it_leaves_the_same_in_its_inputs(case):
    model = EveryCut(case(), *example_of(case))
    for number, starts in enumerate([*model.cuts(2), *model.cuts(3, every=4)]):
        model.check(starts, 3, ("drop-in", "1f1b")[number % 2], ("always", "never")[number % 2], seed=number)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_written_back_as_well(mode):
    plain, _, pipe = pair(State, devices=["cpu"] * 2, chunks=3)
    with pipe, mode():
        x, ours = example_of(State)
        want = ours.clone()
        for _ in range(3):
            torch.testing.assert_close(pipe(x, ours), plain(x, want))
            torch.testing.assert_close(ours, want)


class WithHistory(Case):
    def forward(self, x, state):
        h = self.two(self.one(x) + state)
        state.copy_(h)
        return self.three(h)


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_is_written_carries_its_graph_to_the_caller_as_in_the_plain_model(chunks):
    plain, model, pipe = pair(WithHistory, devices=["cpu"] * 2, chunks=chunks)
    with pipe:
        x = torch.randn(BATCH, 4)
        for run in (plain, pipe):
            start = torch.ones(BATCH, 4, requires_grad=True)
            state = start * 1
            y = run(x, state)  # through time: the second call goes on from what the first has written
            y = y + run(x + 1, state)
            (y.square().mean() + state.mean()).backward()
            run.start = start.grad
        torch.testing.assert_close(pipe.start, plain.start)
        assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])


def test_nothing_is_written_where_the_step_fails():
    class Fails(State):
        def forward(self, x, state):
            return must_be_small(super().forward(x, state))

    model = Fails()
    x, state = example_of(State)
    with fxpipe.pipeline(model, ["cpu"] * 2, 3, example_args=(x, state)) as pipe:
        before = state.clone()
        for run in (pipe, lambda *args: pipe.forward_backward(*args, loss_fn=lambda y: y.mean())):
            x[-1] = 1e9
            with pytest.raises(OverflowError):
                run(x, state)
            assert torch.equal(state, before)

        def bad_loss(y):
            raise OverflowError("of the loss")

        with pytest.raises(OverflowError):
            pipe.forward_backward(torch.zeros(BATCH, 4), state, loss_fn=bad_loss)
        assert torch.equal(state, before)


@fxpipe.leaf
def must_be_small(h):
    if h.abs().max() > 1e6:
        raise OverflowError("too large")
    return h * 1


def test_what_backward_recomputes_reads_the_input_as_it_was():
    """The drop-in has written back when backward comes, and a stage that only reads it runs again then."""

    class ReadThenWritten(Case):
        def forward(self, x, state):
            h = self.two(torch.tanh(self.one(x) * state))
            state.add_(1)
            return self.three(h)

    model = copy.deepcopy(plain := ReadThenWritten())
    args = example_of(State)
    with fxpipe.pipeline(model, ["cpu"] * 3, 3, example_args=args, checkpoint="always") as pipe:
        pipe(*(a.clone() for a in args)).sum().backward()
        x, state = (a.clone() for a in args)
        h = plain.two(torch.tanh(plain.one(x) * state))
        plain.three(h).sum().backward()
        assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])


def line_of(case, text):
    """The line of a test's model in which `text` stands."""
    lines, start = inspect.getsourcelines(case)
    return f"test_written_inputs.py:{start + next(k for k, line in enumerate(lines) if text in line)}"


# -- what is refused -------------------------------------------------------------------------------------------------


class SumOfSamples(Case):
    def forward(self, x, total):
        h = self.one(x)
        total += h.detach().sum(0)
        return self.two(h)


class Drawn(Case):
    def forward(self, x, total):
        total.add_(torch.rand(4))
        return self.two(x)


class ByAWay(Case):
    def forward(self, x, total):
        part = torch.zeros(4)
        part[1:] = x.sum(0)[1:]
        total += part
        return self.two(x)


class FromABuffer(Case, steps=lambda: torch.zeros(4)):
    def forward(self, x, total):
        self.steps += 1
        total.copy_(self.steps)
        return self.two(x)


class NumberOfSamples(Case):
    def forward(self, x, total):
        total += x.shape[0]
        return self.two(x)


WRITES_TO_TOTAL = [
    (SumOfSamples, "total +="),
    (Drawn, "total.add_"),
    (ByAWay, "total +="),
    (FromABuffer, "total.copy_"),
    (NumberOfSamples, "total +="),
]


@pytest.mark.parametrize(("case", "text"), WRITES_TO_TOTAL, ids=lambda c: str(c))
def test_an_input_that_is_not_cut_and_differs_between_micro_batches_is_refused(case, text):
    line = line_of(case, text)
    with pytest.raises(TraceError, match=rf"writes to the input total at .*{re.escape(line)}, which is not cut"):
        fxpipe.pipeline(case(), ["cpu"], 2, example_args=(torch.randn(4, 4), torch.zeros(4)), in_dims=(0, None))


@dataclass
class Aux:
    h: torch.Tensor
    log: list


class PutsIntoADict(Case):
    def forward(self, x, aux):
        h = self.one(x)
        aux["h"] = h
        return self.two(h)


class Appends(Case):
    def forward(self, x, aux):
        h = self.one(x)
        aux["log"].append(1)
        return self.two(h)


class SetsAField(Case):
    def forward(self, x, aux):
        aux.h = self.one(x)
        return self.two(aux.h)


class AddsToASet(Case):
    def forward(self, x, aux):
        aux.add("seen")
        return self.two(x)


class InAHelper(Case):
    def forward(self, x, aux):
        return self.two(self.note(x, aux))

    def note(self, x, aux):
        aux["log"].pop()
        return x


class Counts(Case):
    def forward(self, x, aux):
        aux.calls += 1
        return self.two(x)


class PutsNothingIntoADict(Case):
    """No value has come or gone: only the structure is another."""

    def forward(self, x, aux):
        aux["log"] = []
        return self.two(x)


class InAnArray(Case):
    def forward(self, x, aux):
        aux[0] += 1
        return self.two(x)


@pytest.mark.parametrize(
    ("case", "aux", "item", "text"),
    [
        (PutsIntoADict, {}, "aux['h']", 'aux["h"] ='),
        (Appends, {"log": []}, "aux['log'][0]", "append"),
        (SetsAField, Aux(torch.zeros(4, 4), []), "aux.h", "aux.h = "),
        (Counts, SimpleNamespace(calls=0, names=[]), "aux.calls", "aux.calls += 1"),
        (AddsToASet, set(), "aux", "aux.add"),
        (InAHelper, {"log": [1, 2]}, "aux['log'][1]", "pop()"),
        (InAnArray, np.zeros(2), "aux", "aux[0] +="),
        (PutsNothingIntoADict, {}, "the structure", 'aux["log"] ='),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_container_that_forward_changes_is_refused(case, aux, item, text):
    before = copy.deepcopy(aux)
    with pytest.raises(TraceError) as error:
        fxpipe.trace(case(), (torch.randn(4, 4), aux))
    assert f"forward changes {item} in an object that it was given as an input" in str(error.value)
    assert line_of(case, text) in str(error.value)
    assert str(aux) == str(before), "planning has changed the example"


def test_an_input_that_gets_another_shape_is_refused():
    class Turns(Case):
        def forward(self, x, state):
            state.t_()
            return self.two(x) + state.sum()

    with pytest.raises(TraceError, match=r"the shape or the strides of the input state at .*inputs\.py:\d+,"):
        fxpipe.trace(Turns(), (torch.randn(4, 4), torch.randn(4, 4)))


def test_a_leaf_that_requires_grad_is_refused_as_torch_refuses_it():
    with pytest.raises(ArgumentError, match=r"writes to the input x at .*leaf that requires grad"):
        fxpipe.trace(ReluFirst(), (torch.randn(4, 4, requires_grad=True), torch.ones(4, 4)))


def test_memory_that_is_given_twice_is_refused():
    x = torch.randn(4, 4)
    with pytest.raises(ArgumentError, match=r"writes to the input x at .* overlaps with that of state"):
        fxpipe.trace(State(), (x, x))
    both = torch.randn(8, 4)
    fxpipe.trace(State(), (both[:4], both[4:]))
    with fxpipe.pipeline(State(), ["cpu"], 2, example_args=(x, x.clone())) as pipe:
        with pytest.raises(ArgumentError, match="overlaps with that of x"):
            pipe(both[:4], both[2:6])
        row = torch.randn(31)
        with pytest.raises(ArgumentError, match="overlaps with that of x"):
            pipe(row[:16].view(4, 4), row[15:].view(4, 4))  # in one element
        with pytest.raises(ArgumentError, match="expanded"):
            pipe(x, torch.zeros(1, 4).expand(4, 4))
        with pytest.raises(ArgumentError, match=r"the model's 'one\.weight'"):
            pipe(x, pipe.model.one.weight.data)


def test_forward_backward_refuses_to_write_to_an_input_that_requires_grad():
    with fxpipe.pipeline(WithHistory(), ["cpu"], 2, example_args=example_of(WithHistory)) as pipe:
        x, state = example_of(WithHistory)
        with pytest.raises(ArgumentError, match="forward_backward would leave it in the graph of what it was"):
            pipe.forward_backward(x, state.requires_grad_() * 1, loss_fn=lambda y: y.mean())


def test_samples_that_act_on_each_other_in_what_is_written_are_noticed():
    class Centred(Case):
        def forward(self, x, state):
            y = self.two(x)
            state.copy_((y - y.mean(0)).detach())
            return self.two(y)

    with pytest.raises(ArgumentError, match="what forward writes to an input"):
        fxpipe.pipeline(Centred(), ["cpu"], 2, example_args=(torch.randn(4, 4), torch.zeros(4, 4)))


def test_a_write_that_no_mode_sees_is_noticed_by_the_comparison():
    class ThroughNumpy(Case):
        def forward(self, x, state):
            state.numpy()[:] = 3
            return self.two(x)

    with pytest.raises(TraceError):
        fxpipe.trace(ThroughNumpy(), (torch.randn(4, 4), torch.zeros(4, 4)))


def test_a_module_kept_whole_that_writes_to_its_input_in_another_step_only_is_noticed():
    """While it was traced it only read: another stage may hold what it is given."""

    class Masks(nn.Module):
        def forward(self, h):
            if h.mean() > 100:
                h.mul_(0)
            return h * 1

    class Masked(Case, masks=Masks):
        def forward(self, x):
            h = self.one(x)
            return self.two(self.masks(h)) + h

    x = torch.randn(BATCH, 4)
    model = Masked()
    with fxpipe.pipeline(model, ["cpu"] * 2, 3, example_args=(x,), leaf_modules=["masks"]) as pipe:
        pipe(x)
        model.one.bias.data += 1e4
        with pytest.raises(StateError, match="Masks, kept whole, writes to an input of it"):
            pipe(x)
