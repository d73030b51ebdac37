"""A `StageOptimizer` that overlaps updates each stage within the step, to the bits of the plain optimizer behind it."""

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.optimized_model import CHUNKS, assert_same_training, batches, model_of, piped
from torch.optim import lr_scheduler

from fxpipe.errors import ArgumentError, ArgumentTypeError, LossError, StateError
from fxpipe.optim import StageOptimizer


def adam(pipe, **options):
    return StageOptimizer(pipe, torch.optim.Adam, lr=1e-2, overlap=True, **options)


def plain_step(plain, want, x, t, loss_fn=F.mse_loss):
    loss = oracle.train_step(plain, (x,), {}, t, loss_fn, chunks=CHUNKS, order="1f1b", seed=0, batch=len(x))
    want.step()
    want.zero_grad()
    return loss


def updates_of(record):
    return [str(span.action) for span in record.spans if span.action.kind.value == "U"]


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_come_to_the_weights_and_state_of_the_plain_optimizer(overlap):
    plain = model_of()
    model, want = copy.deepcopy(plain), torch.optim.Adam(plain.parameters(), lr=1e-2)
    with piped(model) as pipe:
        have = StageOptimizer(pipe, torch.optim.Adam, lr=1e-2, overlap=overlap)
        schedulers = [lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (want, have)]
        for x, t in batches(4):
            loss = pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, optimizer=have)
            assert sorted(updates_of(pipe.last_step)) == ["0U2", "1U2"]
            have.step()  # has nothing left to do
            assert loss == plain_step(plain, want, x, t)
            for scheduler in schedulers:
                scheduler.step()
        assert_same_training(plain, want, model, have)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (3, {"schedule": "gpipe"}),
        (3, {"checkpoint": "always"}),
        (2, {"schedule": "zero_bubble"}),
        (2, {"schedule": "interleaved_1f1b", "stages_per_device": 2, "balance": ["a", "b", "norm"]}),
        (2, {"schedule": "zbv", "balance": ["a", "b", "norm"]}),
    ],
    ids=["one", "gpipe", "recompute", "zero bubble", "interleaved", "zbv"],
)
def test_weights_of_several_stages_change_when_all_have_gone_back(devices, options):
    """A view of a weight that is updated too early has another version than autograd has saved."""
    plain = model_of(is_tied=True)
    model, want = copy.deepcopy(plain), torch.optim.Adam(plain.parameters(), lr=1e-2)
    with piped(model, devices, **options) as pipe:
        have = adam(pipe)
        for x, t in batches(5):
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, optimizer=have)
            plain_step(plain, want, x, t)
        assert len(updates_of(pipe.last_step)) == len(pipe.plan.stages)
        assert_same_training(plain, want, model, have, loose=True)  # sums over stages, and the order of backward


def test_gradients_of_steps_before_it_and_micro_batches_and_weighted_losses_count():
    def mean_of_tokens(y, t):
        weights = (t > 0).float()
        return ((y - t) ** 2 * weights).sum(), weights.sum()

    plain = model_of()
    model, want = copy.deepcopy(plain), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with piped(model) as pipe:
        have = StageOptimizer(pipe, torch.optim.SGD, lr=0.1, momentum=0.9, overlap=True)
        for x, t in batches(3):
            pipe.forward_backward(x, target=t, loss_fn=mean_of_tokens)
            pipe.forward_backward(
                micro_batches=[(x[:2], t[:2]), (x[2:], t[2:])], loss_fn=mean_of_tokens, optimizer=have
            )
            for _ in range(2):
                total, weight = mean_of_tokens(plain(x), t)
                (total / weight).backward()
            want.step()
            want.zero_grad()
            assert updates_of(pipe.last_step) == ["1U1", "0U1"] or updates_of(pipe.last_step) == ["0U1", "1U1"]
        assert_same_training(plain, want, model, have, loose=True)


