"""Tensors between devices: alike to the last stride, and ordered by events, whatever the order of the host."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
from helpers.devices import forced_copies
from helpers.fake_streams import CPU, FakeMachine, Stream
from helpers.models import BY_NAME
from torch import nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.runtime import InterleavedExecutor
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.transport import PackedTensor, Transport, covered_extent, is_packable, pack

# -- packing ---------------------------------------------------------------------------------------------------------


def _of(*shape, dtype=torch.float32):
    return (
        torch.randn(shape, dtype=dtype) if dtype.is_floating_point or dtype.is_complex else torch.ones(shape).to(dtype)
    )


ALIKE = {
    "contiguous": lambda: _of(3, 4),
    "0-dim": lambda: _of(),
    "zero-size": lambda: _of(0, 3),
    "zero-size with strides": lambda: torch.empty_strided((2, 0, 3), (1, 7, 2)),
    "transposed": lambda: _of(3, 4).t(),
    "channels last": lambda: _of(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "rows": lambda: _of(6, 4)[2:5],
    "columns": lambda: _of(4, 6)[:, 1:3],
    "every second": lambda: _of(4, 6)[::2, ::3],
    "one part of a chunk": lambda: _of(2, 3, 12).chunk(3, -1)[1],
    "permuted with gaps": lambda: _of(4, 6, 5)[:, :, :2].permute(2, 0, 1),
    "expanded": lambda: _of(1, 3).expand(4, 3),
    "expanded scalar": lambda: _of().expand(3, 4),
    "expanded with gaps": lambda: _of(4, 6)[:, :1].expand(4, 5),
    "windows": lambda: _of(9).unfold(0, 4, 2),
    "size one, odd stride": lambda: torch.empty_strided((1, 3), (99, 1)).fill_(2),
    "conjugate": lambda: _of(3, dtype=torch.cfloat).conj(),
    "conjugate with gaps": lambda: _of(4, 6, dtype=torch.cfloat)[:, ::2].conj(),
    "negative": lambda: _of(3, dtype=torch.cfloat).conj().imag,
    "bool": lambda: _of(3, 4) > 0,
    "bfloat16": lambda: _of(3, 4, dtype=torch.bfloat16)[:, :3],
    "int64": lambda: torch.arange(5),
}


def assert_alike(have, want):
    assert have.shape == want.shape
    assert have.stride() == want.stride()
    assert have.dtype == want.dtype
    assert (have.is_conj(), have.is_neg()) == (want.is_conj(), want.is_neg())
    assert torch.equal(have, want)
    assert want.numel() == 0 or have.untyped_storage().data_ptr() != want.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ALIKE)
def test_a_copy_is_alike_in_strides_and_bits(name):
    tensor = ALIKE[name]()
    packed = pack(tensor)
    assert packed.memory.is_contiguous()
    assert packed.memory.dim() == 1
    assert packed.memory.numel() <= max(tensor.numel(), covered_extent(tensor.shape, tensor.stride())[0])
    have = packed.at(packed.memory.clone()).unpack()
    assert_alike(have, tensor)
    assert not have._is_view() or have.is_conj() or have.is_neg()


def test_what_overlaps_is_sent_once_and_gaps_are_not():
    assert pack(_of(1, 3).expand(400, 3)).memory.numel() == 3
    assert pack(_of(9, 100)[:, :2]).memory.numel() == 18
    dense = _of(4, 6).t()
    assert pack(dense).memory.data_ptr() == dense.data_ptr(), "what is dense is not gathered"


def test_any_strides():
    draw = random.Random(3)
    gathered = 0
    for _ in range(300):
        shape = [draw.randrange(0, 4) for _ in range(draw.randrange(0, 4))]
        stride = [draw.randrange(0, 9) for _ in shape]
        storage = _of(60)
        tensor = storage.as_strided(shape, stride, draw.randrange(0, 10))
        packed = pack(tensor)
        gathered += packed.is_gathered
        assert_alike(packed.at(packed.memory.clone()).unpack(), tensor)
        if packed.is_gathered:
            indices = torch.arange(60).as_strided(shape, stride).flatten()
            assert indices.unique().numel() == indices.numel(), "what overlaps cannot be written to"
    assert 20 < gathered < 280


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(lambda: _of(3, 3).to_sparse(), id="sparse"),
        pytest.param(lambda: _of(3).as_subclass(type("Mine", (torch.Tensor,), {})), id="of a class of its own"),
    ],
)
def test_what_is_not_plain_is_copied_as_it_knows_best(tensor):
    given = tensor()
    assert not is_packable(given)
    with forced_copies():
        transport = Transport([CPU])
        sent = transport.start_copy(given, CPU)
        have = transport.open(sent, CPU)
    assert have is not given
    assert type(have) is type(given)
    assert have.layout is given.layout
    dense = [x if x.layout is torch.strided else x.to_dense() for x in (have, given)]
    assert torch.equal(*dense)


def test_on_one_device_nothing_is_copied():
    transport, tensor = Transport([CPU]), _of(3)
    for thing in (tensor, 3, None, (tensor, 1), "x"):
        assert transport.start_copy(thing, CPU) is thing
        assert transport.open(thing, CPU) is thing
    assert transport.bring(tensor, CPU) is tensor
    assert transport.at(CPU) is transport.at(CPU), "the context of a CPU's action costs nothing"


# -- forced copies -----------------------------------------------------------------------------------------------------


def pipe_of(case, stages=3, chunks=3, **options):
    plain = case.make()
    args, kwargs = case.inputs(6)
    pipe = fxpipe.pipeline(plain, ["cpu"] * stages, chunks, example_args=args, example_kwargs=kwargs, **options)
    pipe._fxpipe.engine.executor = InterleavedExecutor(1)
    return pipe, args, kwargs, case.target(6)


def results(pipe, case, args, kwargs, target, drop_in):
    """Loss, gradients and buffers of two steps; the model is as before."""
    before = copy.deepcopy(pipe.state_dict())
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        if drop_in:
            loss = case.loss(pipe(*args, **kwargs), target)
            loss.backward()
        else:
            loss = pipe.forward_backward(*args, target=target, loss_fn=case.loss, **kwargs)
        found.append(loss.detach())
    found += [p.grad for p in pipe.parameters()] + [b.clone() for b in pipe.buffers()]
    pipe.zero_grad()
    pipe.load_state_dict(before)
    return found


def assert_same(have, want):
    for h, w in zip(have, want, strict=True):
        assert (h is None) == (w is None)
        assert w is None or torch.equal(h, w)


@pytest.mark.parametrize(("name", "checkpoint"), [("unet", "never"), ("gpt", "always"), ("resnet", "always")])
def test_forced_copies_change_no_bit(name, checkpoint):
    case = BY_NAME[name]
    pipe, *given = pipe_of(case, checkpoint=checkpoint)
    with pipe:
        for drop_in in (False, True):
            want = results(pipe, case, *given, drop_in)
            with forced_copies():
                assert_same(results(pipe, case, *given, drop_in), want)


class Odd(nn.Module):
    """Stages hand on what is not contiguous, expanded, overlapping, empty, sparse, conjugate, and no tensor at all."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 12), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.one(x)
        left, right = h.chunk(2, -1)
        turned = right.t()
        wide = h[:, :1].expand(-1, 6)
        windows = h.unfold(1, 6, 3)
        empty = h[:, :0]
        weights = torch.ones(6).diag().to_sparse()
        spectrum = torch.fft.fft(h)[:, :6].conj()
        size = h.shape[1] // 2
        y = self.two(left.contiguous()) + turned.t() + wide + windows.sum(1) + empty.sum(1, keepdim=True)
        y = y + spectrum.real[:, :size] + spectrum.imag
        return self.three(torch.sparse.mm(weights, y.t()).t())


