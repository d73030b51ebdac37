"""Attributes that forward sets to tensors are after a step what the model leaves in them for the mini-batch."""

import copy
from typing import Any

import pytest
import torch
from helpers.cases import each_once
from helpers.devices import workers
from torch import nn

import fxpipe
from fxpipe.errors import StateError


class Model(nn.Module):
    def __init__(self, forward: Any, **held: Any):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(3, 3), nn.Linear(3, 3), forward
        vars(self).update(held)  # plain attributes, also tensors

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    m.kept = h.detach().softmax(1)
    return m.second(h)


def _in_another_dimension(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    m.kept = h.detach().mT
    return m.second(h)


def _read_again(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept = x.mean(1, keepdim=True).detach()
    return m.second(m.first(x - m.kept)) + m.kept


def _the_output(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept = m.second(m.first(x))
    return m.kept


def _the_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept = x
    return m.second(m.first(x))


def _written_later(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    m.kept = h.detach().clone()
    y = m.second(h)
    m.kept.mul_(y.detach())
    return y


SETS = {
    "detached": _attention,
    "in another dimension": _in_another_dimension,
    "read again": _read_again,
    "the output": _the_output,
    "the input": _the_input,
    "written later": _written_later,
}
HELD: dict[str, dict[str, Any]] = {"new": {}, "None": {"kept": None}, "a tensor": {"kept": torch.zeros(2)}}


@pytest.mark.parametrize(("name", "held"), each_once(SETS, HELD.values()))
def test_it_is_the_mini_batchs(name: str, held: dict[str, Any]) -> None:
    twin = copy.deepcopy(model := Model(SETS[name], **held))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 3),)) as pipe:
        for samples in (4, 7, 5):
            x = torch.randn(samples, 3)
            torch.testing.assert_close(pipe(x), twin(x))
            torch.testing.assert_close(model.kept, twin.kept)
            assert model.kept.requires_grad == twin.kept.requires_grad
            pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
            torch.testing.assert_close(model.kept, twin.kept, check_stride=False)
        assert len(pipe._fxpipe.graphs) == 1
        with torch.no_grad():
            x = torch.randn(6, 3)
            torch.testing.assert_close(pipe.eval()(x), twin.eval()(x))
            torch.testing.assert_close(model.kept, twin.kept)


def _with_a_loss(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    m.kept = h.square().mean()
    return m.second(h)


def _with_a_mean_of_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    m.kept = h.square().mean(0)
    return m.second(h)


@pytest.mark.anywhere
@pytest.mark.parametrize("forward", [_the_output, _with_a_loss, _with_a_mean_of_rows])
def test_what_requires_grad_goes_back_through_the_pipe(forward: Any) -> None:
    twin = copy.deepcopy(model := Model(forward))
    with fxpipe.pipeline(model, workers(2), 2, example_args=(torch.randn(4, 3),)) as pipe:
        for _ in range(2):
            x = torch.randn(6, 3)
            for run, owner in ((pipe, model), (twin, twin)):
                (run(x).sum().cpu() + owner.kept.square().sum().cpu()).backward()
        for (name, have), want in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(have.grad.cpu(), want.grad, msg=lambda text, name=name: f"{name}: {text}")


MIXED = [lambda h: h.detach() - h.detach().mean(0), lambda h: (h * h.mean(0)).sum(), lambda h: h.mean(0).square()]


@pytest.mark.parametrize("kept", MIXED)
def test_what_samples_share_there_is_kept_with_one_micro_batch_only(kept: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.kept = kept(h := m.first(x))
        return m.second(h) * (1 + m.kept.mean())

    for chunks in (1, 2):
        plain = copy.deepcopy(model := Model(lambda m, x: (forward(m, x) + m.kept.square().sum()).square().mean()))
        with fxpipe.pipeline(model, ["cpu", "cpu"], chunks, example_args=(torch.randn(4, 3),)) as pipe:
            for samples in (4, 8):
                x = torch.randn(samples, 3)
                torch.testing.assert_close(pipe(x), plain(x))
                if chunks == 1:
                    torch.testing.assert_close(model.kept, plain.kept)
                else:
                    with pytest.raises(StateError, match="'kept' in each call"):
                        model.kept.sum()


def test_a_failed_step_sets_nothing() -> None:
    model = Model(_attention)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(4, 3),)) as pipe:
        pipe(torch.randn(4, 3))
        before = model.kept
        with pytest.raises(ZeroDivisionError):
            pipe.forward_backward(torch.randn(4, 3), loss_fn=lambda y: 1 / 0)
        assert model.kept is before
        del model.kept
        x = torch.randn(4, 3)
        pipe(x)
        torch.testing.assert_close(model.kept, model.first(x).softmax(1))
