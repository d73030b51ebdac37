"""Modules that torch.compile has made, in a model or as one, are taken as the modules that they were made from."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from torch import nn

import fxpipe


class Deciding(Layered):
    """What it reads only a stage knows, so that it is kept whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        return h * 2 if (h.sum() > 0).item() else h


def never(*_: Any) -> Any:
    raise AssertionError("something is compiled")


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend=never)


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend=never)
    return module


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))


def line() -> nn.Linear:
    return nn.Linear(4, 4)


MODELS = {
    "inside": lambda wrap: nn.Sequential(wrap(block()), nn.ReLU(), wrap(line())),
    "the model itself": lambda wrap: wrap(nn.Sequential(line(), nn.ReLU(), line())),
    "in one that is kept whole": lambda wrap: nn.Sequential(Deciding(inner=wrap(line())), wrap(line())),
    "one that is kept whole": lambda wrap: nn.Sequential(wrap(Deciding(inner=line())), line()),
}


@pytest.mark.parametrize(("wrap", "kind"), each_once([compiled, compiled_in_place], MODELS))
def test_a_compiled_module_is_what_it_was_made_from(kind: str, wrap: Any) -> None:
    torch.manual_seed(1)
    plain = MODELS[kind](lambda module: module)
    torch.manual_seed(1)
    model = MODELS[kind](wrap)
    names = list(model.state_dict())
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(torch.randn(6, 4),)) as pipe:
        assert list(pipe.state_dict()) == names
        for step in range(2):
            x, target = torch.randn(6, 4), torch.randn(6, 4)
            loss = pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
            parts = [F.mse_loss(plain(a), b) / 2 for a, b in zip(x.chunk(2), target.chunk(2), strict=True)]
            want = sum(parts)
            want.backward()
            torch.testing.assert_close(loss, want.detach(), msg=f"step {step}")
        for (_, a), b in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        for a, b in zip(pipe.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b)
        pipe.eval(), plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(pipe(x[:1]), plain(x[:1]))


def test_inputs_of_a_compiled_model_have_the_names_of_its_forward() -> None:
    traced = fxpipe.trace(compiled(nn.Linear(4, 4)), (), {"input": torch.randn(6, 4)})
    assert [leaf.path for leaf in traced.leaves] == ["input"]
    assert [leaf.path for leaf in fxpipe.trace(compiled(nn.Linear(4, 4)), (torch.randn(6, 4),)).leaves] == ["input"]
