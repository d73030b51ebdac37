"""Tensors between devices are alike to the last stride; that copies are ordered is seen on simulated devices."""

import random

import pytest
import torch
from helpers.devices import forced_copies

from fxpipe.runtime.transport import Transport, covered_extent, is_packable, pack

CPU = torch.device("cpu")


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
    "permuted with gaps": lambda: _of(4, 6, 5)[:, :, :2].permute(2, 0, 1),
    "expanded": lambda: _of(1, 3).expand(4, 3),
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
    with forced_copies():
        transport = Transport([CPU])
        assert_alike(transport.open(transport.start_copy(tensor, CPU), CPU), tensor)


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
