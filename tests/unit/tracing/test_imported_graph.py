"""Graphs that functions of users make are the model, or are refused with what no graph can carry."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.graph_functions import exporting
from helpers.layered import Layered
from helpers.oracle import closing
from helpers.traced_models import Forward, assert_same_as_model, x
from torch import fx, nn

import fxpipe
from fxpipe import trace
from fxpipe.errors import ArgumentError, ArgumentTypeError, TraceError
from fxpipe.tracing import Traced
from fxpipe.tracing.imported_graph import trace_by_function
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.shapes.symbolic_shapes import add_shapes
from fxpipe.tracing.verify.equivalence import check_against_model

Maker = Callable[..., Callable[[nn.Module], Any]]


class Model(Forward):
    """One input, which symbolic tracing can follow."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def after(effect: Any, value: torch.Tensor) -> torch.Tensor:
    """The value, computed after the effect."""
    return value


WAYS: dict[str, Maker] = {"export": exporting, "fx": lambda *args, **kwargs: fx.symbolic_trace}


def traced_by(function: Callable[[nn.Module], Any], model: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """The graph with the passes that follow on any way of making it."""
    traced = trace_by_function(model, function, args, kwargs)
    leaves = input_leaves(model, args, kwargs)[2]
    return check_against_model(add_shapes(traced, leaves), leaves, 2)


class Double(torch.autograd.Function):
    """Its backward is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 10


class Everything(nn.Module):
    """Tied weights, buffers, constants, random numbers, in-place functions, states of the thread, sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.tied, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.tied.weight = self.lin.weight
        self.drop, self.relu = nn.Dropout(0.5), nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros(()))
        self.constant, self.listed = torch.ones(6), [torch.ones(6) * 2]

    def forward(self, x: torch.Tensor, scale: int = 3, mask: torch.Tensor | None = None) -> dict[str, Any]:
        with torch.no_grad():
            frozen = self.lin(x) * scale
        with torch.autocast("cpu", torch.bfloat16):
            rough = self.tied(x)
        y = self.drop(self.relu(self.norm(self.tied(x) + 1))) + frozen + rough.float()
        y = y + self.constant + self.listed[0] + torch.tensor([1.0, 2.0]).sum()
        self.calls.add_(1)
        y = y + torch.arange(x.shape[0], device=x.device)[:, None] + torch.full((x.shape[0], 1), 2.0)
        if mask is not None:
            y = y * mask
        return {"rows": y.view(x.shape[0] * 2, -1), "part": y.reshape(-1)[: x.shape[0] * 2], "none": None}


@pytest.mark.parametrize("training", [True, False])
def test_graph_is_the_model_at_sizes_it_has_never_seen(training: bool) -> None:
    traced = traced_by(exporting(x()), Everything().train(training), x())
    for samples in (2, 3, 7):
        assert_same_as_model(traced, x(samples))


def test_transforms_are_refused_and_leave_nothing_open() -> None:
    model = Forward(lambda m, a: torch.func.vmap(lambda row: row.sum() * row)(m.lin(a)))
    with pytest.raises(TraceError, match=r"transform of torch\.func .*\.py:\d+"):
        trace_by_function(model, exporting(x()), (x(),), {})
    assert torch._C._functorch.peek_interpreter_stack() is None


def test_export_keeps_buffers_that_forward_sets() -> None:
    def forward(m: Forward, a: torch.Tensor) -> torch.Tensor:
        m.mean = m.mean * 0.9 + a.detach().mean(0) * 0.1
        return m.lin(a) * m.mean

    traced = trace_by_function(Forward(forward, mean=torch.zeros(6)), exporting(x()), (x(),), {})
    assert_same_as_model(traced, x())


