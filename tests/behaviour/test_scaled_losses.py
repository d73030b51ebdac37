"""`forward_backward` in a training loop: with a scaler, with outputs, over several steps, in half precision."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state, train_step
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentTypeError

BATCH, CHUNKS = 7, 3


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def pair(model: nn.Module | None = None, **options: Any) -> tuple[Any, nn.Module]:
    plain = model or model_of()
    return fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], CHUNKS, **options), plain


def batch_of() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 6), torch.randn(BATCH, 4)


def plain_step(model, x, target, loss_fn=F.mse_loss):
    """The gradients of a mini-batch are summed before they are added to those that are there."""
    before = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = train_step(model, (x,), {}, target, loss_fn, chunks=CHUNKS, order="1f1b", seed=0, batch=BATCH)
    for p, gradient in zip(model.parameters(), before, strict=True):
        p.grad = p.grad if gradient is None else gradient + p.grad
    return loss


# -- a loop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "to_none"), [(torch.optim.SGD, False), (torch.optim.Adam, True)])
def test_steps_with_accumulation_are_those_of_the_plain_model(make, to_none):
    """Bit for bit: four steps of an optimizer, each from three mini-batches."""
    pipe, plain = pair()
    optimizers = [make(m.parameters(), lr=0.05) for m in (pipe, plain)]
    with pipe:
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
            for _ in range(3):
                x, target = batch_of()
                want = plain_step(plain, x, target)
                have = pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
                torch.testing.assert_close(have, want)
            assert_same_gradients(pipe, plain)
            for optimizer in optimizers:
                optimizer.step()
            assert_same_state(pipe, plain)


# -- the outputs -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Made:
    logits: torch.Tensor
    loss: torch.Tensor
    extra: Any


class Structured(Layered, a=(6, 8), b=(8, 4)):
    def forward(self, x):
        h = self.a(x).tanh()
        y = self.b(h)
        return Made(y, y.square().mean(), {"h": (h, h), "none": None, "n": 3, "ids": y.argmax(1)})


def test_outputs_are_those_of_the_drop_in():
    pipe, plain = pair(Structured())
    with pipe:
        for batch in (BATCH, 6, 2, 1):
            x, target = torch.randn(batch, 6), torch.randn(batch, 4)
            for _ in range(2):  # verified, and not
                loss, out = pipe.forward_backward(
                    x, target=target, loss_fn=lambda o, t: F.mse_loss(o.logits, t), return_outputs=True
                )
                want, dropped = plain(x), pipe(x)
                assert type(out) is Made
                assert torch.equal(out.logits, dropped.logits)
                assert torch.equal(out.loss, dropped.loss)
                torch.testing.assert_close(out.logits, want.logits)
                torch.testing.assert_close(out.loss, want.loss)
                assert [type(v) for v in out.extra.values()] == [tuple, type(None), int, torch.Tensor]
                torch.testing.assert_close(out.extra["h"], want.extra["h"])
                assert torch.equal(out.extra["ids"], want.extra["ids"])
                assert not any(t.requires_grad for t in (loss, out.logits, out.loss, *out.extra["h"]))
                torch.testing.assert_close(loss, F.mse_loss(want.logits, target))


# -- scalers ---------------------------------------------------------------------------------------------------------


def scaler_of(device_type: str = "cpu") -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device_type, init_scale=2.0**10, growth_interval=2)


def test_gradients_of_parameters_of_the_loss_and_of_inputs_are_scaled_and_the_loss_is_not():
    pipe, plain = pair()
    scaler, head = scaler_of(), nn.Linear(4, 4)
    x, target = batch_of()
    x.requires_grad_()
    with pipe:
        loss = F.mse_loss(head(plain(x)), target)
        want = torch.autograd.grad(loss, [x, head.weight])
        have = pipe.forward_backward(x, target=target, loss_fn=lambda y, t: F.mse_loss(head(y), t), grad_scaler=scaler)
        torch.testing.assert_close(have, loss.detach())
        for gradient, scaled in zip(want, (x.grad, head.weight.grad), strict=True):
            torch.testing.assert_close(scaled, gradient * 2.0**10)


def _pairs(y, t):
    return (y - t).pow(2).sum(), t.numel()


def _sum(y, t):
    return (y - t).pow(2).sum()


@pytest.mark.parametrize(
    ("devices", "dtype", "ours", "theirs", "reduction"),
    [
        (["cpu", "cpu"], None, F.mse_loss, F.mse_loss, "mean"),
        (["cpu", "cpu"], torch.float16, F.mse_loss, F.mse_loss, "mean"),
        (["cpu", "cpu"], torch.float16, _pairs, F.mse_loss, "mean"),
        (["cpu", "cpu"], torch.bfloat16, _sum, _sum, "sum"),
        pytest.param(["cuda:0", "cuda:0"], torch.float16, _pairs, F.mse_loss, "mean", marks=pytest.mark.cuda),
        pytest.param(["cpu", "cuda:0"], torch.float16, _pairs, F.mse_loss, "mean", marks=pytest.mark.cuda),
    ],
)
def test_steps_with_a_scaler_are_those_of_the_plain_model(devices, dtype, ours, theirs, reduction):
    """With autocast; the third of six steps overflows, is skipped, and halves the scale."""
    plain, device_type = model_of(), torch.device(devices[-1]).type
    pipe = fxpipe.pipeline(copy.deepcopy(plain), devices, CHUNKS)
    plain.to(device_type)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (pipe, plain)]
    scalers = [scaler_of(device_type), scaler_of(device_type)]
    scales = []
    with pipe:
        for step in range(6):
            x, target = (t.to(device_type) for t in batch_of())
            if step == 2:
                x[0, 0] = torch.inf
            before = [p.clone() for p in pipe.parameters()]
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast(device_type, dtype or torch.bfloat16, enabled=dtype is not None):
                want = theirs(plain(x), target)
                have, out = pipe.forward_backward(
                    x, target=target, loss_fn=ours, reduction=reduction, grad_scaler=scalers[0], return_outputs=True
                )
            assert out.device.type == have.device.type == device_type
            scalers[1].scale(want).backward()
            close = {"rtol": 1e-4, "atol": 1e-5} if dtype is None else {"rtol": 3e-2, "atol": 3e-2}
            torch.testing.assert_close(have, want.detach(), equal_nan=True, **close)
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            scales.append(scalers[0].get_scale())
            for p, q, b in zip(pipe.parameters(), plain.parameters(), before, strict=True):
                torch.testing.assert_close(p.cpu(), q.cpu(), **close)
                assert torch.equal(p.cpu(), b.cpu()) == (step == 2)
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11, 2.0**11]


def test_a_scaler_that_is_off_and_one_that_is_none():
    pipe, plain = pair()
    x, target = batch_of()
    with pipe:
        plain_step(plain, x, target)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        pipe.forward_backward(x, target=target, loss_fn=F.mse_loss, grad_scaler=scaler)
        assert_same_gradients(pipe, plain)
        with pytest.raises(ArgumentTypeError, match=r"grad_scaler is a float; expected a torch\.amp\.GradScaler"):
            pipe.forward_backward(x, target=target, loss_fn=F.mse_loss, grad_scaler=1024.0)
