"""A `StageOptimizer` on simulated devices: each stage on its device's stream, and nothing that is not ordered."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.optim import StageOptimizer

pytestmark = pytest.mark.simulated
DEVICES = ["sim:1", "cpu", "sim:0"]
KINDS = {
    "AdamW": {"lr": 1e-2},
    "one by one": {"lr": 1e-2, "foreach": False, "amsgrad": True},
    "lr as a tensor": {"lr": torch.tensor(1e-2), "foreach": False},
}


class Net(nn.Module):
    """The last layer has the weight of the first, on another device."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


def _weighted(y, t):
    weights = (t > 0).float()
    return ((y - t) ** 2 * weights).sum(), weights.sum()


@pytest.mark.parametrize(
    ("kind", "overlap", "schedule"),
    [
        ("AdamW", True, "1f1b"),
        ("AdamW", False, "zero_bubble"),
        ("one by one", False, "1f1b"),
        ("one by one", True, "zero_bubble"),
        ("lr as a tensor", True, "zero_bubble"),
        ("lr as a tensor", False, "1f1b"),
    ],
)
def test_steps_come_to_the_weights_of_the_plain_optimizer(kind, overlap, schedule):
    torch.manual_seed(7)
    plain = Net()
    model = copy.deepcopy(plain)
    want = torch.optim.AdamW(plain.parameters(), **copy.deepcopy(KINDS[kind]))
    with fxpipe.pipeline(model, DEVICES, 3, schedule=schedule, balance=["a", "b"]) as pipe:
        have = StageOptimizer(pipe, torch.optim.AdamW, overlap=overlap, **copy.deepcopy(KINDS[kind]))
        for k in range(4):  # the first one plans, and moves the parameters
            x, t = torch.randn(6, 6), torch.randn(6, 6)
            if k == 2:
                have.load_state_dict(copy.deepcopy(want.state_dict()))
            pipe.forward_backward(x, target=t, loss_fn=_weighted, optimizer=have)
            total, weight = _weighted(plain(x), t)
            (total / weight).backward()
            want.step()
            want.zero_grad()
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.detach().cpu(), one.detach(), msg=name, rtol=1e-3, atol=1e-4)
            assert have.state[other]["exp_avg"].device == other.device
        assert {parameter.device.type for parameter in model.parameters()} == {"sim", "cpu"}
        assert sorted(str(s.action) for s in pipe.last_step.spans if str(s.action.kind) == "U") == ["0U2", "1U2", "2U2"]


def test_clipping_by_the_norm_of_all_devices_stands_between_backward_and_step():
    torch.manual_seed(7)
    plain = Net()
    model, x, t = copy.deepcopy(plain), torch.randn(6, 6), torch.randn(6, 6)
    want = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with fxpipe.pipeline(model, DEVICES, 3, example_args=(x,), balance=["a", "b"]) as pipe:
        have = StageOptimizer(pipe, torch.optim.SGD, lr=0.1, momentum=0.9)
        for _ in range(2):
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
            F.mse_loss(plain(x), t).backward()
            norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1).cpu() for one in (plain, pipe)]
            torch.testing.assert_close(*norms)
            for optimizer in (want, have):
                optimizer.step()
                optimizer.zero_grad()
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.detach().cpu(), one.detach(), msg=name)
