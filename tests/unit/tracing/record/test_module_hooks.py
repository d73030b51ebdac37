"""Hooks on modules: all run, wherever they are, and none is silently left out."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state, assert_step, closing
from torch import nn
from torch.nn.utils import prune

import fxpipe
from fxpipe.errors import StateError, TraceError
from fxpipe.tracing import trace


class Block(Layered, lin=6):
    def forward(self, x, *, scale=1.0):
        return self.lin(x).tanh() * scale


class Model(Layered, first=6, block=Block, last=6):
    def forward(self, x):
        h = self.first(x)
        return self.last(self.block(h, scale=2.0) if isinstance(self.block, Block) else self.block(h))


def x(batch: int = 6) -> torch.Tensor:
    return torch.randn(batch, 6)


def pipe_of(model: nn.Module, **options: Any) -> Any:
    return closing(fxpipe.pipeline(model, **{"devices": ["cpu", "cpu"], "chunks": 3} | options))


# -- on a module inside ----------------------------------------------------------------------------------------------


def _doubled(module, args, output):
    return output * 2


def _by_kwargs(module, args, kwargs, output):
    assert kwargs["scale"] == 2.0
    return output + args[0] * kwargs["scale"]


def _in_place(module, args, output):
    output.mul_(2)


def _no_gradients(module, args, output):
    with torch.no_grad():
        return output * 0 + 1


def _by_value(module, args, output):
    return output * 3 if output.abs().max() < 1e9 else output


HOOKS: dict[str, Any] = {
    "forward": lambda m: m.block.register_forward_hook(_doubled),
    "two": lambda m: (m.block.register_forward_hook(_doubled), m.block.register_forward_hook(_in_place)),
    "prepended": lambda m: (
        m.block.register_forward_hook(_doubled), m.block.register_forward_hook(_no_gradients, prepend=True)
    ),
    "own list": lambda m: (setattr(m.block, "own_hooks", []), m.block.register_forward_hook(_doubled)),
    "pre": lambda m: m.block.register_forward_pre_hook(lambda m, a: a[0] + 1),
    "pre, a tuple": lambda m: m.block.register_forward_pre_hook(lambda m, a: (a[0] * 3,)),
    "kwargs": lambda m: m.block.register_forward_hook(_by_kwargs, with_kwargs=True),
    "pre, kwargs": lambda m: m.block.register_forward_pre_hook(lambda m, a, k: (a, {"scale": 5.0}), with_kwargs=True),
    "in place": lambda m: m.block.register_forward_hook(_in_place),
    "on a function": lambda m: m.block.lin.register_forward_hook(_doubled),
    "without gradients": lambda m: m.last.register_forward_hook(lambda m, a, y: _no_gradients(m, a, y) + y),
    "by value": lambda m: m.block.register_forward_hook(_by_value),
    "partial": lambda m: m.block.register_forward_hook(functools.partial(lambda k, m, a, y: y * k, 4)),
    "of the module": lambda m: m.block.register_forward_hook(lambda m, a, y: y * m.lin.weight.sum() + m.lin.bias),
    "always": lambda m: m.block.register_forward_hook(_doubled, always_call=True),
    "backward": lambda m: m.block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,)),
    "backward pre": lambda m: m.block.register_full_backward_pre_hook(lambda m, go: (go[0] * 3,)),
    "backward and forward": lambda m: (
        m.block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,)), m.block.register_forward_hook(_doubled)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("mode", "name"), each_once(["never", "always"], HOOKS))
def test_hooks_inside(name, mode):
    model = Model()
    HOOKS[name](model)
    plain = copy.deepcopy(model)
    with pipe_of(model, checkpoint=mode) as pipe:
        for batch in (6, 5):
            assert_step(pipe, plain, x(batch))
            assert_step(pipe, plain, x(batch), one_pass=True)
        assert bool(pipe.plan.why) == (name in ("of the module", "backward", "backward pre", "backward and forward"))
        if name.startswith("backward"):
            assert "has the backward hook <function" in pipe.plan.why[0]
            assert "remove it (hook.remove())" in pipe.plan.why[0]


def test_a_module_goes_on_with_what_its_own_hook_keeps():
    class Keeps(Block):
        def keep(self, module, args, output):
            self.kept[args[0].device] = output.flatten(1)

        def forward(self, x, *, scale=1.0):
            self.lin(x)
            return self.kept.pop(x.device).tanh() * scale

    model = Model(block=Keeps())
    model.block.kept = {}
    model.block.lin.register_forward_hook(model.block.keep)
    plain = copy.deepcopy(model)
    with pipe_of(model) as pipe:
        assert_step(pipe, plain, x())
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval()(given := x(5)), plain.eval()(given))


def test_hooks_put_on_taken_off_and_changed_after_planning():
    plain = copy.deepcopy(model := Model())
    with pipe_of(model, example_args=(x(),)) as pipe:
        handles = []
        for step in range(6):
            if step in (1, 4):
                handles = [m.block.register_forward_hook(_doubled) for m in (model, plain)]
            if step == 2:  # as many as before, and another one
                for handle in handles:
                    handle.remove()
                handles = [m.block.register_forward_hook(_by_value) for m in (model, plain)]
            if step in (3, 5):
                for handle in handles:
                    handle.remove()
            assert_step(pipe, plain, x())
            assert_step(pipe, plain, x(), one_pass=True)


def test_a_hook_that_takes_itself_off_is_gone_after_the_step():
    model = Model()
    seen: list[int] = []

    def once(module, args, output):
        seen.append(len(output))
        handle.remove()

    handle = model.block.register_forward_hook(once)
    plain = copy.deepcopy(model)
    plain.block._forward_hooks.clear()
    with pipe_of(model, example_args=(x(),)) as pipe:
        assert model.block._forward_hooks
        seen.clear()
        pipe(x())
        assert seen == [2, 2, 2]
        assert not model.block._forward_hooks
        seen.clear()
        assert_step(pipe, plain, x())
        assert not seen


def test_planning_leaves_no_trace_of_hooks_that_write():
    model = Model()
    model.block.register_buffer("calls", torch.zeros(()))

    def counting(module, args, output):
        module.calls += 1

    model.block.register_forward_hook(counting)
    with pipe_of(model, example_args=(x(),)) as pipe:
        assert model.block.calls == 0
        plain = copy.deepcopy(model)
        for _ in range(2):
            pipe.forward_backward(x(), target=torch.ones(6, 6), loss_fn=F.mse_loss)
            for _ in range(3):
                plain(x(2))
        assert model.block.calls == 6
        assert_same_state(pipe, plain)


def test_a_hook_that_uses_another_modules_parameter_is_refused_by_name():
    model = Model()
    model.block.register_forward_hook(lambda m, a, y: model.last(y))
    with pytest.raises(TraceError, match=r"uses 'last.bias', 'last.weight' from outside"):
        trace(model, (x(),))


def test_a_hook_put_on_by_forward_is_refused():
    class Lazy(Block):
        def forward(self, x, *, scale=1.0):
            if not self.lin._forward_hooks:
                self.lin.register_forward_hook(_doubled)
            return super().forward(x, scale=scale)

    model = Model(block=Lazy())
    with pytest.raises(TraceError, match="_forward_hooks"):
        trace(model, (x(),))
    assert not model.block.lin._forward_hooks


# -- on the model itself ---------------------------------------------------------------------------------------------


def test_hooks_on_the_model_see_the_mini_batch_in_the_callers_thread():
    seen: list[Any] = []
    model = Model()

    def before(module, args):
        seen.append((module, args[0].shape, threading.get_ident()))
        return args[0] * 2

    def after(module, args, output):
        seen.append((module, output.shape, threading.get_ident()))
        return output + args[0]

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    plain = copy.deepcopy(model)
    with pipe_of(model, example_args=(x(),)) as pipe:
        assert not seen
        pipe(x())
        assert seen == [(model, (6, 6), threading.get_ident())] * 2
        assert_step(pipe, plain, x())


def test_hooks_on_the_model_with_kwargs_and_put_on_later():
    class Scaled(Block):
        def forward(self, x, scale=1.0):
            return self.lin(x).tanh() * scale

    plain = copy.deepcopy(model := Scaled())

    def before(module, args, kwargs):
        return args, kwargs | {"scale": 3.0}

    def after(module, args, kwargs, output):
        return output * kwargs["scale"]

    with pipe_of(model) as pipe:
        assert_step(pipe, plain, x())
        handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in (model, plain)]
        handles += [m.register_forward_hook(after, with_kwargs=True) for m in (model, plain)]
        assert_step(pipe, plain, x())
        for handle in handles:
            handle.remove()
        assert_step(pipe, plain, x())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("gradient_of_input", [True, False])
def test_backward_hooks_on_the_model(gradient_of_input):
    found: dict[str, list[Any]] = {"pipe": [], "plain": []}
    plain = copy.deepcopy(model := Model())
    for kind, m in (("pipe", model), ("plain", plain)):

        def hook(module, grad_input, grad_output, kind=kind):
            found[kind].append((grad_input, grad_output))
            return (grad_input[0] * 2,) if grad_input[0] is not None else None

        def pre_hook(module, grad_output):
            return (grad_output[0] * 3,)

        m.register_full_backward_hook(hook)
        m.register_full_backward_pre_hook(pre_hook)
        m.register_forward_hook(_doubled)
    given = x().requires_grad_(gradient_of_input)
    other = given.detach().clone().requires_grad_(gradient_of_input)
    with pipe_of(model) as pipe:
        pipe(given).square().sum().backward()
        plain(other).square().sum().backward()
        assert len(found["pipe"]) == len(found["plain"]) == 1
        for ours, theirs in zip(found["pipe"][0], found["plain"][0], strict=True):
            torch.testing.assert_close(ours, theirs)
        if gradient_of_input:
            torch.testing.assert_close(given.grad, other.grad)
        assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])


def test_backward_hooks_of_the_old_kind_on_the_model_are_refused():
    model = Model()
    model.register_backward_hook(lambda module, grad_input, grad_output: None)
    with pipe_of(model) as pipe, pytest.raises(StateError, match="register_full_backward_hook"):
        pipe(x())


HOOKS_ON_MODEL = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


@pytest.mark.parametrize("add", HOOKS_ON_MODEL)
def test_forward_backward_makes_no_mini_batch_for_hooks_on_the_model(add):
    plain = copy.deepcopy(model := Model())
    handle = getattr(model, add)(lambda *_: None)
    with pipe_of(model) as pipe:
        with pytest.raises(StateError, match=r"the model has the hook .*hook.remove\(\)"):
            pipe.forward_backward(x(), target=torch.ones(6, 6), loss_fn=F.mse_loss)
        handle.remove()
        assert_step(pipe, plain, x(), one_pass=True)


def _pruned(module: nn.Module) -> nn.Module:
    prune.random_unstructured(module, "weight", amount=0.3)
    return module


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize(
    ("wrap", "is_model"), [(nn.utils.weight_norm, True), (nn.utils.spectral_norm, False), (_pruned, True)]
)
def test_hooks_of_torch_are_part_of_the_computation(wrap, is_model):
    def make() -> nn.Module:
        torch.manual_seed(1)
        wrapped = wrap(nn.Linear(6, 6))
        return wrapped if is_model else Model(block=wrapped)

    model, plain = make(), make()
    model.eval()
    plain.eval()
    stages = ["cpu"] if is_model else ["cpu"] * 2
    with pipe_of(model, devices=stages) as pipe:
        assert pipe(x()).shape == (6, 6)
        for _ in range(2):
            assert_step(pipe, plain, x())
            assert_step(pipe, plain, x(), one_pass=True)
            with torch.no_grad():
                for m in (model, plain):
                    for p in m.parameters():
                        p.sub_(0.1 * p.grad)
        assert pipe.plan.why == ()