def test_what_is_odd_crosses_alike(monkeypatch):
    x = torch.randn(6, 6, requires_grad=True)
    model, crossed, seen = Odd(), {}, set()
    count = len(fxpipe.trace(model, (x,)).nodes)
    send, take = Exchange.send, Exchange.take

    def watched_send(self, maker, name, i, value):
        crossed[name, i] = value
        send(self, maker, name, i, value)

    def watched_take(self, user, link, i):
        have, want = take(self, user, link, i), crossed.get((link.value.name, i))
        if isinstance(want, torch.Tensor):
            assert type(have.value) is type(want)
            assert have.value.layout is want.layout
            if want.layout is torch.strided:
                assert_alike(have.value, want.detach())
                dense, gaps = want.is_contiguous(), covered_extent(want.shape, want.stride())[0] > want.numel()
                seen.add("conj" if want.is_conj() else "dense" if dense else "gaps" if gaps else "overlaps")
            else:
                seen.add("sparse")
        elif want is not None:
            assert have.value == want
            seen.add("no tensor")
        return have

    for cut in (11, 16):
        with fxpipe.pipeline(
            copy.deepcopy(model), ["cpu"] * 2, 3, example_args=(x,), balance=[cut, count - cut]
        ) as pipe:
            pipe._fxpipe.engine.executor = InterleavedExecutor(2)
            grads = []
            for forced in (False, True):
                pipe.zero_grad()
                x.grad = None
                with monkeypatch.context() as patch, forced_copies() if forced else Transport([]).at(CPU):
                    if forced:
                        patch.setattr(Exchange, "send", watched_send)
                        patch.setattr(Exchange, "take", watched_take)
                    pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
                grads.append([x.grad, *(p.grad for p in pipe.parameters())])
            assert_same(*grads)
    assert seen >= {"dense", "gaps", "overlaps", "conj", "sparse"}


