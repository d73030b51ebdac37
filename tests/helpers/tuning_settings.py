"""Settings for tuning."""

from typing import Any

import torch
from torch import nn

from fxpipe.planning.options.pipeline_options import PipelineOptions, Settings, make_settings
from fxpipe.profiling import Profile

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
