"""A function with a backward of its own keeps it, through whatever it is called; else it is refused."""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.oracle import assert_step, closing
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionMeta, once_differentiable
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe._torch.autograd_functions import intercept_apply
from fxpipe.errors import TraceError


class Tri(Function):
    """Straight through, and three times as much: what its forward does has another gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float() + x.detach().clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0]


class Setup(Function):
    @staticmethod
    def forward(x, factor=2.0):
        return x.detach() * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = (inputs[0].sum() * 0 + inputs[1]).item()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.factor + 5), None


class Written(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 7 * grad


class Reversed(Function):
    """Returns what it is given."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Several(Function):
    """Returns a tensor that is not differentiable and a number besides."""

    @staticmethod
    def forward(ctx, x):
        places = x.argsort(1)
        ctx.mark_non_differentiable(places)
        return x.sort(1).values, places, 4

    @staticmethod
    def backward(ctx, grad, _, __):
        return 2 * grad.flip(1)


class Nested(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Tri.apply(x) + tri(x)

    @staticmethod
    def backward(ctx, grad):
        return grad + Tri.apply(ctx.saved_tensors[0])


def by_c(function: Any) -> Any:
    """`function.apply` as torch 2.14 has it, which is C's own in all versions."""
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, function)


tri = Tri.apply
FUNCTIONS = {
    "saving": (Tri, lambda apply, h: apply(h)),
    "writing": (Written, lambda apply, h: apply(h * 1.0)),
    "returning its input": (Reversed, lambda apply, h: apply(h)),
    "several": (Several, lambda apply, h: apply(h)[0] + apply(h)[1] / apply(h)[2]),
    "nested": (Nested, lambda apply, h: apply(h)),
    "with a context of its own": (Setup, lambda apply, h: apply(apply(h, 2.0), 3.0)),
}
ROUTES: dict[str, Callable[[Any], Any]] = {
    "as a method": lambda function: lambda *args: function.apply(*args),
    "an alias": lambda function: function.apply,
    "partial": lambda function: functools.partial(function.apply),
    "staticmethod": lambda function: type("Holder", (), {"f": staticmethod(function.apply)}).f,
    "C's own": by_c,
}


class Holding(Layered, linear=4):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.linear(x))


def layer(apply: Any, use: Any) -> Holding:
    return Holding(use=functools.partial(use, apply))


def assert_trains(plain: nn.Module, evaluates: bool = True, **options: Any) -> Any:
    """On other batches than the one it was planned on: outputs, gradients, over two steps, and in evaluation."""
    model, x = copy.deepcopy(plain.double()), torch.randn(6, 4).double()
    with closing(fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), **options)) as pipe:
        for samples in (6, 5):
            assert_step(pipe, plain, x := torch.randn(samples, 4).double())
        with torch.no_grad() if evaluates else contextlib.nullcontext():
            torch.testing.assert_close(pipe(x), plain(x))
        return pipe._fxpipe.first.traced


@pytest.mark.parametrize(
    ("kind", "route"),
    [(kind, route) for i, kind in enumerate(FUNCTIONS) for k, route in enumerate(ROUTES) if (i + k) % 2 == 0],
)
def test_a_function_keeps_its_backward_through_whatever_it_is_applied(route: str, kind: str) -> None:
    """An alias taken before, the idiom of torch's documentation, left everything before it without gradients."""
    function, use = FUNCTIONS[kind]
    apply = ROUTES[route](function)
    plain = nn.Sequential(layer(apply, use), nn.Tanh(), layer(apply, use))
    names = [node.name for node in assert_trains(plain).nodes]
    assert sum(function.__name__ in name for name in names) == sum(name.count(function.__name__) for name in names) > 1


def test_an_alias_in_a_module_that_is_kept_whole_keeps_its_backward() -> None:
    plain = nn.Sequential(layer(tri, FUNCTIONS["saving"][1]), nn.Linear(4, 4))
    assert assert_trains(plain, leaf_modules=["0"]).whole


def test_a_function_that_is_applied_to_what_needs_no_gradient_is_a_node_as_well() -> None:
    """The graph holds when its inputs need gradients later."""
    for route in ("an alias", "C's own"):
        plain = layer(ROUTES[route](Tri), FUNCTIONS["saving"][1]).requires_grad_(False)
        assert any("Tri" in node.name for node in fxpipe.trace(plain, (torch.randn(6, 4),)).nodes)


