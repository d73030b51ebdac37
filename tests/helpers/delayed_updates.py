"""Delayed updates as the papers of PipeDream define them: plain torch, one thread, one stage after the other.

The stages are modules, one behind the other. A mini-batch t runs through stage j on version v(j, t) of its weights, the
result of the first v(j, t) updates; its gradients update the newest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

VersionRule = Callable[[int, int, int], int]  # (stages, stage, mini-batch) -> version

RULES: dict[str, VersionRule] = {
    "stashing": lambda n, j, t: max(0, t - (n - 1 - j)),
    "vertical sync": lambda n, j, t: max(0, t - (n - 1)),
    "2bw": lambda n, j, t: max(0, t - 1),
    "plain": lambda n, j, t: t,
}


def train_delayed(
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    rule: VersionRule,
    chunks: int = 1,
) -> tuple[list[torch.Tensor], list[torch.optim.Optimizer | None]]:
    """Trains the stages; returns the losses, and the optimizer of each stage that has parameters."""
    n = len(stages)
    optimizers = [make_optimizer([*s.parameters()]) if [*s.parameters()] else None for s in stages]
    versions: list[list[dict[str, torch.Tensor]]] = [[_copied(stage)] for stage in stages]
    losses = []
    for t, (x, target) in enumerate(batches):
        weights = [
            {name: w.clone().requires_grad_() for name, w in versions[j][rule(n, j, t)].items()} for j in range(n)
        ]
        total: Any = 0.0
        parts = zip(x.tensor_split(min(chunks, len(x))), target.tensor_split(min(chunks, len(x))), strict=True)
        for part, part_target in parts:
            value = part
            for stage, own in zip(stages, weights, strict=True):
                value = functional_call(stage, {**own, **dict(stage.named_buffers())}, (value,))
            loss, share = loss_fn(value, part_target), len(part) / len(x)
            (loss * share).backward()
            total = total + loss.detach() * share
        losses.append(total)
        for j, (stage, optimizer) in enumerate(zip(stages, optimizers, strict=True)):
            if optimizer is not None:
                for name, parameter in stage.named_parameters():
                    parameter.grad = weights[j][name].grad
                optimizer.step()
                optimizer.zero_grad()
            versions[j].append(_copied(stage))
    return losses, optimizers


def _copied(stage: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