_listed = [torch.zeros(6)]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_constant_that_changes_is_refused(way: Maker) -> None:
    model = Model(lambda m, a: after(_listed[0].add_(1), m.lin(a) + _listed[0]))
    with pytest.raises((TraceError, RuntimeError)):
        trace(model, (x(),), tracer=way(x()))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_graph_that_loses_a_backward_is_refused(way: Maker) -> None:
    with pytest.raises(TraceError, match=r"gradient of 'lin\.weight'.*autograd\.Function.*tracer='record'"):
        trace(Model(lambda m, a: Double.apply(m.lin(a))), (x(),), tracer=way(x()))


def test_export_that_loses_an_attribute_is_refused() -> None:
    def forward(m: Forward, a: torch.Tensor) -> torch.Tensor:
        m.last = m.lin(a).detach()
        return m.lin(a)

    with pytest.raises(TraceError, match=r"changes 'last'.*register_buffer"):
        trace(Forward(forward), (x(),), tracer=exporting(x()))


def test_a_symbolic_graph_that_raises_is_refused() -> None:
    def skips(m: Any, a: torch.Tensor) -> torch.Tensor:
        rows = m.lin(a) if isinstance(a, torch.Tensor) else a  # a proxy is none
        return rows[:, :5] @ a[:, :5].mT if type(a) is torch.Tensor else rows @ a[:, :3]

    with pytest.raises(TraceError, match=r"the graph that 'symbolic_trace' made raises, and the model does not: Ru"):
        trace_by_function(Model(skips), fx.symbolic_trace, (x(),), {})


def test_the_models_own_error_is_the_models_own() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trace_by_function(nn.Linear(5, 5), fx.symbolic_trace, (x(),), {})


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_output_has_the_models_structure(way: Maker) -> None:
    traced = traced_by(way(x()), Model(lambda m, a: OrderedDict(b=a * 2, a=a + 1)), x())
    assert_same_as_model(traced, x(7))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_hooks_on_modules_are_refused(way: Maker) -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(TraceError, match=r"module '0' .* has the hook"):
        trace_by_function(model, way(x()), (x(),), {})


def test_blocks_that_decide_at_run_time_are_refused() -> None:
    def forward(m: Forward, a: torch.Tensor) -> torch.Tensor:
        return torch.cond(a.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (m.lin(a),))

    with pytest.raises(TraceError, match=r"'cond' \(at .*torch\.where"):
        trace_by_function(Forward(forward), exporting(x()), (x(),), {})


def test_a_function_may_fix_arguments() -> None:
    class Scaled(Layered, lin=6):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: int = 1) -> torch.Tensor:
            y: torch.Tensor = self.lin(x) * scale
            return y if mask is None else y * mask

    def with_scale(model: nn.Module) -> fx.GraphModule:
        return fx.symbolic_trace(model, concrete_args={"mask": None, "scale": 2})

    traced = trace(Scaled(), (x(),), {"mask": None, "scale": 2}, tracer=with_scale)
    assert_same_as_model(traced, x(7), mask=None, scale=2)


def test_a_function_that_gives_no_graph_of_the_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    with pytest.raises(ArgumentTypeError, match=r"gives a Sequential; expected a torch\.fx\.GraphModule"):
        trace_by_function(model, lambda m: m, (x(),), {})
    with pytest.raises(ArgumentError, match=r"has a '0\.weight' of its own; trace the model itself, not a copy"):
        trace_by_function(model, lambda m: fx.symbolic_trace(copy.deepcopy(m)), (x(),), {})


def test_a_graph_module_as_the_model() -> None:
    traced = trace(fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6), nn.ReLU())), (x(),))
    assert_same_as_model(traced, x(7))


def test_a_model_without_inputs_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"Linear takes inputs, and there are none; .* fxpipe\.trace\(model, \(x,\)"
    ):
        trace(nn.Linear(6, 6))


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_graph_of_export_holds_for_the_sizes_that_it_was_made_for(dynamic: bool) -> None:
    given = x(5)
    function = exporting(given) if dynamic else lambda m: torch.export.export(m, (given,)).module()
    model = Model(lambda m, a: m.last(m.lin(a) * (3 if a.shape[0] > 6 else 2)), last=nn.Linear(6, 6))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"example_args": (given,), "profile_budget": 0.0, "tracer": function}
    with closing(fxpipe.pipeline(model, ["cpu"] * 2, 2, **options)) as pipe:
        for samples in (5, 6, 3):
            given_now = x(samples)
            torch.testing.assert_close(pipe(given_now), plain(given_now))
        with pytest.raises(TraceError, match=r"differs from the model's; forward may depend on the batch size"):
            pipe(x(8))


