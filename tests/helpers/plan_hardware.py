"""Hardware with slow links, and models planned for it on estimates."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fxpipe
from fxpipe.cluster import Link
from fxpipe.hardware import Hardware
from helpers.layered import Layered
from helpers.plan_models import BATCH, CHUNKS


def hardware(link: Link | None = None, memory: int = 2**30, **fields: Any) -> Hardware:
    """One operation takes a microsecond at least, and here none takes longer."""
    between = link or Link(1e9)
    return Hardware("mine", {"float32": 1e15}, 1e15, memory=memory, within=link, between=between, launch=1e-6, **fields)


SLOW = Link(1e7, 5e-6)  # 100 KB take 10 ms


def estimated(model: nn.Module, stages: int, *args: torch.Tensor, **options: Any) -> fxpipe.Plan:
    return fxpipe.plan(model, stages, example_args=args, **{"chunks": CHUNKS} | options)


def without_host(plan: fxpipe.Plan) -> fxpipe.Plan:
    """The plan as if queueing took no time: stages that are shorter than that show what else they depend on."""
    return replace(plan, stages=tuple(replace(stage, host=None) for stage in plan.stages))


class Causal(
    Layered, embed=lambda: nn.Embedding(11, 8), layers=lambda: nn.ModuleList(nn.Linear(8, 24) for _ in range(6))
):
    """A causal mask as large as the input is long, used in every layer."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        t = x.shape[1]
        mask = torch.full((t, t), float("-inf")).triu(1)
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + (q @ k.transpose(1, 2) + mask).softmax(-1) @ v
        return x


def ids() -> torch.Tensor:
    return torch.randint(11, (BATCH, 48))


def narrow_then_wide(width: int = 512) -> nn.Module:
    """All but the last two layers take time; these have nearly all of the weights."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(15)), nn.Linear(4, width), nn.Linear(width, 4))
