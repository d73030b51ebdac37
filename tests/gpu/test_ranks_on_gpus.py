"""A pipe over processes on GPUs: by NCCL where each rank has its own, by memory of the CPU where they share one."""

import contextlib
import functools
import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import Ranks, serve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from fxpipe.errors import DistributedError

QUICK = {"progress": False, "check": False}


@pytest.fixture(scope="module")
def two_ranks_on_gpus():
    on_gpus = functools.partial(serve, backend="cpu:gloo,cuda:nccl", kind="cuda")
    with Ranks(2, multiprocessing.get_context("forkserver"), on_gpus) as ranks:
        yield ranks


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight  # its gradients are summed over the ranks
    return model


def fail(out, target):
    raise ValueError("boom")


def train(pipe, x, is_replica=False):
    """Losses and gradients of steps before and after one that fails; those of replicas accumulate once."""
    with pipe:
        losses = [pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item() for _ in range(3)]
        with pytest.raises((ValueError, DistributedError), match="boom"):
            pipe.forward_backward(x, target=x, loss_fn=fail)
        with pipe.no_sync() if is_replica else contextlib.nullcontext():
            losses.append(pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item())
        losses.append(pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item())
        record = pipe.last_step.reduction if is_replica else pipe.last_step.transport
        return losses, {name: p.grad.cpu() / 5 for name, p in pipe.named_parameters()}, record


def train_on_gpu(mesh):
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    return train(fxpipe.pipeline(make_model(), mesh, 4, example_args=(x,), balance=["1"], **QUICK), x)


def train_replica_on_gpu(mesh):
    """Each rank is a replica."""
    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("data", "pipe"))
    x = torch.linspace(-1, 1, 64).reshape(8, 8).chunk(2)[mesh["data"].get_local_rank()]
    options = QUICK | {"data_parallel": mesh["data"], "example_args": (x,)}
    return train(fxpipe.pipeline(make_model(), mesh["pipe"], 2, **options), x, is_replica=True)


def check_training(ranks, transport, train=train_on_gpu):
    model, x = make_model(), torch.linspace(-1, 1, 64).reshape(8, 8)
    loss = F.mse_loss(model(x), x)
    loss.backward()
    for losses, gradients, record in ranks.run(train):
        assert transport in record
        assert len({*losses}) == 1
        assert losses[0] == pytest.approx(loss.item(), rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="each rank has a GPU of its own")
def test_ranks_that_share_a_gpu_send_through_memory_of_the_cpu(two_ranks_on_gpus):
    check_training(two_ranks_on_gpus, "share one device, which nccl does not allow")


@pytest.mark.multi_gpu
def test_ranks_with_a_gpu_each_send_by_nccl_also_after_a_failure(two_ranks_on_gpus):
    check_training(two_ranks_on_gpus, "nccl")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="each replica has a GPU of its own")
def test_replicas_that_share_a_gpu_sum_gradients_through_memory_of_the_cpu(two_ranks_on_gpus):
    check_training(two_ranks_on_gpus, "replicas 0 and 1 share one device", train_replica_on_gpu)


@pytest.mark.multi_gpu
def test_replicas_with_a_gpu_each_sum_gradients_by_nccl_also_after_a_failure(two_ranks_on_gpus):
    check_training(two_ranks_on_gpus, "nccl", train_replica_on_gpu)
