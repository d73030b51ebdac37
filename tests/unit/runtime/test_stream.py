"""Streams come to the same bits in whatever order workers come to their actions, and hold no more than they need."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.tried_orders import InterleavedExecutor, JitteredExecutor
from torch import nn

import fxpipe
from fxpipe.optim import StageOptimizer
from fxpipe.runtime import ThreadedExecutor
from fxpipe.runtime.stream import StageWeights

WIDTH, STAGES = 4, 3
QUICK = {"progress": False, "check": False, "hardware": "cpu"}


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(STAGES)))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, WIDTH, generator=generator), torch.randn(6, WIDTH, generator=generator)) for _ in range(count)
    ]


def piped(schedule, chunks="auto"):
    return fxpipe.pipeline(
        model(), ["cpu"] * STAGES, chunks, schedule=schedule, balance=["0", "1"], example_args=(torch.ones(6, WIDTH),),
        **QUICK,
    )  # fmt: skip


@pytest.mark.parametrize(("schedule", "chunks"), [("pipedream", 1), ("pipedream_2bw", 3)])
def test_the_order_of_workers_makes_no_difference(schedule, chunks):
    cpus = [torch.device("cpu")] * STAGES
    executors = [JitteredExecutor(cpus, 1), *map(InterleavedExecutor, range(3)), ThreadedExecutor(cpus)]
    results = []
    for executor in executors:
        with oracle.closing(piped(schedule, chunks)) as pipe:
            pipe._fxpipe.engine.executor.close()
            pipe._fxpipe.engine.executor = executor
            torch.manual_seed(3)
            optimizer = StageOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
            stream = pipe.train_stream(batches(6), loss_fn=F.mse_loss, optimizer=optimizer)
            results.append([*stream, *(parameter.detach() for parameter in pipe.parameters())])
    for other in results[1:]:
        assert all(torch.equal(have, want) for have, want in zip(other, results[0], strict=True))


def test_a_stream_that_has_ended_holds_nothing():
    with oracle.closing(piped("pipedream")) as pipe:
        data = batches(5)
        inputs = [weakref.ref(x) for x, _ in data]
        optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        stream = pipe.train_stream(iter(data), loss_fn=F.mse_loss, optimizer=optimizer)
        assert len(list(stream)) == len(data)
        del data, stream
        gc.collect()
        assert all(ref() is None for ref in inputs)


def test_an_update_writes_elsewhere_only_while_an_older_version_is_needed():
    p = nn.Parameter(torch.ones(3))
    weights, memory = StageWeights({"p": p}), p.data_ptr()
    first = weights.at(0)[id(p)]
    weights.begin_update(1)  # nobody needs version 0 any more
    with torch.no_grad():
        p.mul_(2)
    weights.end_update()
    assert p.data_ptr() == memory
    assert first[0] == 2
    view = weights.at(1)[id(p)]
    loss = (view * view).sum()
    weights.begin_update(1)
    with torch.no_grad():
        p.mul_(2)
    weights.end_update()
    assert p.data_ptr() != memory
    loss.backward()  # what it has saved is as it was
    assert torch.equal(view.grad, torch.full((3,), 4.0))
    assert torch.equal(weights.at(1)[id(p)], torch.full((3,), 2.0))
    assert torch.equal(weights.at(2)[id(p)], torch.full((3,), 4.0))
    assert weights.most_held == 2


def test_an_interrupt_while_a_mini_batch_is_read_drops_the_stream_and_leaves_a_pipe_that_trains():
    def source():
        yield from batches(4)
        raise KeyboardInterrupt

    with oracle.closing(piped("pipedream")) as pipe:
        optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        with pytest.raises(KeyboardInterrupt):
            list(pipe.train_stream(source(), loss_fn=F.mse_loss, optimizer=optimizer))
        stream = pipe.train_stream(batches(4), loss_fn=F.mse_loss, optimizer=optimizer)
        assert len(list(stream)) == 4
        assert stream.applied == (4,) * STAGES


def test_gradients_from_before_count_in_the_first_update_and_inputs_get_theirs():
    """As of an optimizer that steps without zero_grad; an input that requires grad has its gradient behind its loss."""
    x, t = batches(1)[0]
    with oracle.closing(piped("pipedream")) as pipe:
        pipe.eval()
        bias = pipe.get_parameter("0.0.bias")
        before = bias.detach().clone()
        bias.grad = torch.ones_like(bias)
        plain = nn.Sequential(*(nn.Sequential(part[0], part[1]) for part in fxpipe.unwrap(pipe)))
        want = torch.autograd.grad(F.mse_loss(plain(x), t), bias)[0]
        x.requires_grad_()
        optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=1.0)
        list(pipe.train_stream([(x, t)], loss_fn=F.mse_loss, optimizer=optimizer))
        torch.testing.assert_close(bias.detach(), before - 1 - want)
        assert x.grad is not None
