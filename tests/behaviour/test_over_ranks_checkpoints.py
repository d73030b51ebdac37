"""Checkpoints of `torch.distributed.checkpoint`: saved from some ranks, training goes on in any number of processes."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.rank_models import MIXED_CUTS, Mixed, token_loss, tokens
from helpers.ranks import Ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fxpipe

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # keys by parameter: no rank needs those of others


def pipe_and_optimizer(devices, stages, seed):
    torch.manual_seed(seed)
    x, _ = tokens(7, 5, 1)
    pipe = fxpipe.pipeline(
        Mixed(0.0),
        devices,
        3,
        example_args=(x,),
        balance=MIXED_CUTS[stages],
        progress=False,
        check=False,
        hardware="cpu",
    )
    return pipe, torch.optim.Adam(pipe.parameters(), 0.01)


def train(pipe, optimizer, seeds):
    losses = []
    for seed in seeds:
        x, t = tokens(7, 5, seed)
        losses.append(pipe.forward_backward(x, target=t, loss_fn=token_loss).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_of(pipe, optimizer):
    return {"model": pipe.state_dict(), "optimizer": get_optimizer_state_dict(pipe, optimizer, options=FLAT)}


def save(mesh, folder):
    pipe, optimizer = pipe_and_optimizer(mesh, mesh.size(), 0)
    train(pipe, optimizer, [1, 2])
    dcp.save(state_of(pipe, optimizer), checkpoint_id=folder)
    return train(pipe, optimizer, [3, 4])


def resumed(pipe, optimizer, folder):
    state = state_of(pipe, optimizer)
    dcp.load(state, checkpoint_id=folder)
    pipe.load_state_dict(state["model"])
    set_optimizer_state_dict(pipe, optimizer, state["optimizer"], options=FLAT)
    return train(pipe, optimizer, [3, 4])


def load(mesh, folder):
    return resumed(*pipe_and_optimizer(mesh, mesh.size(), 5), folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder that two ranks have saved to, and the losses with which they have gone on."""
    folder = str(tmp_path_factory.mktemp("checkpoint") / "two")
    with Ranks(2) as ranks:
        losses = ranks.run(save, folder)
        again = ranks.run(load, folder)
    assert again == losses
    return folder, losses[0]


def test_two_ranks_save_and_four_go_on(checkpoint):
    folder, losses = checkpoint
    with Ranks(4) as ranks:
        assert ranks.run(load, folder) == [losses] * 4


def test_two_ranks_save_and_one_process_goes_on(checkpoint):
    folder, losses = checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that there is no process group
        with pipe_and_optimizer(["cpu"] * 2, 2, 7)[0] as pipe:
            assert resumed(pipe, torch.optim.Adam(pipe.parameters(), 0.01), folder) == losses


def test_two_ranks_save_and_the_plain_model_has_it_all(checkpoint):
    folder, losses = checkpoint
    model = Mixed(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    x, t = tokens(7, 5, 3)
    total = sum(
        token_loss(model(part), target) * len(part) / len(x)
        for part, target in zip(x.tensor_split(3), t.tensor_split(3), strict=True)
    )
    assert total.item() == pytest.approx(losses[0], rel=1e-5)
