"""What a call that is kept whole needs on the CPU is seen in its first run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxpipe
from fxpipe.rewriting import split_into_stages
from fxpipe.tracing.node_arguments import container_of
from fxpipe.tracing.node_info import info


def _pack(x, lengths):
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0]


def _masked(x, lengths):
    return x * (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]


CALLS = {
    "packs": (_pack, {1}),
    "changes the lengths before": (lambda x, lengths: _pack(x, (lengths.to(torch.int64) + 0).clamp(min=1)), {1}),
    "moves a copy to the device": (lambda x, lengths: _pack(_masked(x, lengths.to(x.device)), lengths), {1}),
    "uses them with other tensors": (lambda x, lengths: _pack(_masked(x, lengths), lengths), set()),
    "takes them to the CPU itself": (lambda x, lengths: _pack(_masked(x, lengths), lengths.cpu()), set()),
    "finds them in the other argument": (lambda x, lengths: _pack(x, 1 + (x.detach()[..., 0] > 9).sum(1)), set()),
    "reads them": (lambda x, lengths: x * int(lengths.min() > 0), set()),
    "splits": (lambda x, lengths: torch.cat(x.tensor_split(lengths[:1], dim=1), dim=1), {1}),
}


def _traced(call):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, lengths):
            return self.two(fxpipe.leaf(call)(self.one(x), lengths))

    return fxpipe.trace(Model(), (torch.randn(4, 5, 3), torch.tensor([5, 2, 1, 4])))


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_stay_on_the_cpu(name):
    call, places = CALLS[name]
    traced = _traced(call)
    (node,) = (n for n in traced.nodes if info(n).opaque is not None and container_of(n) is None)
    assert info(node).opaque.host_places == places
    program = split_into_stages(traced, (0, 1), [torch.device("cpu")] * 2)
    assert program.stages[1].host_values == ({"in_1"} if places else set())
    assert program.stages[0].host_values == set()


def test_a_value_that_other_nodes_use_too_goes_to_the_device():
    class Model(nn.Module):
        def forward(self, x, lengths):
            return fxpipe.leaf(_pack)(x * 2, lengths) * lengths[:, None, None]

    traced = fxpipe.trace(Model(), (torch.randn(4, 5, 3), torch.tensor([5, 2, 1, 4])))
    program = split_into_stages(traced, (0,), [torch.device("cpu")])
    assert program.stages[0].host_values == set()
