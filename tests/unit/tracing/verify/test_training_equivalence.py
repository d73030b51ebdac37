"""Graph and model are compared as training calls them: gradients, and state over two calls in a row."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from helpers.traced_models import Forward, x
from torch import nn

from fxpipe import profile, trace
from fxpipe.errors import TraceError
from fxpipe.tracing.traced import Traced
from fxpipe.tracing.verify import equivalence as two_calls
from fxpipe.tracing.verify.equivalence import check_training_equivalence


def _replaced(traced: Traced, name: str, function: Any) -> None:
    """Another function in the place of a node's, as a fault of a recording would be."""
    (node,) = (n for n in traced.nodes if n.name == name)
    node.op, node.target = "call_function", function


def _twice(value: torch.Tensor) -> torch.Tensor:
    """The right value with a wrong backward."""
    return value.tanh() + (value * 2 - (value * 2).detach())


def test_a_recording_with_a_wrong_backward_is_refused() -> None:
    traced = trace(Forward(lambda m, a: m.lin(a).tanh()), (x(),))
    check_training_equivalence(traced, [x()])
    _replaced(traced, "tanh", _twice)
    with pytest.raises(TraceError, match=r"gradient of 'lin\.weight' by the traced graph is not the model's.*leaf_mod"):
        check_training_equivalence(traced, [x()])


def test_a_gradient_that_is_missing_is_none_that_is_zero() -> None:
    model = Forward(lambda m, a: m.lin(a) + m.other(a).tanh().detach(), other=nn.Linear(6, 6))
    traced = trace(model, (x(),))
    _replaced(traced, "detach", lambda value: value * 0 + value.detach())
    with pytest.raises(TraceError, match=r"gradient of 'other\.weight'"):
        check_training_equivalence(traced, [x()])


def test_gradients_of_inputs_are_compared() -> None:
    batch = x().requires_grad_()
    model = Forward(lambda m, a: m.lin(a.detach()) + a.tanh())
    traced = trace(model, (batch,))
    _replaced(traced, "tanh", _twice)
    with pytest.raises(TraceError, match="gradient of 'input args"):
        check_training_equivalence(traced, [batch])


def test_what_is_no_number_is_seen_behind_a_first_piece() -> None:
    want, place = torch.ones(two_calls.COMPARED_AT_ONCE + 1), torch.tensor([two_calls.COMPARED_AT_ONCE])
    assert not two_calls.is_close(want, want.index_fill(0, place, torch.nan))


@pytest.mark.parametrize("fault", [lambda g: g * 2, lambda g: g.roll(1, 0), lambda g: g.roll(1, 1), torch.zeros_like])
def test_large_gradients_are_compared_by_their_sums(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return fault(gradient)

    monkeypatch.setattr(two_calls, "SMALL_GRADIENT", 8)
    traced = trace(Forward(lambda m, a: a @ m.lin.weight.clone()), (x(),))
    check_training_equivalence(traced, [x()])
    _replaced(traced, "clone", Fault.apply)
    with pytest.raises(TraceError, match=r"gradient of 'lin\.weight'"):
        check_training_equivalence(traced, [x()])


def test_what_cancels_out_is_rounding_and_no_difference() -> None:
    """The gradient of a key's bias is zero: softmax does not see it. What comes out depends on the kernels."""

    def forward(m: Any, a: torch.Tensor) -> torch.Tensor:
        return torch.softmax(m.lin(a) @ m.key(a).mT / 7, -1) @ a

    model, batch = Forward(forward, key=nn.Linear(6, 6)), torch.randn(4, 5, 6)
    traced = trace(model, (batch,))
    _replaced(traced, "softmax", lambda value, dim: (value * 3).double().div(3).softmax(dim).float())
    check_training_equivalence(traced, [batch])


def test_hooks_of_the_users_see_nothing_and_stay() -> None:
    seen = []
    model, batch = Forward(lambda m, a: m.lin(a)), x().requires_grad_()
    for tensor in (model.lin.weight, batch):
        tensor.register_hook(seen.append)
        tensor.register_post_accumulate_grad_hook(seen.append)
    model.lin.bias.register_post_accumulate_grad_hook(seen.append)
    model.lin.bias.grad = torch.ones(6)
    profile(trace(model, (batch,)), (batch,), budget=0.0)
    assert not seen
    assert torch.equal(model.lin.bias.grad, torch.ones(6))
    model(batch).sum().backward()
    assert len(seen) == 5
    assert model.lin.bias._backward_hooks is None


@pytest.mark.usefixtures("only_new_objects")
def test_gradients_go_as_soon_as_they_are_compared() -> None:
    alive: list[int] = []
    of = two_calls._GradientSummary.of

    def counted(gradient: torch.Tensor) -> Any:
        gc.collect()
        large = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.untyped_storage().nbytes() == 360_000]
        alive.append(len({t.untyped_storage()._cdata for t in large}))
        return of(gradient)

    model = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(300, 300), nn.ReLU())))
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_calls._GradientSummary, "of", counted)
        patch.setattr(two_calls, "_has_python", lambda traced: True)
        trace(model, (torch.randn(4, 300),))
    assert len(weights) == 24
    assert max(alive) <= 12 + 3  # the weights, and what is made at the moment


