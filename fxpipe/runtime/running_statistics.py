"""The running statistics of deferred batch norm, at the end of a step (`fxpipe.rewriting.deferred_batch_norm`).

For each call of batch norm, a micro-batch gives the number n of values in a channel, their mean and their unbiased
variance. The statistics of the mini-batch follow without cancellation (T. Chan, G. Golub, R. LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979): with N the sum of all n

    mean = sum(n mean_i) / N
    var  = (sum((n_i - 1) var_i) + sum(n_i (mean_i - mean)^2)) / (N - 1)

in float64, in the order of micro-batches, so no bit depends on the schedule. Means are rounded to the buffer's dtype:
if values are k times farther from 0 than from each other, the relative error of the variance is about k / 1e7 in
float32. Calls that share running statistics update them in order, as in forward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from fxpipe.errors import StateError
from fxpipe.rewriting.program import BatchStatistics


def updated_running_statistics(
    buffers: Mapping[str, torch.Tensor], micro_batches: Sequence[Sequence[BatchStatistics]]
) -> dict[str, torch.Tensor]:
    """Returns the buffers of a stage, by name, with the running statistics after the mini-batch.

    Args:
        micro_batches: for each micro-batch, the statistics of each call of batch norm, in order.
    """
    after = dict(buffers)
    if not any(micro_batches):
        return after
    # All calls are batched: a stage may have dozens of them, with few channels each.
    widths = tuple(mean.numel() for _, _, _, mean, _, _ in micro_batches[0])
    counts = tuple(tuple(n for _, _, n, *_ in calls) for calls in micro_batches)
    mean, var = merge_statistics(
        counts,
        widths,
        torch.stack([torch.cat([mean for _, _, _, mean, _, _ in calls]) for calls in micro_batches]),
        torch.stack([torch.cat([var for _, _, _, _, var, _ in calls]) for calls in micro_batches]),
    )
    for call, new_mean, new_var in zip(
        _norm_calls(micro_batches[0]), mean.split(widths), var.split(widths), strict=True
    ):
        mean_name, var_name, momentum = call
        for name, new in ((mean_name, new_mean), (var_name, new_var)):
            # Rounded once, as by the kernel; exact with a momentum of 0 or 1.
            after[name] = after[name].double().lerp_(new, momentum).to(after[name].dtype)
    return after


def check_same_norm_calls(first: Sequence[BatchStatistics], other: Sequence[BatchStatistics]) -> None:
    """Checks that two micro-batches have the same calls of batch norm. Opaque modules, or two graphs, may differ.

    Raises:
        StateError: the calls differ.
    """
    if _norm_calls(first) != _norm_calls(other):
        raise StateError(
            "deferred_batch_norm=True, but batch norm runs otherwise for some micro-batches than for others (in a "
            "module kept whole, or where forward takes another way for some of micro_batches=); let it run as often "
            "for each, with the same momentum, or give deferred_batch_norm=False"
        )


def _norm_calls(statistics: Sequence[BatchStatistics]) -> list[tuple[str, str, float]]:
    return [(mean, var, momentum) for mean, var, *_, momentum in statistics]


def merge_statistics(
    counts: tuple[tuple[int, ...], ...], widths: tuple[int, ...], means: torch.Tensor, variances: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and unbiased variance of all values from those of the parts, one part in each row; in float64.

    Args:
        counts: the number of values for each part and each group of columns.
        widths: of the groups.
    """
    of_mean, within, between = _merge_weights(counts, widths, means.device)
    means = means.double()
    mean = (of_mean * means).sum(0)
    return mean, (within * variances + between * (means - mean) ** 2).sum(0)


@functools.lru_cache(maxsize=64)
def _merge_weights(
    counts: tuple[tuple[int, ...], ...], widths: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes n / N, (n - 1) / (N - 1), n / (N - 1); cached, so that later steps do not wait for a GPU."""
    n = torch.tensor(counts, dtype=torch.float64).repeat_interleave(torch.tensor(widths), dim=1)
    total = n.sum(0)
    return (n / total).to(device), ((n - 1) / (total - 1)).to(device), (n / (total - 1)).to(device)