def test_what_the_optimizer_does_not_hold_has_its_gradient_and_hooks_fire_once():
    model, seen = model_of(), []
    with piped(model) as pipe:
        have = adam(pipe, param_groups=lambda name, p: None if name.startswith("b.") else {})
        model.a.weight.register_hook(lambda gradient: seen.append("a") or gradient * 0)
        model.c.weight.register_post_accumulate_grad_hook(lambda p: seen.append("c"))
        for k, (x, t) in enumerate(batches(3)):
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, optimizer=have)
            assert sorted(seen) == ["a", "c"] * (k + 1) or sorted(seen) == ["a"] * (k + 1) + ["c"] * (k + 1)
            assert {name for name, p in model.named_parameters() if p.grad is not None} == {"b.weight", "b.bias"}
        assert torch.equal(model.a.weight, model_of().a.weight)
        assert not torch.equal(model.a.bias, model_of().a.bias)


def test_a_step_that_fails_says_what_has_been_updated():
    model, (first,), (second,) = model_of(), batches(1), batches(1, seed=2)  # another size is verified, then updated
    with piped(model) as pipe:
        have = adam(pipe)
        pipe.forward_backward(first[0], target=first[1], loss_fn=F.mse_loss, optimizer=have)
        before = copy.deepcopy(model.state_dict())

        def fail(gradient):
            deadline = time.monotonic() + 20
            while torch.equal(model.head.weight, before["head.weight"]) and time.monotonic() < deadline:
                time.sleep(0.001)
            raise RuntimeError("not this one")

        handle = model.a.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="not this one") as caught:
            pipe.forward_backward(second[0], target=second[1], loss_fn=F.mse_loss, optimizer=have)
        handle.remove()
        assert "fxpipe: stage 0 of 2 on cpu, micro-batch 2, update" in caught.value.__notes__
        assert caught.value.__notes__[-1].endswith(
            "had updated the weights of stage 1 by then; those of others are as before the step"
        )
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        assert changed == {"b.weight", "b.bias", "norm.weight", "norm.bias", "c.weight", "c.bias", "head.weight"}
        pipe.forward_backward(second[0], target=second[1], loss_fn=F.mse_loss, optimizer=have)


def test_padding_that_comes_later_is_an_error_that_says_so():
    """It is no reason to run the step again to be sure: the weights are no longer those of the step."""
    called = []

    def mean(y, t):
        called.append(len(y))
        return (y - t)[t > 0].square().mean()

    with piped(model_of()) as pipe:
        have = adam(pipe)
        x, t = torch.randn(6, 4), torch.rand(6, 6) + 0.1
        for _ in range(2):
            pipe.forward_backward(x, target=t, loss_fn=mean, optimizer=have)
        t[:2, :4] = -1
        called.clear()
        with pytest.raises(LossError) as caught:
            pipe.forward_backward(x, target=t, loss_fn=mean, optimizer=have)
        assert "had updated the weights of stages 0, 1" in caught.value.__notes__[-1]
        assert called == [2, 2, 2]
        with pytest.raises(LossError) as caught:
            pipe.forward_backward(x, target=t, loss_fn=mean)
        assert not hasattr(caught.value, "__notes__")


def test_what_needs_all_gradients_first_is_refused():
    model, (x, t) = model_of(), batches(1)[0]
    with piped(model) as pipe, piped(model_of()) as other:
        have = adam(pipe)

        def step(optimizer=have, loss_fn=F.mse_loss, **more):
            return pipe.forward_backward(x, target=t, loss_fn=loss_fn, optimizer=optimizer, **more)

        handle = have.register_step_pre_hook(lambda *given: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        with pytest.raises(StateError, match=r"hooks \(register_step_pre_hook\).*with overlap=True"):
            step()
        handle.remove()
        with pytest.raises(ArgumentError, match="a scaler looks at the gradients of all stages"):
            step(grad_scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(ArgumentError, match="optimizer is of another pipe"):
            step(adam(other))
        with pytest.raises(ArgumentTypeError, match=r"optimizer is an Adam; expected a fxpipe\.optim\.StageOptimizer"):
            step(torch.optim.Adam(model.parameters()))
        with pytest.raises(ArgumentTypeError, match="overlap=1: expected True or False"):
            StageOptimizer(pipe, torch.optim.SGD, lr=0.1, overlap=1)
        for _ in range(2):  # the first one verifies its loss, the second would overlap
            with pytest.raises(LossError, match="loss_fn reads parameters of the model themselves"):
                step(loss_fn=lambda y, t: F.mse_loss(y, t) + model.a.weight.square().mean())
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), model_of().parameters(), strict=True))
        step()