# -- the order of streams ----------------------------------------------------------------------------------------------

ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)
PLACES = {"two": [ONE, TWO, ONE], "mixed": [CPU, ONE, CPU], "three": [TWO, CPU, ONE], "one": [ONE, ONE, ONE]}


@pytest.fixture(scope="module")
def unet():
    """Cut in three, with skips past the middle; its loss has been verified on the devices that there are."""
    torch.manual_seed(3)
    case = BY_NAME["unet"]
    pipe, *given = pipe_of(case)
    assert pipe.plan.portals
    with pipe:
        want = {drop_in: results(pipe, case, *given, drop_in) for drop_in in (False, True)}  # the loss is verified now
        yield pipe, case, given, want


@pytest.fixture
def pretend(unet, monkeypatch):
    """`pretend(devices, seed)`: the stages are on these devices; returns the machine."""
    pipe = unet[0]
    graphs, executor = list(pipe._fxpipe.graphs), pipe._fxpipe.engine.executor

    def begin(devices, seed):
        machine = FakeMachine(seed)
        for given in pytree.tree_leaves(unet[2]):
            machine.place(given, CPU)
        pipe._fxpipe.graphs.entries[:] = [(p, dataclasses.replace(a, devices=tuple(devices))) for p, a in graphs]
        pipe._fxpipe.engine.executor = InterleavedExecutor(seed)
        for kind in (one for of_kind in pipe._fxpipe.engine.loss_histories.kinds.values() for one in of_kind.values()):
            kind.passes = 1  # not verified in the 10th step, which would ask a real GPU for its random numbers
        monkeypatch.setattr(Transport, "of", lambda stages, given: Transport([*stages, ONE, TWO], machine))
        unpack, enter = PackedTensor.unpack, Exchange.enter_gradients

        def used(self):
            machine.use(self.memory)
            return unpack(self)

        monkeypatch.setattr(PackedTensor, "unpack", used)
        for module in "step", "action_performer":  # events of torch are no stand-ins
            monkeypatch.setattr(f"fxpipe.runtime.{module}.mark_time", lambda stream: 0.0)

        def placed(self, place, gradients):
            for gradient in gradients:
                machine.place(gradient, devices[-1])
            enter(self, place, gradients)

        monkeypatch.setattr(Exchange, "enter_gradients", placed)
        return machine

    yield begin
    pipe._fxpipe.graphs.entries[:] = graphs
    pipe._fxpipe.engine.executor = executor


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize("places", PLACES)
def test_who_reads_comes_after_who_wrote_in_any_order_of_the_host(unet, pretend, places, drop_in):
    pipe, case, given, want = unet
    for seed in range(2):
        with forced_copies() if places == "one" else Transport([]).at(CPU):
            machine = pretend(PLACES[places], seed)
            assert_same(results(pipe, case, *given, drop_in), want[drop_in])
        machine.look_at_freed()
        assert machine.counts["copies"] > 20
        assert machine.counts["waits"] > 20
        # What is on its way, and inputs: all that was sent is given back when the step has ended.
        assert not [m for m in machine.memories.values() if m.pool and not m.ref.expired()]
        assert machine.counts["freed"] > 20
        if places in ("two", "one"):
            assert machine.counts["host waits"] == 0, "GPUs wait for each other, and nobody for them"