TRACERS = {"record": "record", "export": exporting(x()), "fx": fx.symbolic_trace}
FUNCTIONS = [exporting(x()), fx.symbolic_trace]


def _lot_of_numpy(m: Any, a: torch.Tensor) -> torch.Tensor:
    return m.lin(a) if np.random.normal() < 0.5 else m.lin(a) * 2


def _set_to_tied(m: Any, a: torch.Tensor) -> torch.Tensor:
    m.mean = m.lin(a).mean(0)
    return m.lin(a) + m.mean


def _write_tied(m: Any, a: torch.Tensor) -> torch.Tensor:
    y = m.lin(a)
    m.mean.copy_(y.mean(0))
    return y


def _set_default_dtype(m: Any, a: torch.Tensor) -> torch.Tensor:
    y = m.lin(a)
    torch.set_default_dtype(torch.float64)
    return y


_generator = torch.Generator()
_elsewhere = torch.ones(6, requires_grad=True)


class Forwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: Any) -> torch.Tensor:
        return x * 2


def _frozen_generator(m: Any, a: torch.Tensor) -> torch.Tensor:
    return m.lin(a) + torch.zeros(6).normal_(generator=_generator) * 0


LOST: dict[str, tuple[Any, str]] = {
    "backward": (lambda m, a: after(m.lin(a).sum().backward(), m.lin(a)), r"runs backward.*outside forward"),
    "hook on a tensor": (
        lambda m, a: after(m.lin(a).register_hook(lambda gradient: None), m.lin(a)),
        r"puts a hook on a tensor at .*\.py:\d+; do so outside|argument of type",
    ),
    "retain_grad": (
        lambda m, a: after(m.lin(a).retain_grad(), m.lin(a)),
        r"keeps the gradient of a tensor at .*\.py:\d+; do so outside forward",
    ),
    "generator": (
        lambda m, a: m.lin(a) + torch.rand(6, generator=_generator),
        "a random generator of its own.*leave out",
    ),
    "generator, before the graph": (_frozen_generator, "a random generator of its own.*leave out"),
    "tensor that requires grad": (lambda m, a: m.lin(a) * _elsewhere, r"a tensor that requires grad.*nn\.Parameter"),
    "gradients switched off": (
        lambda m, a: after(m.lin.requires_grad_(False), m.lin(a)),
        r"gradients of 'lin\.weight'|switches off gradients",
    ),
    "gradients of a buffer": (
        lambda m, a: after(m.mean.requires_grad_(), m.lin(a) + m.mean),
        "gradients of 'mean'|starts to ask for gradients",
    ),
    "parameter set": (
        lambda m, a: after(setattr(m, "weight", m.lin.weight), m.lin(a)),
        "sets the parameter 'weight'; set parameters outside forward",
    ),
    "buffer set to what requires grad": (
        _set_to_tied,
        "(sets|writes into) 'mean' .*tensor that requires grad.*detach it",
    ),
    "what requires grad in a buffer": (_write_tied, "writes into 'mean' a tensor that requires grad.*detach it"),
    "default dtype": (_set_default_dtype, r"default dtype.*pass dtype="),
    "python's random numbers": (lambda m, a: m.lin(a) * random.gauss(), "Python's or numpy's random .*leaf_modules"),
    "numpy's random numbers": (lambda m, a: m.lin(a) * float(np.random.normal()), "Python's or numpy's random numbers"),
    "a decision by lot of numpy's": (_lot_of_numpy, "Python's or numpy's random numbers"),
}


