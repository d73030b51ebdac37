"""Plans that are used again: in another mode than they were made in, and with other numbers of samples and chunks."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state, closing
from helpers.plan_hardware import hardware
from torch import nn

import fxpipe
from fxpipe.cluster import Link
from fxpipe.planning.plans.figures import plan_figures


class Moody(Layered, first=4, norm=lambda: nn.BatchNorm1d(4), extra=4, last=4):
    """Another graph in evaluation: dropout, batch norm, and a layer that only training has."""

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
    with fxpipe.pipeline(copy.deepcopy(plain), plan=plan) as pipe:
        assert_evaluates_and_trains(pipe, plain)
        assert not any("extra" in name for stage in pipe.plan.stages for name in stage.nodes)


def test_a_plan_with_a_frozen_norm_keeps_it_frozen_in_its_graph() -> None:
    """Modes are by module: the plan's graph is neither that of `train()` nor that of `eval()`."""
    plain = Moody()
    plain.norm.eval()
    plan = plan_of(plain)
    assert plan.evaluating == ("norm",)
    with fxpipe.pipeline(copy.deepcopy(plain).eval(), plan=plan) as pipe:
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
    with fxpipe.pipeline(model.eval(), plan=plan) as pipe:
        with pytest.raises(ValueError, match="more than 1 value") as caught:
            pipe(samples(1))
        assert any("mode (train or eval) that the plan was made in" in note for note in caught.value.__notes__)
        assert not any(module.training for module in model.modules())


class Masked(Layered, layers=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(6))):
    """Values that grow with the batch, one that does not, and a skip."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, first = torch.ones(4, device=x.device).cumsum(0), self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) * mask
        return x + first


def comparable(plan: fxpipe.Plan) -> fxpipe.Plan:
    """Without what is forgotten, and with seconds as far as rounding goes."""
    stages = tuple(
        replace(s, forward_seconds=pytest.approx(s.forward_seconds), backward_seconds=pytest.approx(s.backward_seconds),
                weight_seconds=pytest.approx(s.weight_seconds))
        for s in plan.stages
    )  # fmt: skip
    sendings, packets = (
        tuple(replace(way, seconds=pytest.approx(way.seconds)) for way in ways)
        for ways in (plan.sendings, plan.packets)
    )
    return replace(plan, bottlenecks=(), stages=stages, sendings=sendings, packets=packets)


@pytest.mark.parametrize(("chunks", "batch"), [(4, 8), (1, 8), (2, 32), (8, 3)])
def test_figures_follow_the_micro_batches_that_a_plan_is_used_with(chunks: int, batch: int) -> None:
    """As if it had been cut so by a plan for these."""
    how: dict[str, Any] = {"hardware": hardware(Link(1e9, 5e-6)), "balance": ["layers.2", "layers.4"]}
    made = fxpipe.plan(Masked(), 3, example_args=(samples(8),), chunks=2, **how)
    x = samples(batch)
    other = fxpipe.plan(Masked(), 3, example_args=(x,), chunks=chunks, **how)
    assert made.portals
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "chunks": chunks, "example_args": (x,)}
    with fxpipe.pipeline(Masked(), plan=made, **options) as pipe:
        same = tuple(replace(s, device="cpu", code=t.code) for s, t in zip(other.stages, pipe.plan.stages, strict=True))
        other, found = replace(other, stages=same, devices=("cpu",) * 3), pipe.plan
        assert found.micro_batch == other.micro_batch != made.micro_batch
        assert comparable(other) == found
        for j in range(3):
            assert found.memory(j) == other.memory(j)
        pipe(x)


def test_figures_stay_where_the_micro_batches_do() -> None:
    made = plan_of(Row(), chunks=4)
    with fxpipe.pipeline(Row(), plan=made, example_args=(samples(),)) as pipe:
        codes = tuple(replace(s, code=t.code) for s, t in zip(made.stages, pipe.plan.stages, strict=True))
        assert pipe.plan == replace(made, stages=codes)
        assert pipe.plan.bottlenecks


class Row(nn.Sequential):
    """Equal layers."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__(*(layer for _ in range(layers) for layer in (nn.Linear(4, 4), nn.Tanh())))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_is_planned_for_fewer_samples_than_chunks_is_what_runs(schedule: str) -> None:
    """Two samples make two micro-batches, however many were asked for."""
    options: dict[str, Any] = {"example_args": (samples(2),), "hardware": "cpu", "schedule": schedule}
    many, two = (fxpipe.plan(Row(), 3, chunks=chunks, **options) for chunks in (8, 2))
    assert (many.chunks, many.micro_batches, many.micro_batch, many.batch) == (8, 2, 1, 2)
    assert [many.in_flight(j) for j in range(3)] == [two.in_flight(j) for j in range(3)]
    assert [many.memory(j) for j in range(3)] == [two.memory(j) for j in range(3)]
    assert plan_figures(many) == plan_figures(two)
    assert "2 micro-batches of at most 1 sample" in str(many)


def test_what_fits_into_memory_is_not_refused_for_chunks_that_there_are_not() -> None:
    options: dict[str, Any] = {"example_args": (samples(2),), "hardware": "cpu", "schedule": "gpipe"}
    two = fxpipe.plan(Row(), 2, chunks=2, checkpoint="never", **options)
    limit = max(int(two.memory(j, b=1)) for j in range(2))
    many = fxpipe.plan(Row(), 2, chunks=64, checkpoint="never", memory_limit=limit, **options)
    assert [stage.nodes for stage in many.stages] == [stage.nodes for stage in two.stages]


def test_a_plan_for_few_samples_cuts_more_of_them_as_was_asked() -> None:
    plan = fxpipe.plan(Row(), 2, example_args=(samples(2),), chunks=8, hardware="cpu")
    with fxpipe.pipeline(Row(), plan=plan) as pipe:
        pipe(samples(16))
        assert len({record.action.micro_batch for record in pipe.last_step.actions}) == 8
