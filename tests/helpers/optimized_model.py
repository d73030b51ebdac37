"""A model of four layers, pipes of it and mini-batches, for tests of the optimizers of stages."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from helpers import oracle

QUICK: dict[str, Any] = {"progress": False, "check": False, "hardware": "cpu"}
CHUNKS = 3


class Net(nn.Module):
    """Four layers; the last one has the weight of the first. `frozen` has no gradient, `unused` is in no stage."""

    def __init__(self, is_tied=False):
        super().__init__()
        self.a, self.b, self.norm, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        if is_tied:
            self.head.weight = self.a.weight

    def forward(self, x):
        return self.head(self.c(self.norm(F.gelu(self.b(F.gelu(self.a(x)))) * self.frozen)))


def model_of(is_tied=False):
    torch.manual_seed(0)
    return Net(is_tied)


def piped(model, devices=2, **options):
    options = {"balance": ["a", "norm"][: devices - 1], "example_args": (torch.ones(6, 4),)} | options
    return oracle.closing(fxpipe.pipeline(model, ["cpu"] * devices, CHUNKS, **QUICK | options))


def batches(steps, seed=1):
    """Mini-batches, of which no two have as many samples."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(7 - k, 4, generator=generator), torch.randn(7 - k, 6, generator=generator)) for k in range(steps)
    ]


def is_close(ours, value):
    """Sums in another order: rounding is relative to the largest element, whatever cancels in others."""
    return torch.allclose(ours, value, atol=1e-5 * float(value.detach().abs().max()))


def assert_same_training(plain, want, model, have, loose=False):
    """Every weight by name, and every entry of the state of the optimizers."""
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert is_close(other, one) if loose else torch.equal(other, one), name
    one, other = want.state_dict(), have.state_dict()
    assert repr(other["param_groups"]) == repr(one["param_groups"])
    assert [*other["state"]] == [*one["state"]], "in the order of the parameters"
    for key, state in one["state"].items():
        assert [*other["state"][key]] == [*state]
        for name, value in state.items():
            value, ours = torch.as_tensor(value), torch.as_tensor(other["state"][key][name])
            assert is_close(ours, value) if loose else torch.equal(ours, value), (key, name)
