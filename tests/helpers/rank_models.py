"""Models whose stages hand each other whatever there is: for pipes over processes."""

import torch
import torch.nn.functional as F
from torch import nn

from helpers.layered import Layered


class Mixed(nn.Module):
    """A tied weight, a skip over several stages, ints, flags and floats without gradient, batch norm, dropout."""

    def __init__(self, p: float = 0.3):
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.l = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        skip = x * 2
        x = torch.tanh(self.l[0](x))
        k = x.argmax(-1)
        still = torch.sigmoid(self.l[0](x)).detach()
        large = x.sum(-1) > 0
        x = self.drop(torch.tanh(self.l[1](x)))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = torch.tanh(self.l[2](x)) + skip * still
        x = self.l[3](x) * ((k > 2) | large)[..., None]
        return self.head(x)


class Dense(Layered, blocks=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(4))):
    """Each block reads the input and what all blocks before it have made: every skip that there can be."""

    def forward(self, x):
        values = [x]
        for block in self.blocks:
            values.append(torch.tanh(block(torch.stack(values).sum(0))))
        return sum(value * (k + 1) for k, value in enumerate(values[1:]))


class Tied(nn.Module):
    """A weight of both ranks, whose gradients both send at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(F.gelu(self.a(x)) * x)


def token_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def padded_loss(out: torch.Tensor, target: torch.Tensor):
    """A mean over the tokens that are not 0."""
    total = F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
    return total, (target != 0).sum()


def matching_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss of all samples: each against each."""
    return F.cross_entropy(out @ target.T, torch.arange(len(target)))


class ScaledLoss(Layered, scale=lambda: nn.Parameter(torch.ones(()))):
    """A loss with a parameter of its own."""

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out * self.scale, target)


def tokens(batch: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids, target = torch.randint(0, 11, (2, batch, length), generator=g)
    return ids, target


MIXED_CUTS = {2: ["l.1"], 4: ["l.0", "l.1", "l.2"]}
DENSE_CUTS = {2: ["blocks.1"], 4: ["blocks.0", "blocks.1", "blocks.2"]}


def assert_parts(parts, whole):
    """Each rank has a part of these tensors by name, bit for bit, and all ranks together have all of them."""
    for part in parts:
        for name, value in part.items():
            assert torch.equal(value, whole[name]), name
    assert {name for part in parts for name in part} == {*whole}
