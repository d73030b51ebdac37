"""What crosses a cut beside activations: flags, sizes, dtypes, masks, tensors made in forward, shared modules."""

import pytest
import torch
import torch.nn.functional as F
from helpers.every_cut import EveryCut
from helpers.layered import Layered
from torch import nn


class Mixed(Layered, one=4, two=4, three=4):
    """Takes what is no activation at its beginning, and uses it at its end."""

    def forward(self, x, ids, options):
        batch, device, dtype = x.shape[0], x.device, x.dtype
        pair = (batch, (ids > 1, None, True))
        best = self.one(x).max(1)  # values and integers
        fixed = self.two(x).detach()
        halves = torch.chunk(self.two(x), 2, 1)
        h = self.three(x + fixed)
        if pair[1][1] is None and pair[1][2] and options["scale"] > 1 and h.dtype == dtype:
            h = h.masked_fill(pair[1][0][:, None], 0.5) * options["scale"]
        h = h + torch.full((pair[0], 4), 2.0, dtype=dtype, device=device)
        h = h.gather(1, best.indices[:, None]) + best.values[:, None].to(ids.device, dtype)
        return torch.cat([h, *halves], 1).view(batch, -1), best.indices, pair[1][0]


class Made(nn.Module):
    """Makes tensors by the size of what it is given, and has buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(1, 2, 4))
        self.register_buffer("positions", torch.arange(8.0), persistent=False)

    def forward(self, x):
        rows = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        width = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        state = torch.zeros(x.shape[0], 4, device=x.device)
        h = self.one(x)
        state[:, 1:] = h[:, 1:] * self.scale[1:]
        h = self.two(state + width) + self.positions[: x.shape[1]]
        h = h + torch.full_like(h, 0.25) + x.new_ones(len(x.shape), 4).sum(0)
        return torch.where(torch.eye(4, dtype=torch.bool, device=x.device)[rows], h, -h)


class Albert(Layered, block=lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())):
    """One block, called again and again."""

    def forward(self, x):
        for _ in range(4):
            x = x + self.block(x)
        return x


class Tied(nn.Module):
    """One weight under two names, a module under two more, and a weight that is used as what it is not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.encoder = nn.Linear(4, 4)
        self.decoder = self.encoder
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = torch.tanh(self.encoder(self.embed(ids)))
        h = torch.tanh(self.decoder(h)) @ self.encoder.weight.t()
        return self.head(h)


SHARED = ("block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias")
TIED = ("embed.weight", "encoder.weight", "encoder.bias")
MODELS = {
    "mixed": lambda: EveryCut(Mixed(), torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0]), {"scale": 2}),
    "made": lambda: EveryCut(Made(), torch.randn(5, 4)),
    "albert": lambda: EveryCut(Albert(), torch.randn(5, 4), loose=SHARED),
    "tied": lambda: EveryCut(Tied(), torch.randint(7, (5,)), loose=TIED),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_cut(name):
    """5 samples in 2 micro-batches and in 3: the last one is smaller."""
    model = MODELS[name]()
    assert len(model.allowed) > 3
    for starts in model.cuts(2):
        model.check(starts, 2, "1f1b")
        model.check(starts, 3, "drop-in", "always")
    for starts in model.cuts(3, every=11):
        model.check(starts, 3, "drop-in")


def test_a_shared_module_is_used_in_two_stages():
    """Else the test above would show nothing."""
    model = MODELS["albert"]()
    stages = model.program((0, len(model.traced.nodes) // 2)).stages
    assert set(stages[0].attributes) == set(stages[1].attributes) == set(SHARED)
    assert F.linear in {n.target for n in stages[1].run.graph.nodes}
