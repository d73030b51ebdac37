"""The running statistics of deferred batch norm, at the end of a step.

Each micro-batch has given, for each call of batch norm, the number n of values in a channel, their mean and their
unbiased variance. Those of the mini-batch follow without cancellation (T. Chan, G. Golub, R. LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979): with N the sum of all n

    mean = sum(n mean_i) / N
    var  = (sum((n_i - 1) var_i) + sum(n_i (mean_i - mean)^2)) / (N - 1)

in float64, in the order of micro-batches, so that no bit hangs on the schedule. The means come rounded to the buffer's
dtype; so the variance of values that are k times farther from 0 than from each other is right to about k / 1e7 in
float32, as good as the values themselves are rounded. (Sums of squares would lose k^2.)

Calls that share running statistics then move them one after the other, as they do in forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxpipe.errors import StateError
from fxpipe.rewriting.deferring import Found


def tracked(buffers: Mapping[str, torch.Tensor], micro_batches: Sequence[Sequence[Found]]) -> dict[str, torch.Tensor]:
    """`buffers`, by name, with running statistics as they are after the mini-batch.

    Args:
        micro_batches: for each micro-batch what each call of batch norm has found, in the order of the calls.
    """
    calls = [[(mean, var, momentum) for mean, var, *_, momentum in found] for found in micro_batches]
    if any(others != calls[0] for others in calls):
        raise StateError(
            "deferred_batch_norm=True, but batch norm in a module kept whole runs otherwise for some micro-batches "
            "than for others; let it run as often for each, with the same momentum, or give deferred_batch_norm=False"
        )
    after = dict(buffers)
    for parts in zip(*micro_batches, strict=True):
        mean_name, var_name, *_, momentum = parts[0]
        statistics = merged([n for _, _, n, *_ in parts], [p[3] for p in parts], [p[4] for p in parts])
        for name, new in zip((mean_name, var_name), statistics, strict=True):
            old = after[name]
            # As the kernel has it, which rounds once: with a momentum of 0 or 1 nothing is lost.
            after[name] = (momentum * new + (1 - momentum) * old.double()).to(old.dtype)
    return after


def merged(
    counts: Sequence[int], means: Sequence[torch.Tensor], variances: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance of values of which those of parts are given; in float64."""
    mean, var = torch.stack([*means]).double(), torch.stack([*variances]).double()
    n = torch.tensor(counts, dtype=torch.float64, device=mean.device)[:, None]
    total = sum(counts)
    whole = (n * mean).sum(0) / total
    squares = ((n - 1) * var + n * (mean - whole) ** 2).sum(0)
    return whole, squares / (total - 1)
