"""Settings for tuning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.config.pipeline_options import PipelineOptions, Settings, make_settings
from fxpipe.profiling import Profile, Seconds

BATCH = 8


class Net(nn.Module):
    """Layers of unequal costs, a skip, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = start = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(self.norm(x) + start)


def settings_for(devices: list[str], profile: Profile, **others: Any) -> Settings:
    usual = {"chunks": 4, "checkpoint": "never"}
    return make_settings(PipelineOptions(devices=devices, profile=profile, **usual | others))


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def profile(model: Net, x: torch.Tensor) -> Profile:
    """Milliseconds instead of what these small nodes take, with a fixed part, so that small micro-batches cost more."""
    found = fxpipe.profile(fxpipe.trace(model, (x,)), (x,), hardware="cpu")
    nodes = []
    for place, cost in enumerate(found.nodes):
        times = 1 + place % 3
        forward = Seconds(1e-4 * times, 4e-4 * times)
        nodes.append(replace(cost, forward=forward, backward=forward + forward, weight=forward))
    return replace(found, nodes=tuple(nodes), estimated_for="")
