"""What no graph can carry is refused in every way of making one, and at the model itself, which nothing can keep whole.

`tests/test_trace_refusals.py` asks the recorder, about a module inside a model.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.graph_functions import exporting
from helpers.traced_models import Forward, assert_same_as_model, x
from torch import fx, nn

from fxpipe import trace
from fxpipe.errors import TraceError

TRACERS = {"record": "record", "export": exporting(x()), "fx": fx.symbolic_trace}
FUNCTIONS = [exporting(x()), fx.symbolic_trace]


class Model(Forward):
    """One input, which symbolic tracing can follow."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _lot_of_numpy(m: Any, a: torch.Tensor) -> torch.Tensor:
    return m.lin(a) if np.random.rand() < 0.5 else m.lin(a) * 2


def _freeze(m: Any, a: torch.Tensor) -> torch.Tensor:
    m.lin.requires_grad_(False)
    return m.lin(a)


def _ask_buffer(m: Any, a: torch.Tensor) -> torch.Tensor:
    m.mean.requires_grad_()
    return m.lin(a) + m.mean


def _set_parameter(m: Any, a: torch.Tensor) -> torch.Tensor:
    m.weight = m.lin.weight
    return m.lin(a)


def _set_to_tied(m: Any, a: torch.Tensor) -> torch.Tensor:
    m.mean = m.lin(a).mean(0)
    return m.lin(a) + m.mean


def _write_tied(m: Any, a: torch.Tensor) -> torch.Tensor:
    y = m.lin(a)
    m.mean.copy_(y.mean(0))
    return y


def _default_dtype(m: Any, a: torch.Tensor) -> torch.Tensor:
    y = m.lin(a)
    torch.set_default_dtype(torch.float64)
    return y


def _backward(m: Any, a: torch.Tensor) -> torch.Tensor:
    m.lin(a).sum().backward()
    return m.lin(a)


def _hook(m: Any, a: torch.Tensor) -> torch.Tensor:
    y = m.lin(a)
    y.register_hook(lambda gradient: None)
    return y


def _retain(m: Any, a: torch.Tensor) -> torch.Tensor:
    y = m.lin(a)
    y.retain_grad()
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
    "backward": (_backward, r"runs backward.*outside forward"),
    "hook on a tensor": (_hook, r"puts a hook on a tensor at .*\.py:\d+; do so outside|argument of type"),
    "retain_grad": (_retain, r"keeps the gradient of a tensor at .*\.py:\d+; do so outside forward"),
    "generator": (
        lambda m, a: m.lin(a) + torch.rand(6, generator=_generator),
        "a random generator of its own.*leave out",
    ),
    "generator, before the graph": (_frozen_generator, "a random generator of its own.*leave out"),
    "tensor that requires grad": (lambda m, a: m.lin(a) * _elsewhere, r"a tensor that requires grad.*nn\.Parameter"),
    "gradients switched off": (_freeze, r"gradients of 'lin\.weight'|switches off gradients"),
    "gradients of a buffer": (_ask_buffer, "gradients of 'mean'|starts to ask for gradients"),
    "parameter set": (_set_parameter, "sets the parameter 'weight'; set parameters outside forward"),
    "buffer set to what requires grad": (
        _set_to_tied,
        "(sets|writes into) 'mean' .*tensor that requires grad.*detach it",
    ),
    "what requires grad in a buffer": (_write_tied, "writes into 'mean' a tensor that requires grad.*detach it"),
    "default dtype": (_default_dtype, r"default dtype.*pass dtype="),
    "python's random numbers": (lambda m, a: m.lin(a) * random.random(), "Python's or numpy's random .*leaf_modules"),
    "numpy's random numbers": (lambda m, a: m.lin(a) * float(np.random.rand()), "Python's or numpy's random numbers"),
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


class Inside(nn.Module):
    """Holds nearly all parameters in one module."""

    def __init__(self, forward: Any, **held: Any) -> None:
        super().__init__()
        self.inner, self.out = Model(forward, **held), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))


def test_a_large_module_that_draws_in_python_stays_whole() -> None:
    model = Inside(lambda m, a: m.lin(a) * random.random())
    traced = trace(model, (x(),))
    assert traced.tracer == "record"
    assert list(traced.whole) == ["inner"]
    assert max(traced.opaque_shares.values()) > 0.5
    for tracer in FUNCTIONS:
        with pytest.raises(TraceError, match="Python's or numpy's random numbers"):
            trace(model, (x(),), tracer=tracer)


def test_a_module_kept_whole_that_runs_backward_through_what_it_is_given_is_refused() -> None:
    """It would end at the stage, and what is before it would train without this gradient."""

    class Inner(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            h.square().sum().backward(retain_graph=True)
            return h * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.inner = nn.Linear(6, 6), Inner()

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return self.inner(self.lin(a))

    model = Outer()
    for leaf_modules in ((), ["inner"]):
        with pytest.raises(TraceError, match=r"runs backward.*outside forward"):
            trace(model, (x(),), leaf_modules=leaf_modules)
        assert all(parameter.grad is None for parameter in model.parameters())
