"""The state of optimizers that was there before a pipe moved the parameters follows them. A device is "meta"."""

import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fxpipe.pipe.pipeline_state import OptimizerStateMover

CPU, META = torch.device("cpu"), torch.device("meta")


def _devices(optimizer, parameter):
    return {key: value.device for key, value in optimizer.state[parameter].items()}


@pytest.fixture
def model():
    before = dict(_global_optimizer_pre_hooks)
    yield nn.Linear(3, 2)
    _global_optimizer_pre_hooks.clear()
    _global_optimizer_pre_hooks.update(before)


def _stepped(model, kind):
    optimizer = kind(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _move(model, mover, names=("weight",), before=CPU):
    """As if the parameters had been here, and what is on the CPU were now elsewhere."""
    for name in names:
        mover.note_move(name, before)
        parameter = model.get_parameter(name)
        parameter.grad = None
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(META)))
        parameter.grad = torch.ones_like(parameter)


def test_the_number_of_steps_follows_where_the_device_reads_it(model):
    optimizer, mover = _stepped(model, torch.optim.Adam), OptimizerStateMover(model)
    optimizer.param_groups[0]["capturable"] = True
    _move(model, mover)
    mover.follow(optimizer)
    assert set(_devices(optimizer, model.weight).values()) == {META}


def test_state_that_was_elsewhere_stays(model):
    """Of an optimizer that keeps it on the CPU while the parameters are on a device."""
    optimizer, mover = _stepped(model, torch.optim.AdamW), OptimizerStateMover(model)
    _move(model, mover, before=torch.device("cuda:0"))
    mover.follow(optimizer)
    assert set(_devices(optimizer, model.weight).values()) == {CPU}


def test_state_in_lists_and_dicts_follows(model):
    optimizer, mover = torch.optim.SGD(model.parameters(), lr=0.1), OptimizerStateMover(model)
    numbers = torch.ones(2)
    optimizer.state[model.weight] = {"old": [numbers, (numbers, None)], "deep": {"a": numbers, "n": 3}}
    _move(model, mover)
    mover.follow(optimizer)
    state = optimizer.state[model.weight]
    assert state["old"][0].device == state["old"][1][0].device == state["deep"]["a"].device == META
    assert (state["old"][1][1], state["deep"]["n"]) == (None, 3)


def test_each_move_is_followed_and_each_optimizer_looked_at_once(model):
    optimizers = [_stepped(model, torch.optim.AdamW), _stepped(model, torch.optim.Adagrad)]
    mover = OptimizerStateMover(model)
    _move(model, mover)
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer in mover._seen
    assert _devices(optimizers[0], model.weight) == {"step": CPU, "exp_avg": META, "exp_avg_sq": META}
    optimizers[0].state[model.weight]["exp_avg"] = torch.zeros(2, 3)
    mover.follow(optimizers[0])
    assert _devices(optimizers[0], model.weight)["exp_avg"] == CPU  # of the user's making since
    _move(model, mover, ("bias",))
    optimizers[0].step()
    assert set(_devices(optimizers[0], model.bias).values()) == {CPU, META}


def test_other_models_and_parameters_without_state_are_left_alone(model):
    other = nn.Linear(3, 2)
    optimizer, mover = _stepped(other, torch.optim.AdamW), OptimizerStateMover(model)
    fresh = torch.optim.AdamW(model.parameters())
    _move(model, mover)
    optimizer.step()
    assert {device for p in other.parameters() for device in _devices(optimizer, p).values()} == {CPU}
    mover.follow(fresh)
    assert not fresh.state


def test_the_hook_is_there_from_the_first_move_until_the_pipe_is_closed(model):
    before, mover = len(_global_optimizer_pre_hooks), OptimizerStateMover(model)
    assert len(_global_optimizer_pre_hooks) == before
    _move(model, mover, ("weight", "bias"))
    assert len(_global_optimizer_pre_hooks) == before + 1
    model.zero_grad()
    mover.close()
    assert len(_global_optimizer_pre_hooks) == before


def test_a_step_behind_close_with_gradients_of_before_finds_its_state(model):
    optimizer, mover = _stepped(model, torch.optim.AdamW), OptimizerStateMover(model)
    _move(model, mover)
    mover.close()
    optimizer.step()
    assert _devices(optimizer, model.weight)["exp_avg"] == META


def test_the_hook_goes_with_the_model():
    gc.collect()  # optimizers of other tests have hooks, too
    before, model = len(_global_optimizer_pre_hooks), nn.Linear(3, 2)
    mover = OptimizerStateMover(model)
    _move(model, mover)
    mover.close()  # there are gradients
    assert len(_global_optimizer_pre_hooks) == before + 1
    del model
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before