def test_applying_is_as_it_was_after_a_block_and_for_nested_ones() -> None:
    apply, seen = Function.__dict__["apply"], []

    def note(name: str) -> Any:
        def call(plain: Any, function: Any, args: Any, kwargs: Any) -> Any:
            seen.append(name)
            return plain(function, *args, **kwargs)

        return call

    with intercept_apply(note("outer")):
        with intercept_apply(note("inner")):
            tri(torch.ones(2)), Tri.apply(torch.ones(2))  # the former was bound before
        with intercept_apply(note("middle")), intercept_apply(note("inner")):
            Tri.apply(torch.ones(2))
    tri(torch.ones(2))
    assert seen == ["inner", "outer", "inner", "middle", "outer"]
    assert Function.__dict__["apply"] is apply
    assert "__getattribute__" not in FunctionMeta.__dict__


class Hidden(Layered, linear=4):
    """Applies a function in a thread of its own, where nothing of it is seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).clone()
        thread = threading.Thread(target=Written.apply, args=(h,))
        thread.start()
        thread.join()
        return torch.relu(h)


def test_a_backward_that_no_recorded_function_explains_is_an_error_at_the_value() -> None:
    with pytest.raises(TraceError, match=r"applies Written at .*test_autograd_functions.py:\d+, a function"):
        fxpipe.trace(Hidden(), (torch.randn(6, 4),))


def test_the_module_that_applies_it_is_kept_whole() -> None:
    assert assert_trains(nn.Sequential(Hidden(), nn.Linear(4, 4)), evaluates=False).whole.keys() == {"0"}


@torch.library.custom_op("fxpipe_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


tripled.register_autograd(lambda ctx, grad: grad * 3)


def write_under_no_grad(h: torch.Tensor) -> torch.Tensor:
    y = tri(h)
    with torch.no_grad():
        y.mul_(2)
        y.clamp_(-1, 1)
    return y * 2 + y.view(-1).view_as(y)


@pytest.mark.parametrize(
    "use",
    [
        lambda h: tripled(h),
        write_under_no_grad,
        lambda h: checkpoint(tri, h, use_reentrant=False) + checkpoint(tri, h, use_reentrant=True),
        lambda h: torch.vmap(torch.tanh)(tri(h)).requires_grad_(),
    ],
)
def test_backwards_that_recorded_functions_explain_are_none(use: Any) -> None:
    traced = assert_trains(nn.Sequential(Holding(use=use), nn.Linear(4, 4)), evaluates=False)
    assert not traced.whole


class Recomputing(Function):
    """As those of reversible networks: its backward runs the blocks again, and backward through them."""

    @staticmethod
    def forward(ctx, x, blocks, *parameters):
        ctx.blocks, ctx.parameters = blocks, parameters
        ctx.save_for_backward(x)
        for block in blocks:
            x = block(x)
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x
            for block in ctx.blocks:
                y = block(y)
        if not ctx.parameters:
            torch.autograd.backward(y, grad)
            return x.grad, None
        parameters = [p for block in ctx.blocks for p in block.parameters()]
        found = torch.autograd.grad(y, [x, *parameters], grad)
        return found[0], None, *found[1:]


class Reversible(Layered, blocks=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Recomputing.apply(x, self.blocks, *(self.blocks.parameters() if self.gives_parameters else ()))


@pytest.mark.parametrize("check", [True, False])
def test_a_backward_that_fills_the_gradients_of_parameters_itself_is_refused(check: bool) -> None:
    """Gradients of planning stayed in the model: they were off by hundreds."""
    model = nn.Sequential(nn.Linear(4, 4), Reversible(gives_parameters=False), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    with pytest.raises(TraceError, match=r"whose backward runs backward and fills `.grad` itself.*torch.autograd.grad"):
        fxpipe.pipeline(model, ["cpu"] * 2, 2, example_args=(x,), check=check)
    assert all(p.grad is None for p in model.parameters())


def test_one_that_returns_them_is_kept_whole() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), Reversible(gives_parameters=True), nn.Linear(4, 4))
    assert assert_trains(plain).whole.keys() == {"1"}


class MakesALoss(Layered, a=4, b=4):
    """As vector quantizers do: a zero that asks for gradients, by either spelling."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(1)
        if self.training and self.by_attribute:
            loss.requires_grad = True
        elif self.training:
            loss.requires_grad_()
        return self.b(self.a(x)) + loss


@pytest.mark.parametrize("by_attribute", [True, False])
def test_a_constant_that_forward_asks_gradients_of_is_recorded(by_attribute: bool) -> None:
    """By the attribute it was not: 'requires grad in the model only'."""
    traced = assert_trains(MakesALoss(by_attribute=by_attribute))
    assert "requires_grad_" in {node.target for node in traced.nodes}


def test_a_tensor_of_an_old_constructor_is_computed_in_every_step() -> None:
    """It may ask for gradients, too. The error said to do so before the model is called."""

    def scaled(h: torch.Tensor) -> torch.Tensor:
        return h * torch.FloatTensor([0.5]) + torch.FloatTensor([1.0]).requires_grad_()

    assert_trains(nn.Sequential(Holding(use=scaled), nn.Linear(4, 4)))
