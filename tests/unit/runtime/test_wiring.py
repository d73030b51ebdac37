"""What an action waits for: makers of what it receives, users who send gradients back, and the loss."""

import threading

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import closing
from helpers.tried_orders import InterleavedExecutor
from torch import nn

import fxpipe
from fxpipe.runtime.run import Fences
from fxpipe.runtime.wiring import Wiring, fences_of
from fxpipe.scheduling.actions import Action, ActionKind


class TwoHeads(Layered, near=4, far=4):
    """What the first stage makes only the loss uses, whose gradient comes from no other stage."""

    def forward(self, x, y):
        near = torch.tanh(self.near(x))
        return near, self.far(y)


def _loss(outputs, target):
    near, far = outputs
    return F.mse_loss(near, target) + F.mse_loss(far, target)


def _gradients(executor, schedule="gpipe", reduction="mean"):
    torch.manual_seed(1)
    model = TwoHeads()
    x, y, t = (torch.randn(8, 4) for _ in range(3))
    pipe = fxpipe.pipeline(model, ["cpu", "cpu"], 4, schedule=schedule, balance=["tanh"], example_args=(x, y))
    pipe._fxpipe.engine.executor = executor
    with closing(executor):
        pipe.forward_backward(x, y, target=t, loss_fn=_loss, reduction=reduction)
        found = {name: p.grad for name, p in model.named_parameters()}
        pipe.zero_grad()
    _loss(model(x, y), t).backward()
    return found, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("schedule", "reduction"), [("gpipe", "mean"), ("1f1b", "mean"), ("1f1b", "batch")])
def test_backward_of_a_stage_waits_for_the_loss_that_alone_uses_what_it_made(schedule, reduction):
    for seed in range(6):
        found, want = _gradients(InterleavedExecutor(seed), schedule, reduction)
        for name, gradient in want.items():
            assert found[name] is not None, f"{name} with Interleaved({seed})"
            torch.testing.assert_close(found[name], gradient)


MADE = Action(ActionKind.FORWARD, 0, 2)


@pytest.mark.parametrize("opens", [lambda f: f.passed(None, MADE), lambda f: f.open_all()])
def test_who_waits_goes_on_when_it_opens(opens):
    fences, passed = Fences(), threading.Event()

    def wait():
        fences.wait_behind(MADE)
        passed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not passed.wait(0.05)
    opens(fences)
    assert passed.wait(10)
    thread.join(10)
    fences.wait_behind(MADE)  # for good


def test_nobody_waits_for_actions_of_mini_batches_that_have_ended():
    fences = Fences()
    for action in (MADE, MADE._replace(micro_batch=3)):
        fences.passed(None, action)
    fences.forget(1, range(3))
    thread = threading.Thread(target=fences.wait_behind, args=(MADE,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert (fences._passed, fences._events) == ({MADE._replace(micro_batch=3)}, {})


def test_micro_batches_of_several_programs_wait_for_what_any_of_them_receives():
    first, second, third = ((ActionKind.FORWARD, stage) for stage in range(3))
    one = Wiring((), {}, (), {second: (first,), third: (second,)})
    other = Wiring((), {}, (), {second: (first,), third: (first, second)})
    assert fences_of([one]) == one.before
    assert fences_of([one, other]) == {second: (first,), third: (second, first)}


class Fan(Layered, first=4, parts=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3))):
    """What the first stage makes each of the others uses, and none of them hands anything to another."""

    def forward(self, x):
        h = self.first(x)
        return tuple(part(h) for part in self.parts)


def test_a_gradient_comes_from_the_next_later_user_and_is_waited_for():
    """It goes from user to user, and each adds its own: who begins before the next one has ended loses a part."""
    torch.manual_seed(2)
    model, x = Fan(), torch.randn(8, 4)
    pipe = fxpipe.pipeline(model, ["cpu"] * 4, 2, balance=["first", "parts.0", "parts.1"], example_args=(x,))
    before = pipe._fxpipe.graphs[0][1].wiring.before
    assert (ActionKind.BACKWARD, 2) in before[ActionKind.BACKWARD, 1]
    assert (ActionKind.BACKWARD, 3) in before[ActionKind.BACKWARD, 2]
    assert (ActionKind.BACKWARD, 1) in before[ActionKind.BACKWARD, 0]

    def loss(outputs, target):
        return sum(F.mse_loss(y, target) for y in outputs)

    for seed in range(4):
        pipe._fxpipe.engine.executor = executor = InterleavedExecutor(seed)
        with closing(executor):
            pipe.forward_backward(x, target=x, loss_fn=loss)
        found = {name: p.grad for name, p in model.named_parameters()}
        pipe.zero_grad()
        loss(model(x), x).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.grad, msg=name)
        pipe.zero_grad()
