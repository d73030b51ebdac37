"""Which strategy leads to the graph, and that the pipeline is the model with each."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_step, closing
from helpers.traced_models import Forward, assert_same_as_model, x
from torch import fx, nn

import fxpipe
from fxpipe import trace
from fxpipe.errors import TraceError
from fxpipe.tracing import Traced
from fxpipe.tracing.record import record_model

# -- what the user keeps whole ---------------------------------------------------------------------------------------


class Scaled(Layered, weight=lambda: nn.Parameter(torch.randn(6, 7))):
    """Recording cannot tell where its constant comes from, and keeps the module whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[:, 1:] * torch.FloatTensor([2.0] * 6)


class Around(nn.Module):
    """A module with a part of the parameters that `others` decides."""

    def __init__(self, others: int) -> None:
        super().__init__()
        self.inner = Scaled()
        self.rest = nn.Sequential(*(nn.Linear(6, 6) for _ in range(others)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.inner(x))


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_module_whose_constants_are_of_unknown_origin_is_kept_whole(others: int) -> None:
    traced = trace(Around(others), (x(),))
    assert max(traced.opaque_shares.values()) == 1 / (1 + others)
    assert list(traced.whole) == ["inner"]
    warned = [why for why in traced.why if why.startswith("module 'inner' is one node with 100% of the parameters")]
    assert len(warned) == (others == 0)
    assert_same_as_model(traced, x(7))


def test_what_the_user_keeps_whole_is_kept_besides_others() -> None:
    model = nn.ModuleDict({"around": Around(0), "kept": nn.Tanh()})
    model.forward = lambda x: model["kept"](model["around"](x))  # type: ignore[method-assign]
    assert {*trace(model, (x(),), leaf_modules=["kept"]).whole} == {"kept", "around.inner"}


def make_unused(reads: bool) -> nn.Module:
    """Makes what nobody uses, of an input that nothing else uses, before the module that is kept whole."""

    def forward(m: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = m.lin(x)
        unused = y + m.ids(ids)
        return m.h(y) * (2 if unused is not None else 1)

    def read(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if reads and args[0].sum().item() > 1e9:
            raise ValueError

    model: Any = Forward(forward, h=nn.Linear(6, 6), ids=nn.Embedding(4, 6))
    model.h.register_forward_pre_hook(read)
    return model


@pytest.mark.parametrize(("reads", "asked"), [(False, ["h"]), (True, []), (True, ["h"])])
def test_an_input_that_only_an_unused_value_mixes_with_others(reads: bool, asked: list[str]) -> None:
    model, ids = make_unused(reads), torch.arange(8) % 4
    plain, given = copy.deepcopy(model), x(8)
    with closing(
        fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(given, ids), leaf_modules=asked, profile_budget=0.0)
    ) as pipe:
        traced = pipe._fxpipe.first.traced
        assert traced.in_dims == (0, 0)
        assert {*asked} <= {*traced.whole}
        for samples in (8, 5, 12):
            given, ids = x(samples), torch.arange(samples) % 4
            assert_step(pipe, plain, given, ids)


class Net(nn.Module):
    """A weight of two names, a skip, a part without gradients, a buffer, a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.again.weight = self.first.weight
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.unused = nn.Linear(2, 2)
        self.register_buffer("shift", torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.inner(self.first(x).relu()) + self.shift
        scale = self.last(y).mean(-1, keepdim=True).detach()
        return {"y": self.last(self.again(y) + x) * scale.tanh(), "y2": y.square()}


class Reads(Net):
    """And a number read of a trained parameter."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        factor = 1 + self.last.weight.sum().item() ** 2
        found = super().forward(x)
        return {"y": found["y"] * factor, "y2": found["y2"]}


def train_both(pipe: fxpipe.Pipeline, plain: nn.Module, steps: int) -> None:
    """Outputs, and every gradient by name, over steps of training."""
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pipe, plain))
    every = [name for name, _ in plain.named_parameters()]
    for _ in range(steps):
        given = x(8)
        have, want = pipe(given), plain(given)
        assert list(have) == list(want)
        for name, value in want.items():
            torch.testing.assert_close(have[name], value, msg=lambda m, name=name: f"{name}: {m}")
        for optimizer, output in ((mine, have), (theirs, want)):
            optimizer.zero_grad()
            (F.mse_loss(output["y"], torch.ones(8, 3)) + output["y2"].mean()).backward()
        assert_same_gradients(pipe, plain, loose=every)
        for optimizer in (mine, theirs):
            optimizer.step()