def test_buffers_are_compared_as_forward_leaves_them_and_as_backward_does() -> None:
    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            ctx.seen = seen
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            ctx.seen.add_(1)
            return gradient, None

    trace(Forward(lambda m, a: Counted.apply(m.lin(a), m.seen), seen=torch.zeros(1)), (x(),))


def test_saved_values_are_read_by_backward_only() -> None:
    def forward(m: Any, a: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda value: [value * 2], list.pop):
            return m.lin(a).as_strided(a.shape, a.stride()).tanh()  # as_strided hides its state

    with pytest.raises(TraceError, match=r"gradient of 'lin\.weight'"):
        trace(Forward(forward), (x(),))


def test_a_model_whose_backward_raises_can_be_traced_for_what_it_does_forward() -> None:
    class Forwards(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

    trace(Forward(lambda m, a: Forwards.apply(m.lin(a))), (x(),))


def test_what_the_second_call_makes_of_the_state_is_compared() -> None:
    """A switch that the first call sets: what it does then shows in the second call only."""

    def forward(m: Any, a: torch.Tensor) -> torch.Tensor:
        y = m.lin(a) * torch.where(m.seen > 0, 2.0, 1.0)
        m.seen.fill_(1)
        return y

    traced = trace(Forward(forward, seen=torch.zeros(1)), (x(),))
    check_training_equivalence(traced, [x()])
    _replaced(traced, "where", lambda condition, yes, no: torch.ones(1))
    with pytest.raises(TraceError, match="output 0 of the second of two calls in a row is not the model's"):
        check_training_equivalence(traced, [x()])


def test_a_buffer_that_the_graph_does_not_change_is_told() -> None:
    traced = trace(Forward(lambda m, a: m.lin(a) + m.seen.add_(1), seen=torch.zeros(1)), (x(),))
    _replaced(traced, next(n.name for n in traced.nodes if "add_" in str(n.target)), lambda value, one: value + one)
    with pytest.raises(TraceError, match="buffer 'seen' after the traced graph differs"):
        check_training_equivalence(traced, [x()])


def test_tensors_in_lists_are_after_tracing_what_they_were() -> None:
    def forward(m: Any, a: torch.Tensor) -> torch.Tensor:
        m.listed[0].add_(a.detach().mean(0))
        return m.lin(a) + m.listed[0]

    model = Forward(forward, listed=[torch.zeros(6)])
    with contextlib.suppress(TraceError):
        trace(model, (x(),))
    assert torch.equal(model.listed[0], torch.zeros(6))


def test_an_input_that_a_computed_value_is_written_to_ends_no_gradient() -> None:
    def forward(m: Any, a: torch.Tensor) -> torch.Tensor:
        a[:, 0] = 0
        a[:, 1:] += m.lin(a.clone())[:, 1:]
        return m.other(a)

    model = Forward(forward, other=nn.Linear(6, 6))
    check_training_equivalence(trace(model, (x(),)), [x()])
