"""Hooks that forward puts on tensors: they see the whole gradient once for each micro-batch, or the model is refused.

The hooks clamp, so that one that sees a part of a gradient, or sees it in parts, gives another result.
"""

import copy
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.right_or_refused import outcome
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import fxpipe
from fxpipe.errors import StateError

LIMIT = 1e-3


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def clamp_node(gradients: Any, *_: Any) -> Any:
    return tuple(None if g is None else clamp(g) for g in gradients)


def hook(x: torch.Tensor) -> None:
    if x.requires_grad:
        x.register_hook(clamp)


class Residual(nn.Module):
    """Three blocks; forward itself puts the hooks on."""

    def __init__(self, is_residual: bool = True, asks: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.is_residual, self.asks = is_residual, asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.is_residual else layer(x).tanh()
            if not self.asks or x.requires_grad:
                x.register_hook(clamp)
        return x


class Block(Layered, layer=8):
    """A residual block; `put` has what it is given, what is inside of it and what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x).tanh()
        y = x + h
        self.put(self, x, h, y)
        return y


def blocks(put: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(8, 8), *(Block(put=put) for _ in range(3)))


class Clamped(Layered, layer=8):
    """A layer whose input has a hook."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.put(x)
        return self.layer(x)


class Around(nn.Module):
    """A value that is used before, or after, it is given to a module that puts a hook on it."""

    def __init__(self, used_before: bool, put: Any = hook, distance: int = 1) -> None:
        super().__init__()
        self.first, self.clamped, self.used_before = nn.Linear(8, 8), Clamped(put=put), used_before
        self.middle = nn.Sequential(*(layer for _ in range(distance) for layer in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        if self.used_before:
            return self.middle(h) + self.clamped(h)
        return self.clamped(h) + self.middle(h)


class AfterBreak(Layered, first=8, second=8, third=8):
    """A forward that runs a backward, after which its lines run in several nodes, and hooks what is above `least`."""

    least = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.enable_grad():
            leaf = h.detach().requires_grad_()
            leaf.square().sum().backward()
        y = h + self.second(h) * leaf.grad.tanh()
        if float(h.detach().abs().max()) > self.least:
            hook(y)
        return y + self.third(y)


@fxpipe.leaf
def clamped(x: torch.Tensor) -> torch.Tensor:
    hook(x)
    return x


class Leaf(Layered, first=8, second=8, last=8):
    """A leaf function that puts a hook on its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        more = self.second(h) if self.used_before else 0
        return self.last(clamped(h)) + more + h


def with_module_hook(kind: str) -> Any:
    def make() -> nn.Module:
        model = Around(True)
        model.clamped.put = lambda x: None
        if kind == "forward":
            model.middle[0].register_forward_hook(lambda module, args, output: hook(output))
        else:
            model.clamped.register_forward_pre_hook(lambda module, args: hook(args[0]))
        return model

    return make


def on_node(x: torch.Tensor) -> None:
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(clamp_node)


def on_several(x: torch.Tensor) -> None:
    if x.requires_grad:
        register_multi_grad_hook((x,), lambda gradients: None)


def kept(module: Any, x: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> None:
    if h.requires_grad:
        h.retain_grad()
        module.feature = h


OWN_FORWARD = "the model puts a hook on a tensor at"
PARTIAL = "the hook would see a part of the gradient"
CASES: dict[str, Any] = {
    "forward, residual": (Residual, OWN_FORWARD),
    "forward, residual, does not ask": (lambda: Residual(asks=False), OWN_FORWARD),
    "forward, no residual": (lambda: Residual(is_residual=False), OWN_FORWARD),
    "forward, no residual, does not ask": (lambda: Residual(is_residual=False, asks=False), OWN_FORWARD),
    "forward, after a graph break": (AfterBreak, PARTIAL),
    "block, inside": (blocks(lambda module, x, h, y: hook(h)), "right"),
    "block, what it returns": (blocks(lambda module, x, h, y: hook(y)), "right"),
    "block, all of it": (blocks(lambda module, x, h, y: [hook(x), hook(h), hook(y)]), "right"),
    "block, does not ask": (blocks(lambda module, x, h, y: h.register_hook(clamp)), "right"),
    "block, a view": (blocks(lambda module, x, h, y: hook(y.view_as(y))), "right"),
    "block, a node": (blocks(lambda module, x, h, y: on_node(y)), "right"),
    "block, its weight": (blocks(lambda module, *_: hook(module.layer.weight)), PARTIAL),
    "block, keeps the gradient": (blocks(kept), "keeps the gradient of a tensor"),
    "input, used before": (lambda: Around(True), PARTIAL),
    "input, used long before": (lambda: Around(True, distance=4), PARTIAL),
    "input, used after": (lambda: Around(False), "right"),
    "input, used long after": (lambda: Around(False, distance=4), "right"),
    "node of an input, used before": (lambda: Around(True, on_node), "looks at a node of autograd"),
    "several, used before": (lambda: Around(True, on_several), "looks at a node of autograd"),
    "leaf function, used before": (lambda: Leaf(used_before=True), PARTIAL),
    "leaf function": (lambda: Leaf(used_before=False), "right"),
    "module hook": (with_module_hook("forward"), "right"),
    "module hook, input": (with_module_hook("pre"), PARTIAL),
}


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("last", ["first", "middle.0"])
def test_hooks_on_what_a_weight_makes(last):
    """In the stage of the weight and in the next one, where it is cut after this module."""
    assert outcome(with_module_hook("forward"), inputs, balance=[last]) == "right"


@pytest.mark.parametrize("name", CASES)
def test_hooks_see_whole_gradients(name):
    make, want = CASES[name]
    message = outcome(make, inputs)
    assert want in message, message


def test_a_hook_that_only_a_later_step_puts_in_lines_of_several_nodes_is_refused() -> None:
    model = AfterBreak(least=100.0)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(inputs(0),), progress=False) as pipe:
        pipe(inputs(1)).sum().backward()
        with pytest.raises(StateError, match=r"kept whole, puts a hook on a tensor.*unlike when it was traced"):
            pipe(1e4 * inputs(1))


class Features(Layered, body=8, head=8):
    """Returns what it makes the logits of, the logits, and a view that nobody uses."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.body(x)
        return h, self.head(h.tanh()), h[:, :2]


@pytest.mark.parametrize("put", [lambda x: x.register_hook(clamp), lambda x: x.retain_grad()])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_hooks_on_outputs_see_the_whole_gradient_or_are_refused(devices: list[str], put: Any) -> None:
    plain = copy.deepcopy(model := Features())
    with fxpipe.pipeline(model, devices, 2, example_args=(inputs(0),), progress=False) as pipe:
        outputs, expected = pipe(inputs(1)), plain(inputs(1))
        with pytest.raises(StateError, match=r"uses the output 0 \(body\) further, and a hook on it"):
            put(outputs[0])
        for given in (outputs, expected):
            put(given[1])
            put(given[2])
            sum(x.sum() for x in given).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        pipe(outputs[0].detach())
