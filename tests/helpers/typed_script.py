"""A script of a user's, as type checkers read it."""

from __future__ import annotations

import torch
from torch import nn

import fxpipe
from fxpipe.scheduling import Schedule


@fxpipe.leaf
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.mul(factor)


def train(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> float:
    pipe: fxpipe.Pipeline = fxpipe.pipeline(model, ["cpu", "cpu"], chunks=4, schedule="1f1b", example_args=(x,))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with pipe:
        loss: torch.Tensor = pipe.forward_backward(x, target=target, loss_fn=nn.functional.mse_loss)
        again, outputs = pipe.forward_backward(x, target=target, loss_fn=nn.functional.mse_loss, return_outputs=True)
        optimizer.step()
        plan: fxpipe.Plan = pipe.plan
        seconds: float = fxpipe.simulate(plan, schedule="gpipe", chunks=8).step_seconds
        print(plan, pipe.last_step, outputs, seconds, scaled(again, 2.0))
        plain: nn.Module = fxpipe.unwrap(pipe)
        plain.eval()
        stages = fxpipe.optim.StageOptimizer(pipe, torch.optim.AdamW, lr=1e-3)
        pipe.forward_backward(x, target=target, loss_fn=nn.functional.mse_loss, optimizer=stages)
    return float(loss)


def look(model: nn.Module, x: torch.Tensor, schedule: Schedule) -> str:
    traced = fxpipe.trace(model, (x,))
    profile: fxpipe.Profile = fxpipe.profile(traced, (x,))
    tuning: fxpipe.Tuning = fxpipe.tune(model, ["cpu", "cpu"], example_args=(x,), schedules=["1f1b", "gpipe"])
    try:
        plan = fxpipe.plan(model, 2, chunks=4, hardware="h100", example_args=(x,))
    except fxpipe.errors.FxpipeError as error:
        return str(error)
    return f"{plan.stages[0].parameter_bytes} {profile} {tuning.best.schedule} {schedule}"
