"""A gradient scaler over processes skips an update on all ranks where a gradient is infinite on one."""

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.ranks import square_mesh
from torch import nn

import fxpipe
from fxpipe.errors import StateError

QUICK = {"progress": False, "check": False, "hardware": "cpu"}


class Overflowing(Layered, gain=lambda: nn.Parameter(torch.ones(4)), first=4, second=4):
    """The gradient of `gain`, in the first stage, is as large as the input; nothing else is."""

    def forward(self, x):
        large = x * self.gain
        return self.second(torch.tanh(self.first(torch.sign(x) + (large - large.detach()))))


def batch_of(step):
    g = torch.Generator().manual_seed(step)
    x, t = torch.randn(8, 4, generator=g), torch.randn(8, 4, generator=g)
    return (x * 3e37 if step in (1, 2, 5) else x), t


def train(model, parameters, run, scaler):
    optimizer = torch.optim.SGD(parameters, 0.1)
    scales, losses = [], []
    for step in range(7):
        optimizer.zero_grad()
        losses.append(run(*batch_of(step)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return torch.stack(losses), scales


def train_on_rank(mesh, is_parallel, loss_kind):
    mesh = square_mesh()
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    replica = mesh["data"].get_local_rank() if is_parallel else 0
    part = slice(4 * replica, 4 * replica + 4) if is_parallel else slice(None)
    data = {"data_parallel": mesh["data"]} if is_parallel else {}
    pipe = fxpipe.pipeline(
        Overflowing(), mesh["pipe"], 2, example_args=(batch_of(0)[0],), balance=["first"], **data, **QUICK
    )

    def loss_fn(out, t):
        return F.mse_loss(out, t) if loss_kind == "mean" else (F.mse_loss(out, t, reduction="sum"), t.numel())

    def run(x, t):
        return pipe.forward_backward(x[part], target=t[part], loss_fn=loss_fn, grad_scaler=scaler)

    losses, scales = train(pipe, pipe.parameters(), run, scaler)
    return losses, scales, {key: value.clone() for key, value in pipe.state_dict().items()}


@pytest.mark.parametrize(("is_parallel", "loss_kind"), [(False, "pair"), (True, "mean"), (True, "pair")])
def test_an_infinite_gradient_on_one_rank_skips_the_update_on_all(four_ranks, is_parallel, loss_kind):
    model, scaler = Overflowing(), torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    def run(x, t):
        loss = F.mse_loss(model(x), t)
        scaler.scale(loss).backward()
        return loss.detach()

    losses, scales = train(model, model.parameters(), run, scaler)
    assert len({*scales}) > 1
    assert model.gain.isfinite().all()
    for own_losses, own_scales, state in four_ranks.run(train_on_rank, is_parallel, loss_kind):
        torch.testing.assert_close(own_losses, losses)
        assert own_scales == scales
        for key, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[key], rtol=1e-4, atol=1e-5)


def differ(mesh):
    mesh = square_mesh()
    x, t = batch_of(0)
    pipe = fxpipe.pipeline(Overflowing(), mesh["pipe"], 2, example_args=(x,), balance=["first"], **QUICK)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + mesh["pipe"].get_local_rank())), None]
    texts = []
    for scaler in scalers if mesh["pipe"].get_local_rank() else reversed(scalers):
        with pytest.raises(StateError) as caught:
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, grad_scaler=scaler)
        texts.append(str(caught.value))
    with pytest.raises(StateError) as caught:
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, grad_scaler=scalers[0])
    assert all(p.grad is None for p in pipe.parameters())
    return [*texts, str(caught.value)]


def test_scalers_that_differ_are_an_error_on_all_ranks(four_ranks):
    for texts in four_ranks.run(differ):
        assert all("grad_scaler differs between ranks" in text for text in texts)
        assert "none" in texts[0]
        assert "scale 16" in texts[2]
        assert "scale 32" in texts[2]
