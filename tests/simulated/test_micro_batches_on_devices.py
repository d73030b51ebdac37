"""Micro-batches that are handed over, and rows of samples, on devices: accesses are ordered, and steps are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import closing
from torch import nn

import fxpipe

pytestmark = pytest.mark.simulated
D = 6
DEVICES = ["sim:0", "sim:1"]


class Normed(nn.Module):
    """Another graph for long micro-batches; a buffer that each hands on to the next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x)
        h = self.norm(skip.transpose(1, 2)).transpose(1, 2)
        return self.last(self.second(h) * 2 + skip if x.shape[1] > 8 else h)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, "cpu"),
        ({"schedule": "zero_bubble"}, "sim:0"),
        ({"checkpoint": "always"}, "sim:1"),
        ({"schedule": "zero_bubble_2p", "deferred_batch_norm": True}, "sim:0"),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_loop(simulated: Any, options: dict[str, Any], where: str) -> None:
    model = Normed()
    plain = copy.deepcopy(model)
    with closing(fxpipe.pipeline(model, DEVICES, profile_budget=0.01, **options)) as pipe:
        for sizes in (((2, 7), (3, 12), (2, 5)), ((2, 9), (1, 4))):
            calls = [(torch.randn(*size, D), torch.randn(*size, D)) for size in sizes]
            given = [(x.to(where).requires_grad_(), target) for x, target in calls]
            for one in (pipe, plain):
                one.zero_grad()
            have, outputs = pipe.forward_backward(micro_batches=given, loss_fn=F.mse_loss, return_outputs=True)
            want, total = 0.0, sum(len(x) for x, _ in calls)
            for (x, target), (ours, _), output in zip(calls, given, outputs, strict=True):
                x.requires_grad_()
                y = plain(x)
                loss = F.mse_loss(y, target) * (len(x) / total)
                loss.backward()
                want += loss.detach()
                torch.testing.assert_close(output.cpu(), y)
                torch.testing.assert_close(ours.grad.cpu(), x.grad)
            torch.testing.assert_close(have.cpu(), want)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
        if "deferred_batch_norm" not in options:
            for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(ours.cpu(), theirs)


class Tiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tile, self.sample, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        pooled = torch.relu(self.tile(tiles)).view(x.shape[0], -1, D).mean(1)
        return self.last(self.sample(x) + pooled)


def test_rows_go_with_their_samples(simulated: Any) -> None:
    model = Tiles()
    plain = copy.deepcopy(model)
    with closing(fxpipe.pipeline(model, DEVICES, 2, in_dims=0, profile_budget=0.01)) as pipe:
        for samples in (4, 5):
            x, tiles = torch.randn(samples, D), torch.randn(samples * 3, D)
            for one in (pipe, plain):
                one.zero_grad()
            have, want = pipe(x, tiles), plain(x, tiles)
            torch.testing.assert_close(have.cpu(), want)
            for output in (have, want):
                output.square().mean().backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
