"""Tensors on the meta device are given memory: the same objects, which share what they have shared."""

import torch
from torch import nn

from fxpipe.distributed.held_tensors import GivenMemory

CPU = torch.device("cpu")


def meta_parameter(*shape):
    return nn.Parameter(torch.empty(*shape, device="meta"))


def test_objects_stay_the_same_and_keep_what_they_are():
    weight, kept = meta_parameter(3, 2), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    strides = torch.empty(4, 3, device="meta").t()
    optimizer = torch.optim.SGD([weight, kept], 1.0)
    GivenMemory([weight, kept, frozen, strides, weight], lambda tensor: CPU)
    assert torch.equal(kept, torch.ones(2))
    assert (weight.device, frozen.device, strides.device) == (CPU,) * 3
    assert (weight.requires_grad, frozen.requires_grad) == (True, False)
    assert isinstance(weight, nn.Parameter)
    assert strides.stride() == (1, 3)
    with torch.no_grad():
        weight.fill_(2.0)
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.ones(3, 2))


def test_views_of_one_memory_stay_views_of_one():
    table = torch.empty(4, 3, device="meta")
    row = table[2]
    GivenMemory([table, row], lambda tensor: CPU)
    table.zero_()
    row.fill_(1.0)
    assert table.sum().item() == 3.0


def test_memory_is_taken_back_from_what_has_no_values():
    filled, left, empty = meta_parameter(2), meta_parameter(2), meta_parameter(0)
    memory = GivenMemory([filled, left, empty], lambda tensor: CPU)
    memory.take_back(keep=lambda tensor: tensor is filled)
    assert (filled.is_meta, left.is_meta, empty.is_meta) == (False, True, False)
    assert left.shape == (2,)
    memory = GivenMemory([left], lambda tensor: CPU)
    memory.take_back()
    assert left.is_meta