def _lot(m: Any, a: torch.Tensor) -> torch.Tensor:
    return m.lin(a) if torch.rand(6).sum() < 9 else m.lin(a) * 2


BAKED: dict[str, Any] = {
    "decided by": _lot,
    "added": lambda m, a: m.lin(a) + torch.randn(6),
    "set aside": lambda m, a: m.lin(a) + torch.zeros(6).bernoulli_() * 0,
}


@pytest.mark.parametrize("name", BAKED)
def test_random_numbers_drawn_while_a_graph_is_made_are_refused(name: str) -> None:
    with pytest.raises(TraceError, match=r"draws random numbers that the graph .*in every step.*tracer='record'"):
        trace(Model(BAKED[name]), (x(),), tracer=fx.symbolic_trace)


@pytest.mark.parametrize("tracer", FUNCTIONS)
@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_that_the_graph_draws_are_none(tracer: Any, training: bool) -> None:
    def forward(m: Any, a: torch.Tensor) -> torch.Tensor:
        torch.rand_like(a)  # drawn, and not used
        y = nn.functional.rrelu(m.drop(m.lin(a)), training=m.training) + torch.randn_like(a).abs_()
        return torch.bernoulli(y.detach().sigmoid()) * y + torch.empty_like(y).normal_()

    trace(Model(forward, drop=nn.Dropout()).train(training), (x(),), tracer=tracer)


@pytest.mark.parametrize("tracer", FUNCTIONS)
def test_without_values_nothing_can_be_compared(tracer: Any) -> None:
    with torch.device("meta"):
        model, given = nn.Sequential(nn.Linear(6, 6), nn.Dropout()), x()
    with pytest.raises(TraceError, match=r"it or its inputs have no values \(meta or fake\).*tracer='record'"):
        trace(model, (given,), tracer=tracer)


@pytest.mark.parametrize("tracer", TRACERS.values(), ids=TRACERS)
@pytest.mark.parametrize("name", LOST)
def test_refused_at_the_model_itself(name: str, tracer: Any) -> None:
    forward, message = LOST[name]
    model = Model(forward, mean=torch.zeros(6))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises((TraceError, NotImplementedError), match=message) as caught:  # the second is of torch.fx
        trace(model, (x(),), tracer=tracer)
    assert "\n- " not in str(caught.value)  # one reason, and not a list of ways that have failed
    assert torch.get_default_dtype() == torch.float32
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
        assert tensor.requires_grad == (name != "mean")
        assert name == "mean" or torch.equal(tensor.grad, torch.ones_like(tensor))


@pytest.mark.parametrize("tracer", FUNCTIONS)
def test_a_backward_that_raises_is_told(tracer: Any) -> None:
    model = Model(lambda m, a: Forwards.apply(m.lin(a), object()))
    with pytest.raises(TraceError, match=r"must implement either the backward|loses the backward of Forwards"):
        trace(model, (x(),), tracer=tracer)
    with torch.no_grad():
        assert_same_as_model(trace(model, (x(),), tracer=exporting(x())), x(7))


def test_backward_on_tensors_of_its_own_is_carried() -> None:
    def forward(m: Any, a: torch.Tensor) -> torch.Tensor:
        own = a.detach().requires_grad_()
        (own * own).sum().backward()
        return m.lin(own.grad)

    traced = trace(Model(forward), (x(),))
    assert list(traced.whole) == [""]
    assert_same_as_model(traced, x(7))


def test_a_module_kept_whole_that_runs_backward_through_what_it_is_given_is_refused() -> None:
    """It would end at the stage, and what is before it would train without this gradient."""

    class Inner(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            h.square().sum().backward(retain_graph=True)
            return h * 2

    class Outer(Layered, lin=6, inner=Inner):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return self.inner(self.lin(a))

    model = Outer()
    for leaf_modules in ((), ["inner"]):
        with pytest.raises(TraceError, match=r"runs backward.*outside forward"):
            trace(model, (x(),), leaf_modules=leaf_modules)
        assert all(parameter.grad is None for parameter in model.parameters())
