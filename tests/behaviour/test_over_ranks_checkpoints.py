"""Checkpoints of `torch.distributed.checkpoint`: saved from some ranks, training goes on in any number of processes."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.oracle import accumulate_gradients
from helpers.rank_models import MIXED_CUTS, Mixed, token_loss, tokens
from helpers.ranks import Ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import fxpipe

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # keys by parameter: no rank needs those of others


def pipe_and_optimizer(devices, stages, seed):
    torch.manual_seed(seed)
    x, _ = tokens(7, 5, 1)
    options = {"balance": MIXED_CUTS[stages], "progress": False, "check": False, "hardware": "cpu"}
    pipe = fxpipe.pipeline(Mixed(0.0), devices, 3, example_args=(x,), **options)
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


def train_plainly(model, optimizer, seeds):
    """Trains the plain model over the same micro-batches."""
    losses = []
    for seed in seeds:
        parts = zip(*(value.tensor_split(3) for value in tokens(7, 5, seed)), strict=True)
        losses.append(accumulate_gradients(model, [*parts], token_loss)[0].item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_two_ranks_save_and_the_plain_model_goes_on(checkpoint):
    folder, losses = checkpoint
    model = Mixed(0.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    assert train_plainly(model, optimizer, [3, 4]) == pytest.approx(losses, rel=1e-4)


def load_on_meta_device(mesh, folder):
    x, _ = tokens(7, 5, 1)
    with torch.device("meta"):
        model = Mixed(0.0)
    options = {"example_args": (x,), "balance": MIXED_CUTS[mesh.size()], "progress": False, "hardware": "cpu"}
    pipe = fxpipe.pipeline(model, mesh, 3, **options)
    fxpipe.distributed.load(pipe, folder, key="model")
    optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
    return resumed(pipe, optimizer, folder)


def save_plainly(folder):
    """Saves what the plain model has after two steps; returns the losses with which it goes on."""
    torch.manual_seed(0)
    model = Mixed(0.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train_plainly(model, optimizer, [1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return train_plainly(model, optimizer, [3, 4])


def test_a_model_on_the_meta_device_goes_on_with_its_optimizer(checkpoint, tmp_path):
    folder, losses = checkpoint
    plain = save_plainly(str(tmp_path / "plain"))
    with Ranks(2) as ranks:
        assert ranks.run(load_on_meta_device, folder) == [losses] * 2
        assert ranks.run(load_on_meta_device, str(tmp_path / "plain")) == [pytest.approx(plain, rel=1e-4)] * 2


# -- While training goes on ------------------------------------------------------------------------------------------


def save_while_training(mesh, folder):
    pipe, optimizer = pipe_and_optimizer(mesh, mesh.size(), 0)
    train(pipe, optimizer, [1, 2])
    saving = dcp.async_save(state_of(pipe, optimizer), checkpoint_id=folder)
    losses = train(pipe, optimizer, [3, 4, 5])
    saving.result()
    return losses[:2]


def test_what_is_saved_while_training_goes_on_is_the_state_at_the_call(checkpoint, tmp_path):
    _, losses = checkpoint
    with Ranks(2) as ranks:
        assert ranks.run(save_while_training, str(tmp_path / "async")) == [losses] * 2
        assert ranks.run(load, str(tmp_path / "async")) == [losses] * 2