@pytest.mark.parametrize(
    "missing", ["copies wait for nobody", "users wait for nobody", "nothing is kept", "nothing is held", "not settled"]
)
def test_an_order_that_is_missing_is_seen(unet, pretend, monkeypatch, missing):
    """What the fake machine is worth."""
    pipe, case, given, _ = unet
    machine = pretend(PLACES["two"], 0)
    wait = Stream.wait_event

    def wait_event(self, event):
        if self.name.startswith("copy") != (missing == "copies wait for nobody"):
            wait(self, event)

    if missing in ("copies wait for nobody", "users wait for nobody"):
        monkeypatch.setattr(Stream, "wait_event", wait_event)
    elif missing == "nothing is kept":
        monkeypatch.setattr(FakeMachine, "keep", lambda *_: None)
    elif missing == "nothing is held":
        monkeypatch.setattr(Transport, "_hold", lambda *_: None)
    else:
        monkeypatch.setattr(Transport, "settle", lambda self: self._held.clear())
    with pytest.raises(AssertionError, match=r"reads before|given back before"):  # noqa: PT012 - the step or the end of it
        results(pipe, case, *given, False)
        machine.look_at_freed()
    pipe.zero_grad()


def test_the_end_of_a_step_follows_the_thread_that_calls_it(unet, pretend):
    """Autograd calls the drop-in's backward in a thread of its own, with current streams of its own."""
    pipe, case, (args, kwargs, target), _want = unet
    machine = pretend(PLACES["two"], 0)
    torch.manual_seed(5)
    loss = case.loss(pipe(*args, **kwargs), target)
    others = [Stream(machine, device, f"other on {device}") for device in (ONE, TWO)]
    marks = [stream.tick() for stream in others]
    with machine.on(*others):
        loss.backward()
    pipe.zero_grad()
    for other, mark in zip(others, marks, strict=True):
        compute = machine.current(other.device)
        assert compute is not other
        assert compute.clock.is_behind(mark), "the step comes after what the thread has queued"
        assert other.clock.is_behind((compute.name, compute.clock[compute.name])), "and the thread after the step"


@pytest.mark.parametrize("drop_in", [False, True])
def test_pinned_memory_of_the_caller_may_be_written_to_behind_the_call(unet, pretend, drop_in):
    """It is read in place, so the host waits for those copies, and for nothing else."""
    pipe, case, (args, kwargs, target), _ = unet
    machine = pretend(PLACES["two"], 0)
    machine.place(args[0], CPU)
    machine.place(target, CPU)
    given = [machine._memory(args[0]), *([] if drop_in else [machine._memory(target)])]
    for memory in given:
        memory.is_pinned = True
    if drop_in:
        made = pipe(*args, **kwargs)
    else:
        pipe.forward_backward(*args, target=target, loss_fn=case.loss, **kwargs)
    for memory in given:
        assert memory.read, "it was copied from where it is"
        assert all(machine.host.is_behind(mark) for mark in memory.read)
    assert 0 < machine.counts["host waits"] <= len(given)
    if drop_in:
        case.loss(made, target).backward()
    pipe.zero_grad()


def test_a_value_goes_once_to_each_device(unet, pretend):
    pipe, case, (args, kwargs, target), _ = unet
    machine = pretend([ONE, TWO, TWO], 0)
    program = pipe._fxpipe.graphs[0][0].program
    pipe.forward_backward(*args, target=target, loss_fn=case.loss, **kwargs)
    pipe.zero_grad()
    users = {(r.source, r.name) for j, stage in enumerate(program.stages) for r in stage.receives if r.source == 0 < j}
    inputs = sum(r.source < 0 for stage in program.stages for r in stage.receives)
    values = 3 * (inputs + 2 * len(users))  # with their gradients
    once = 1 + sum(len(stage.attributes) for stage in program.stages)  # the target; parameters, which are on the CPU
    assert machine.counts["copies"] == values + once
