"""A model that is on the CPU while it is planned is recorded where its stages will run."""

import copy
import functools
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from torch import nn

import fxpipe

pytestmark = pytest.mark.simulated

DEVICES = ["sim:0", "sim:1"]


@functools.cache
def only_here() -> Any:
    """An operation that the CPU lacks. Made in a session that has the device, whose name torch knows there alone."""

    @torch.library.custom_op("fxpipe_tests::only_here", mutates_args=(), device_types="sim")
    def operation(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    operation.register_fake(torch.empty_like)
    operation.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return operation


class WithKernel(Layered, first=6, second=(6, 3), norm=lambda: nn.BatchNorm1d(6)):
    """A model with an operation that the CPU lacks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(only_here()(self.first(x))))


class ByDevice(Layered, first=6, second=(6, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h.sin() if h.device.type == "sim" else h.cos())


class Accumulates(Layered, first=6, second=(6, 3), rows=lambda: torch.tensor([0, 2, 4])):
    """Makes a tensor of the dtype that autocast gives, which is another one than on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        total = torch.zeros(x.shape[0], 6, dtype=h.dtype, device=h.device)
        return self.second(total.index_add(1, self.rows, h[:, :3]))


def _same(pipe: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    """One step with gradients, in micro-batches of three samples."""
    loss = pipe.forward_backward(x, loss_fn=lambda out: out.float().square().mean())
    parts = x.to("sim:0").split(3)
    losses = [plain(part).float().square().mean() / len(parts) for part in parts]
    for part in losses:
        part.backward()
    torch.testing.assert_close(loss.cpu(), sum(losses).detach().cpu())
    for (name, p), q in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu(), msg=name)


@pytest.mark.parametrize("make", [WithKernel, ByDevice])
def test_what_forward_does_on_a_device_is_what_is_recorded(simulated, make):
    model = make()
    plain, x = copy.deepcopy(model).to("sim:0"), torch.randn(6, 6)
    with fxpipe.pipeline(model, DEVICES, 2, example_args=(x,)) as pipe:
        for seed in range(2):
            torch.manual_seed(seed)
            _same(pipe, plain, torch.randn(6, 6))
        pipe.eval(), plain.eval()  # another graph, while gradients are there
        with torch.no_grad():
            torch.testing.assert_close(pipe(x).cpu(), plain(x.to("sim:0")).cpu())


def test_autocast_of_the_device_is_that_of_the_recording(simulated):
    model = Accumulates()
    plain, x = copy.deepcopy(model).to("sim:0"), torch.randn(6, 6)
    with torch.autocast("sim", dtype=torch.bfloat16), fxpipe.pipeline(model, DEVICES, 2, example_args=(x,)) as pipe:
        assert all(p.dtype == torch.float32 for p in pipe.parameters())
        out = pipe(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.cpu(), plain(x.to("sim:0")).cpu())
        out.float().square().mean().backward()
        plain(x.to("sim:0")).float().square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad.cpu(), atol=1e-2, rtol=1e-2)
