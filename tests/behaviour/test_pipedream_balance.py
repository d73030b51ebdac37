"""Stages that PipeDream's planner cuts and replicates train over ranks as the plain model does."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import accumulate_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
import fxpipe.distributed
from fxpipe.errors import ArgumentError

QUICK = {"progress": False, "example_args": (torch.zeros(8, 6),)}
REPLICATED = {"hardware": "cpu", "balance": "pipedream", "data_parallel": 2, "chunks": 2}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3))


def batches_of(count, sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(b, 6, generator=generator), torch.randn(b, 3, generator=generator)) for b in sizes]
        for _ in range(count)
    ]


def plain_steps(batches, chunks):
    """The plain model on the micro-batches of all mini-batches of a step."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    results = []
    for step in batches:
        parts = (zip(x.tensor_split(chunks), t.tensor_split(chunks), strict=True) for x, t in step)
        accumulate_gradients(model, [*itertools.chain(*parts)], F.mse_loss)
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return results, model.state_dict()


def train(mesh, is_planned):
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    options = {**QUICK, "chunks": 2}
    if is_planned:
        options["plan"] = fxpipe.plan(
            model_of(), devices=["cpu"] * 4, **{**QUICK, "example_args": (torch.zeros(16, 6),)}, **REPLICATED
        )
    else:
        options["balance"] = "pipedream"
    pipe = fxpipe.pipeline(model_of(), square["pipe"], data_parallel=square["data"], **options)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    replica, results = square["data"].get_local_rank(), []
    for step in batches_of(3, (8, 6)):
        x, t = step[replica]
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
        results.append({name: p.grad.clone() for name, p in pipe.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    plan = pipe.plan
    return plan.balance, results, {key: value.clone() for key, value in pipe.state_dict().items()}


@pytest.mark.parametrize("is_planned", [False, True])
def test_replicated_stages_over_a_mesh_train_as_the_plain_model_on_all_mini_batches(four_ranks, is_planned):
    gradients, state = plain_steps(batches_of(3, (8, 6)), 2)
    names: set[str] = set()
    for balance, own, own_state in four_ranks.run(train, is_planned):
        assert balance == "pipedream"
        names |= {*own_state}
        for step, expected in zip(own, gradients, strict=True):
            torch.testing.assert_close(step, {name: expected[name] for name in step})
        torch.testing.assert_close(own_state, {key: state[key] for key in own_state})
    assert names == {*state}


def train_on_a_plan_of_one_replica(mesh):
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    plan = fxpipe.plan(model_of(), 2, balance="pipedream", chunks=2, hardware="cpu", **QUICK)
    with pytest.raises(ArgumentError, match="plan has each stage once, and data_parallel has 2 ranks for each"):
        fxpipe.pipeline(model_of(), square["pipe"], data_parallel=square["data"], plan=plan)


def test_a_plan_for_another_number_of_replicas_is_refused(four_ranks):
    four_ranks.run(train_on_a_plan_of_one_replica)


def test_what_a_plan_with_replicas_needs_is_said():
    model = model_of()
    plan = fxpipe.plan(model, devices=["cpu"] * 4, **QUICK, **REPLICATED)
    assert plan.replicas == (2, 2)
    with pytest.raises(ArgumentError, match=r"devices with 2-2 replicas.* but devices has 2 entries: give 4"):
        fxpipe.pipeline(copy.deepcopy(model), ["cpu", "cpu"], plan=plan)
