"""chunks="auto": the number of micro-batches is for the largest mini-batch that trains, not for the first one met."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.profiling import Profile, Seconds


def _model(*, is_normed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers, *([nn.BatchNorm1d(8)] if is_normed else []), nn.Linear(8, 4))


def _data(samples: int) -> torch.Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(samples))


def _profile(model: nn.Module) -> Profile:
    """A millisecond for a sample and as much for a call: more micro-batches pay, but not with few samples."""
    x = _data(8)
    found = fxpipe.profile(fxpipe.trace(model, (x,)), (x,), hardware="cpu")
    forward = Seconds(1e-3, 1e-3)
    nodes = [replace(cost, forward=forward, backward=forward + forward, weight=forward) for cost in found.nodes]
    return replace(found, nodes=tuple(nodes), estimated_for="")


def _pipe(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.pipeline(model, ["cpu", "cpu"], profile=_profile(model), **options)


def _chosen_first(samples: int, **options: Any) -> int:
    """By a pipe whose first mini-batch has so many samples."""
    with _pipe(_model(), **options) as pipe:
        pipe(_data(samples))
        return pipe.plan.micro_batches


def test_more_samples_are_worth_more_micro_batches() -> None:
    assert _chosen_first(2) < _chosen_first(32)


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_tiny_first_mini_batch_does_not_bind_later_ones(evaluates: bool) -> None:
    model = _model()
    plain = copy.deepcopy(model)
    x, target = _data(32), torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    with _pipe(model) as pipe:
        with torch.set_grad_enabled(not evaluates):
            pipe(_data(2))
        before = pipe.plan
        loss = pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
        assert pipe.plan.micro_batches == _chosen_first(32) > before.micro_batches
        assert pipe.plan.batch == 32
        assert [stage.nodes for stage in pipe.plan.stages] == [stage.nodes for stage in before.stages]
        ran = {one.action.micro_batch for one in pipe.last_step.actions}
        assert len(ran) == pipe.plan.micro_batches
    expected = F.mse_loss(plain(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_smaller_mini_batches_and_those_that_evaluate_change_nothing() -> None:
    with _pipe(_model(), example_args=(_data(16),)) as pipe:
        plan = pipe.plan
        pipe(_data(4))
        pipe(_data(16))
        with torch.no_grad():
            pipe(_data(64))
        assert pipe.plan is plan


def test_an_evaluation_counts_until_there_is_training() -> None:
    with _pipe(_model()) as pipe:
        with torch.no_grad():
            pipe(_data(2))
            pipe(_data(64))
        assert pipe.plan.micro_batches == _chosen_first(64)
        pipe(_data(4))  # trains, and has fewer samples
        assert pipe.plan.batch == 4
        assert pipe.plan.micro_batches == _chosen_first(4)


def test_a_number_that_was_given_stays() -> None:
    with _pipe(_model(), chunks=3) as pipe:
        pipe(_data(2))
        pipe(_data(32))
        assert pipe.plan.chunks == 3


def test_micro_batches_that_the_model_refuses_are_not_chosen() -> None:
    """Batch norm takes no single value for each channel."""
    with _pipe(_model(is_normed=True), example_args=(_data(4),)) as pipe:
        pipe(_data(6))
        assert 6 // pipe.plan.micro_batches > 1


def test_where_nothing_fits_the_number_stays() -> None:
    model = _model()
    least = fxpipe.plan(model, 2, example_args=(_data(2),), profile=_profile(model), chunks=1)
    limit = max(int(least.memory(j, b=2)) for j in range(2))
    with _pipe(model, memory_limit=limit, checkpoint="never") as pipe:
        pipe(_data(2))
        before = pipe.plan
        pipe(_data(4096))
        assert pipe.plan is before
    assert _chosen_first(4096) != before.micro_batches
