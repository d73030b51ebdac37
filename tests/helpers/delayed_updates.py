"""Delayed updates as the papers of PipeDream define them: plain torch, one thread, one stage after the other.

The stages are modules, one behind the other. A mini-batch t runs through stage j on version v(j, t) of its weights, the
result of the first v(j, t) updates; its gradients update the newest ones. Where the stage has replicas, it is updated
by the mean of the gradients of a round of mini-batches.
"""

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


def rounds_of_replicas(replicas: Sequence[int], chunks: int = 1) -> tuple[int, ...]:
    """For each stage the mini-batches of an update: with them each replica has had a micro-batch."""
    return tuple(-(-count // chunks) for count in replicas)


def rule_of_replicas(replicas: Sequence[int], chunks: int = 1) -> VersionRule:
    """Weight stashing by rounds: a mini-batch has the updates of those rounds that are over when it comes."""
    flights, rounds = [0], rounds_of_replicas(replicas, chunks)  # micro-batches in flight; at first of the stage behind
    for count in reversed(replicas):
        flights.insert(0, count * (1 + -(-flights[0] // count)))

    def version(n: int, j: int, t: int) -> int:
        first = t - t % rounds[j]  # of its round
        return max(0, first * chunks + 1 - flights[j]) // chunks // rounds[j]

    return version


def train_delayed(
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    rule: VersionRule,
    chunks: int = 1,
    replicas: Sequence[int] = (),
    rounds: Sequence[int] = (),
    joint: bool = False,
) -> tuple[list[torch.Tensor], list[torch.optim.Optimizer | None]]:
    """Trains the stages; returns the losses, and the optimizer of each stage that has parameters.

    Args:
        replicas: of each stage, to which micro-batches go in turn: each sums the gradients of its own.
        rounds: for each stage the mini-batches of an update; the last one may have fewer.
        joint: one loss of the outputs of all micro-batches.
    """
    n = len(stages)
    replicas, rounds = tuple(replicas) or (1,) * n, tuple(rounds) or (1,) * n
    optimizers = [make_optimizer([*s.parameters()]) if [*s.parameters()] else None for s in stages]
    versions: list[list[dict[str, torch.Tensor]]] = [[_copied(stage)] for stage in stages]
    gradients: list[list[dict[str, torch.Tensor]]] = [[] for _ in stages]  # of the mini-batches of a round
    losses = []
    for t, (x, target) in enumerate(batches):
        weights = [
            {name: w.clone().requires_grad_() for name, w in versions[j][rule(n, j, t)].items()} for j in range(n)
        ]
        total: Any = 0.0
        sums: list[list[dict[str, torch.Tensor]]] = [[{} for _ in range(count)] for count in replicas]
        parts, targets = (whole.tensor_split(min(chunks, len(x))) for whole in (x, target))
        outputs = list[torch.Tensor]()
        for value in parts:
            for stage, own in zip(stages, weights, strict=True):
                value = functional_call(stage, {**own, **dict(stage.named_buffers())}, (value,))
            outputs.append(value)
        leaves = [output.detach().requires_grad_() for output in outputs]
        for output, part_target in [(torch.cat(leaves), target)] if joint else zip(leaves, targets, strict=True):
            loss, share = loss_fn(output, part_target), len(output) / len(x)
            (loss * share).backward()
            total = total + loss.detach() * share
        for k, (output, leaf) in enumerate(zip(outputs, leaves, strict=True)):
            output.backward(leaf.grad)
            for j, count in enumerate(replicas):
                _add(sums[j][k % count], {name: w.grad for name, w in weights[j].items()})
            for own in weights:
                for w in own.values():
                    w.grad = None
        losses.append(total)
        for j, (stage, optimizer) in enumerate(zip(stages, optimizers, strict=True)):
            first, *others = sums[j]
            for other in others:
                _add(first, other)
            gradients[j].append(first)
            if len(gradients[j]) == rounds[j] or t == len(batches) - 1:
                _update(stage, optimizer, gradients[j])
                gradients[j] = []
                versions[j].append(_copied(stage))
    return losses, optimizers


def _add(sums: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> None:
    for name, gradient in gradients.items():
        if gradient is not None:
            sums[name] = sums[name] + gradient if name in sums else gradient


def _update(
    stage: nn.Module, optimizer: torch.optim.Optimizer | None, gradients: Sequence[dict[str, torch.Tensor]]
) -> None:
    """Updates a stage by the mean of the gradients of a round."""
    if optimizer is None:
        return
    first, *others = gradients
    for other in others:
        _add(first, other)
    for name, parameter in stage.named_parameters():
        gradient = first.get(name)
        parameter.grad = gradient / len(gradients) if gradient is not None and others else gradient
    optimizer.step()
    optimizer.zero_grad()


def _copied(stage: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
