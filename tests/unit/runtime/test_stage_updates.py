"""Updates within a step, in whatever order the fences allow: weights change when all that reads them has ended."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.tried_orders import InterleavedExecutor
from torch import nn

import fxpipe
from fxpipe.runtime.stage_updates import actions_before_updates, update_rows
from fxpipe.scheduling import make_schedule, validate, with_updates


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


def _trained(schedule, seed=None):
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(6, 4)
    options = {"balance": ["a", "b"], "example_args": (x,), "hardware": "cpu", "progress": False, "check": False}
    with fxpipe.pipeline(model, ["cpu"] * 3, 3, schedule=schedule, **options) as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.5, momentum=0.9, overlap=seed is not None)
        usual = pipe._fxpipe.engine.executor
        if seed is not None:
            pipe._fxpipe.engine.executor = InterleavedExecutor(seed)
        for _ in range(3):
            pipe.forward_backward(x, target=x, loss_fn=F.mse_loss, optimizer=optimizer)
        usual.close()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_in_whatever_order_a_step_with_updates_has_the_same_bits(schedule):
    want = _trained(schedule)
    for seed in range(6):
        for name, value in _trained(schedule, seed).items():
            assert torch.equal(value, want[name]), (name, seed)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble", "zbv", "interleaved_1f1b"])
def test_schedules_with_updates_run(name):
    schedule = with_updates(make_schedule(name, 4, 3))
    validate(schedule)
    assert sorted(str(a) for row in schedule.rows for a in row if str(a.kind) == "U") == ["0U2", "1U2", "2U2", "3U2"]
    for row in schedule.rows:
        kinds = "".join(str(action.kind) for action in row)
        assert kinds.rstrip("U").count("U") == 0


def test_an_update_waits_for_the_stages_that_share_its_weights_and_for_the_last_loss():
    shared, own, others = (torch.ones(1) for _ in range(3))
    schedule = make_schedule("zero_bubble", 3, 2)
    users = {id(shared): {0, 2}, id(own): {0}, id(others): {1}}
    parameters = {0: [shared, own], 1: [others]}
    before = actions_before_updates(schedule, parameters, users)
    losses = {"2F0", "2F1"}
    assert {*map(str, before[0])} == losses | {"2B0", "2B1", "2W0", "2W1"}
    assert {*map(str, before[1])} == losses
    assert {*map(str, before[2])} == losses
    assert [*map(str, update_rows([2, 0], (0, 1, 0), 4)[0])] == ["0U4", "2U4"]
