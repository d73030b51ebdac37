"""Tensors between devices are alike to the last stride; that copies are ordered is seen on simulated devices."""

import copy
import random

import pytest
import torch
from helpers.devices import forced_copies
from helpers.layered import Layered
from helpers.tried_orders import InterleavedExecutor

import fxpipe
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.transport import Transport, covered_extent, is_packable, pack

CPU = torch.device("cpu")

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
    memory, form = pack(tensor)
    assert memory.is_contiguous()
    assert memory.dim() == 1
    assert memory.numel() <= max(tensor.numel(), covered_extent(tensor.shape, tensor.stride())[0])
    have = form.unpack(memory.clone())
    assert_alike(have, tensor)
    assert not have._is_view() or have.is_conj() or have.is_neg()


def test_what_overlaps_is_sent_once_and_gaps_are_not():
    assert pack(_of(1, 3).expand(400, 3))[0].numel() == 3
    assert pack(_of(9, 100)[:, :2])[0].numel() == 18
    dense = _of(4, 6).t()
    assert pack(dense)[0].data_ptr() == dense.data_ptr(), "what is dense is not gathered"


def test_any_strides():
    draw = random.Random(3)
    gathered = 0
    for _ in range(300):
        shape = [draw.randrange(0, 4) for _ in range(draw.randrange(0, 4))]
        stride = [draw.randrange(0, 9) for _ in shape]
        storage = _of(60)
        tensor = storage.as_strided(shape, stride, draw.randrange(0, 10))
        memory, form = pack(tensor)
        gathered += form.is_gathered
        assert_alike(form.unpack(memory.clone()), tensor)
        if form.is_gathered:
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


def assert_same(have, want):
    for h, w in zip(have, want, strict=True):
        assert (h is None) == (w is None)
        assert w is None or torch.equal(h, w)


class Odd(Layered, one=(6, 12), two=6, three=(6, 2)):
    """Stages hand on what is not contiguous, expanded, overlapping, empty, sparse, conjugate, and no tensor at all."""

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
