"""Plans that are used again: in another mode than they were made in, and with other numbers of samples and chunks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same_gradients, assert_same_state, closing
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError


class Moody(nn.Module):
    """Another graph in evaluation: dropout, batch norm, and a layer that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.extra = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.tanh(self.norm(self.first(x))), 0.0, self.training)
        if self.training:
            x = x + self.extra(x)
        return self.last(x)


def samples(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 4)


def plan_of(model: nn.Module, **options: Any) -> fxpipe.Plan:
    return fxpipe.plan(model, 2, example_args=(samples(),), **{"chunks": 1, "hardware": "cpu"} | options)


def assert_evaluates_and_trains(pipe: Any, plain: nn.Module) -> None:
    """In the mode that the two are in, then in training: outputs, gradients, buffers."""
    for training in (plain.training, True, False):
        for model in (pipe, plain):
            model.train(training)
            model.zero_grad()
        x = samples()
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(pipe(x), plain(x))
        if training:
            for model in (pipe, plain):
                model(x).square().sum().backward()
            assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)


HOWS = {
    "as it is": lambda pipe: pipe,
    "copied": copy.deepcopy,
    "pickled": lambda pipe: pickle.loads(pickle.dumps(pipe)),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_plan_of_training_serves_a_pipe_that_first_evaluates(how: Callable[[Any], Any], tmp_path: Path) -> None:
    plain = Moody()
    plan_of(plain).save(tmp_path / "plan.json")
    plan = fxpipe.Plan.load(tmp_path / "plan.json")
    plain.eval()
    with closing(how(fxpipe.pipeline(copy.deepcopy(plain), plan=plan))) as pipe:
        assert_evaluates_and_trains(pipe, plain)
        assert [stage.nodes for stage in pipe.plan.stages] == [stage.nodes for stage in plan.stages]
        assert any("extra" in name for stage in pipe.plan.stages for name in stage.nodes)
        assert not any(module.training for module in pipe.model.modules())


def test_a_plan_of_evaluation_serves_a_pipe_that_first_trains() -> None:
    plain = Moody().eval()
    plan = plan_of(plain)
    plain.train()
    with closing(fxpipe.pipeline(copy.deepcopy(plain), plan=plan)) as pipe:
        assert_evaluates_and_trains(pipe, plain)
        assert not any("extra" in name for stage in pipe.plan.stages for name in stage.nodes)


def test_a_plan_with_a_frozen_norm_keeps_it_frozen_in_its_graph() -> None:
    """Modes are by module: the plan's graph is neither that of `train()` nor that of `eval()`."""
    plain = Moody()
    plain.norm.eval()
    plan = plan_of(plain)
    assert plan.evaluating == ("norm",)
    with closing(fxpipe.pipeline(copy.deepcopy(plain).eval(), plan=plan)) as pipe:
        assert_evaluates_and_trains(pipe, plain.eval())
        for model in (pipe, plain):
            model.train()
            model.norm.eval()
        x = samples()
        torch.testing.assert_close(pipe(x), plain(x))
        assert_same_state(pipe, plain)
        assert len(pipe._fxpipe.graphs) == 3


def test_inputs_that_only_evaluation_takes_say_what_to_do() -> None:
    """Batch norm trains on two samples at least."""
    model = Moody()
    plan = plan_of(model)
    with closing(fxpipe.pipeline(model.eval(), plan=plan)) as pipe:
        with pytest.raises(ValueError, match="more than 1 value") as caught:
            pipe(samples(1))
        assert any("mode (train or eval) that the plan was made in" in note for note in caught.value.__notes__)
        assert not any(module.training for module in model.modules())


def test_another_model_is_refused_in_either_mode() -> None:
    plan = plan_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ArgumentError, match="another graph") as caught:
        fxpipe.pipeline(Moody().eval(), plan=plan, example_args=(samples(),))
    assert "mode (train or eval)" not in "".join(getattr(caught.value, "__notes__", ()))
