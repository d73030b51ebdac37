"""Tensors of a class of their own: inputs, values between stages and parameters."""

from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.right_or_refused import outcome
from torch import nn

import fxpipe


class Plain(torch.Tensor):
    """A class that adds nothing."""


class Tagged(torch.Tensor):
    """A class that adds an attribute, and hands it on."""

    tag = "none"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        tags = [a.tag for a in args if isinstance(a, Tagged)]
        if isinstance(result, Tagged) and tags:
            result.tag = tags[0]
        return result


class Unseen(torch.Tensor):
    """A class that functions of torch do not ask, as a parameter's is."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def tagged(x: torch.Tensor) -> torch.Tensor:
    result = x.as_subclass(Tagged)
    result.tag = "mine"
    return result


def meta_tensor(x: torch.Tensor) -> torch.Tensor:
    return pytest.importorskip("monai.data").MetaTensor(x, meta={"name": "scan"})


def layers(n: int = 3) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(n) for layer in (nn.Linear(8, 8), nn.Tanh())))


class Skipping(Layered, down=8, middle=lambda: layers(2), up=(16, 8)):
    """Values that go past a stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(x).relu()
        return self.up(torch.cat([h, self.middle(h)], 1))


class Making(Layered, first=lambda: layers(1), last=lambda: layers(2)):
    """A forward that makes a tensor of another class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).as_subclass(Plain))


class InPlace(Layered, first=8, last=lambda: layers(1)):
    """A stage that writes to what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h.mul_(2)
        return self.last(h.tanh()) + h


class Stopping(Layered, first=8, middle=lambda: layers(1), last=8):
    """A value of which one later use takes no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.middle(h) * (h.detach() > 0))


class OwnWeight(nn.Module):
    """A parameter whose data are of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        for layer in (self.first, self.last):
            layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Plain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


CASES: dict[str, Any] = {
    "class that adds nothing": (layers, lambda x: x.as_subclass(Plain), "right"),
    "class with an attribute": (layers, tagged, "right"),
    "class that functions do not ask": (layers, lambda x: x.as_subclass(Unseen), "right"),
    "skip": (Skipping, lambda x: x.as_subclass(Plain), "right"),
    "written to": (InPlace, lambda x: x.as_subclass(Plain), "right"),
    "detached later": (Stopping, lambda x: x.as_subclass(Plain), "right"),
    "a parameter as input": (layers, lambda x: nn.Parameter(x, requires_grad=False), "right"),
    "made in forward": (Making, lambda x: x, "tensor of unknown origin"),
    "parameter": (OwnWeight, lambda x: x, "'first.weight' is a Plain, a class of its own"),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_every_stage(name):
    make, convert, want = CASES[name]
    assert want in outcome(make, lambda seed: convert(inputs(seed)))


def test_metadata_of_a_library():
    assert outcome(Skipping, lambda seed: meta_tensor(inputs(seed)), stages=3) == "right"


def test_an_input_that_wants_a_gradient():
    model = layers()
    x = inputs(0).as_subclass(Plain).requires_grad_()
    model(x).square().sum().backward()
    want, x.grad = x.grad, None
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), progress=False) as pipe:
        pipe(x).square().sum().backward()
    torch.testing.assert_close(x.grad, want)


class Remembering(Layered, first=8, last=8, mean=lambda: None):
    """Leaves a tensor for its next call, of the class of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.mean is not None:
            (h - self.mean).square()  # of which nothing is made
        self.mean = h.detach().mean(0)
        return self.last(h)


def test_state_of_the_class_of_the_inputs():
    model, plain = Remembering(), Remembering()
    plain.load_state_dict(model.state_dict())
    first = inputs(0).as_subclass(Plain)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(first,), progress=False) as pipe:
        for seed in range(3):
            x = inputs(seed).as_subclass(Plain)
            torch.testing.assert_close(pipe(x), torch.cat([plain(x[:2]), plain(x[2:])]))
            torch.testing.assert_close(pipe.mean, plain.mean)


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Hooked(nn.Module):
    """Kept whole, since it puts a hook on a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x
        if y.requires_grad:
            y.register_hook(lambda g: 2 * g)
        return y


def test_a_function_before_a_module_kept_whole():
    """What the function returns is a view, as a subclass, that must not see its memory written to."""

    class Model(Layered, first=8, hooked=Hooked, last=8):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.hooked(Tanh.apply(self.first(x))))

    assert outcome(Model, lambda seed: inputs(seed).as_subclass(Plain)) == "right"