def exported(model: nn.Module) -> nn.Module:
    """A graph of `torch.export`, in a module, so that its hooks are hooks of a module inside."""
    dims = ({0: torch.export.Dim.DYNAMIC},)
    return nn.Sequential(OrderedDict(graph=torch.export.export(model, (x(),), dynamic_shapes=dims).module()))


@pytest.mark.parametrize("make", [lambda model: model, fx.symbolic_trace, exported], ids=["plain", "fx", "export"])
def test_the_pipeline_is_the_model(make: Callable[[nn.Module], nn.Module]) -> None:
    """Also if the model is a graph that another tool has made of one."""
    net = Net()
    model, plain = make(copy.deepcopy(net)), make(net)
    with closing(fxpipe.pipeline(model, ["cpu"] * 2, 3, example_args=(x(8),), balance="block")) as pipe:
        assert len(pipe.plan.stages) == 2
        train_both(pipe, plain, 3)


def test_a_number_read_of_a_trained_parameter_is_that_of_the_step() -> None:
    plain = copy.deepcopy(model := Reads())
    with closing(fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(x(8),))) as pipe:
        assert pipe.plan.guards
        train_both(pipe, plain, 3)


def one_more(*arguments: Any) -> Traced:
    """Records a graph that is wrong by a constant, which no gradient shows."""
    traced = record_model.record(*arguments)
    output = traced.graph.output_node()
    (last,), assigned = output.args[0]  # type: ignore[misc]
    with traced.graph.inserting_before(output):
        wrong = traced.graph.call_function(torch.add, (last, 1))
    wrong.meta.update(last.meta)
    output.args = (((wrong,), assigned),)
    return traced


def test_a_wrong_graph_is_found_by_the_comparison_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.tracing.strategies.record", one_more)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    with pytest.raises(TraceError, match=r"output 0 .* of the traced graph differs from the model's"):
        trace(model, (x(),))
    with pytest.raises(TraceError, match=r"output 0 .* of the traced graph differs from the model's"):
        fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(x(),))
    given = x()
    want = model(given) + 1
    with closing(fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(given,), check=False)) as pipe:
        torch.testing.assert_close(pipe(given), want)


def make_speech(draw: Any) -> nn.Module:
    """Masks what it is given at random, by numpy, as speech models do while they train."""
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    backbone = Forward(lambda m, x: m.layers(m.lin(x * draw(x))), layers=layers)
    return nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(6, 6)))


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x) * float(np.random.rand() < 2)


def test_a_module_kept_whole_that_holds_most_of_the_model_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match=r"'backbone' is one node with 80% of the parameters.*numpy's random") as seen:
        plan = fxpipe.plan(make_speech(drawn), 2, example_args=(x(),), chunks=2, hardware="cpu")
    assert len(seen) == 1
    assert seen[0].filename == __file__
    text = str(seen[0].message)
    assert text in plan.why
    assert "'backbone' is one node with 80% of the parameters" in " ".join(str(plan).split())


def test_a_leaf_function_around_what_draws_makes_the_graph_finer() -> None:
    plan = fxpipe.plan(make_speech(fxpipe.leaf(drawn)), 2, example_args=(x(),), chunks=2, hardware="cpu")
    assert not plan.whole
