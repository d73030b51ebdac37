"""A feature that a forward hook has kept is of one micro-batch, and no loss of it goes back through the pipe."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.devices import on_cpu, workers
from torch import nn

import fxpipe
from fxpipe.errors import StateError

KEPT = r"a forward hook, or a module kept whole, has kept.*of one micro-batch.*Let forward return the tensor"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def x(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def square(kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return on_cpu(kept["feature"]).square().mean()


WAYS: dict[str, Callable[[Any, dict[str, torch.Tensor]], object]] = {
    "with the output": lambda pipe, kept: (on_cpu(pipe(x())).sum() + square(kept)).backward(),
    "behind the output": lambda pipe, kept: (pipe(x()).sum().backward(), square(kept).backward()),
    "before the output": lambda pipe, kept: (pipe(x()), square(kept).backward()),
    "in the loss": lambda pipe, kept: pipe.forward_backward(
        x(), loss_fn=lambda y: y.mean() + kept["feature"].to(y.device).square().mean()
    ),
    "behind the loss": lambda pipe, kept: (
        pipe.forward_backward(x(), loss_fn=lambda y: y.mean()), square(kept).backward(),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "place", "checkpoint"),
    [
        pytest.param("with the output", 1, "never", marks=pytest.mark.anywhere),
        ("with the output", 3, "always"),
        ("behind the output", 1, "always"),
        ("before the output", 3, "never"),
        pytest.param("in the loss", 1, "always", marks=pytest.mark.anywhere),
        ("in the loss", 3, "never"),
        ("behind the loss", 1, "never"),
    ],
)
def test_a_loss_of_a_kept_feature_is_refused(way, place, checkpoint):
    """Without a word, gradients of the first stage's weights were lost, or torch spoke of a second backward."""
    kept: dict[str, torch.Tensor] = {}
    m = model()
    with fxpipe.pipeline(m, workers(2), 2, checkpoint=checkpoint, progress=False) as pipe:
        m[place].register_forward_hook(lambda module, inputs, output: kept.__setitem__("feature", output))
        pipe(x(1)).sum().backward()
        for p in m.parameters():
            p.grad = None
        with pytest.raises(StateError, match=KEPT):
            WAYS[way](pipe, kept)


@pytest.mark.anywhere
def test_a_feature_of_planning_is_refused_too():
    kept: list[torch.Tensor] = []
    m = model()
    with fxpipe.pipeline(m, workers(2), 2, progress=False) as pipe:
        m[1].register_forward_hook(lambda module, inputs, output: kept.append(output))
        loss = on_cpu(pipe(x())).sum()
        with pytest.raises(StateError, match=KEPT):
            sum((on_cpu(feature).square().mean() for feature in kept if type(feature) is torch.Tensor), loss).backward()


@pytest.mark.anywhere
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_hooks_that_look_or_change_gradients_go_on(checkpoint):
    kept: list[torch.Tensor] = []

    def look(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2)
        kept.append(output.detach())

    plain = copy.deepcopy(m := model())
    for one in (plain, m):
        one[1].register_forward_hook(look)
    with fxpipe.pipeline(m, workers(2), 2, checkpoint=checkpoint, progress=False) as pipe:
        for seed in range(2):
            for one in (plain, pipe):
                one(x(seed)).square().mean().backward()
            pipe.forward_backward(x(seed), loss_fn=lambda y: y.square().mean())
            plain(x(seed)).square().mean().backward()
        for (name, want), p in zip(plain.named_parameters(), m.parameters(), strict=True):
            torch.testing.assert_close(on_cpu(p.grad), want.grad, msg=lambda text, name=name: f"{name}: {text}")


# -- what takes a module as a program --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "export",
    [
        torch.jit.script,
        lambda pipe: torch.export.export(pipe, (x(),)),
        lambda pipe: torch.export.export(pipe, (x(),), strict=True),
    ],
    ids=["jit.script", "export", "strict export"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_whoever_exports_a_pipe_is_told_to_give_the_model(export):
    with (
        fxpipe.pipeline(model(), workers(2), 2, example_args=(x(),), progress=False) as pipe,
        pytest.raises(Exception, match=r"fxpipe\.unwrap\(pipe\)"),
    ):
        export(pipe)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "compiled"])
def test_hooks_can_leave_planning_out(compiles):
    """A count of samples is that of the steps, whatever planning runs; also in the run that compiles a stage."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    samples, calls = [], []

    @torch.compiler.disable
    def count(module, args, output):
        calls.append(len(output))
        if not fxpipe.is_planning():
            samples.append(len(output))

    model[0].register_forward_hook(count)
    x = torch.randn(16, 8)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, progress=False, compile=compiles) as pipe:
        pipe.forward_backward(x, target=torch.randn(16, 4), loss_fn=nn.functional.mse_loss)
        assert samples == [4] * 4
        assert len(calls) > len(samples)
        pipe(x[:8]).sum().backward()
        assert sum(samples) == 24
        pipe.eval()
        with torch.no_grad():
            pipe(x[:12])
    assert sum(samples) == 36
    assert not fxpipe.is_planning()
