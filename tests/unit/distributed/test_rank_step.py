"""When a rank waits for packets, and what it holds of those that it has sent."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.rank_models import DENSE_CUTS, Dense
from helpers.ranks import Ranks

import fxpipe
from fxpipe.distributed import rank_engine
from fxpipe.distributed.connection import Connection
from fxpipe.distributed.packets import PacketLink
from fxpipe.distributed.rank_exchange import _last_backwards
from fxpipe.errors import DistributedError
from fxpipe.runtime.mini_batch import MiniBatch
from fxpipe.runtime.run import Run
from fxpipe.scheduling import Action, ActionKind

KINDS = ActionKind.FORWARD, ActionKind.BACKWARD


def packets_on_their_way(mesh):
    """The most packets of values, and of gradients, that this rank holds."""
    held = []
    send = Connection.send

    def watched(self, key, *arguments):
        send(self, key, *arguments)
        held.append([sum(kind in one for one in self._sends) for kind in KINDS])

    Connection.send = watched
    try:
        torch.manual_seed(0)
        x, t = torch.randn(16, 4), torch.randn(16, 4)
        pipe = fxpipe.pipeline(Dense(), mesh, 16, example_args=(x,), balance=DENSE_CUTS[2], progress=False)
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
    finally:
        Connection.send = send
    return tuple(map(max, zip(*held, strict=True)))


def order_of_recomputation(mesh):
    """The actions of this rank, and the packets that it waits for, in order."""
    events, receive, perform = [], PacketLink.receive, Run.perform
    PacketLink.receive = lambda link, maker: events.append(f"{maker} comes") or receive(link, maker)
    Run.perform = lambda step, action: events.append(str(action)) or perform(step, action)
    try:
        x = torch.randn(2, 4)
        pipe = fxpipe.pipeline(
            Dense(), mesh, 1, example_args=(x,), balance=DENSE_CUTS[2], checkpoint="always", progress=False
        )
        pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    finally:
        PacketLink.receive, Run.perform = receive, perform
    return events


def test_gradients_and_values_are_given_back_when_they_were_taken_and_recomputation_waits_for_none():
    with Ranks(2) as ranks:
        values, gradients = ranks.run(packets_on_their_way)
        first, last = ranks.run(order_of_recomputation)
    assert values == (2, 0)
    assert gradients == (0, 2)  # of 16
    assert first == ["0F0", "0R0", "1B0 comes", "0B0"]
    assert last == ["0F0 comes", "1F0", "1R0", "1B0"]


def forgetting(*_):
    raise KeyboardInterrupt


def one_rank_alone_remembers_layouts(mesh):
    torch.manual_seed(0)
    x, model, rank = torch.randn(4, 4), Dense(), mesh.get_local_rank()
    pipe = fxpipe.pipeline(
        model, mesh, 2, example_args=(x,), balance=DENSE_CUTS[2], progress=False, hardware="cpu", timeout=20.0
    )
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # rank 0 has sent what this one does not receive
            patch.setattr(PacketLink, "receive", forgetting)
        with pytest.raises((KeyboardInterrupt, DistributedError)):
            pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return pipe.forward_backward(x, target=x, loss_fn=F.mse_loss), F.mse_loss(model(x), x).detach()


def many_sizes(mesh):
    """Layouts of many sizes on three ranks, of which the middle one has the most."""
    torch.manual_seed(0)
    model, losses, expected = Dense(), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_engine, "MAX_MICRO_BATCHES", 6)
        pipe = fxpipe.pipeline(
            model, mesh, 2, example_args=(torch.randn(4, 4),), balance=DENSE_CUTS[4], progress=False, hardware="cpu"
        )
        for size in (4, 6, 8, 4, 6, 8, 4):
            x = torch.randn(size, 4)
            losses.append(pipe.forward_backward(x, target=x, loss_fn=F.mse_loss))
            expected.append(F.mse_loss(model(x), x).detach())
    return losses, expected


def test_layouts_are_forgotten_by_all_ranks_in_the_same_step(four_ranks):
    for losses, expected in four_ranks.run(many_sizes):
        torch.testing.assert_close(losses, expected)


def test_layouts_that_one_rank_alone_remembers_are_forgotten_by_all(two_ranks):
    for loss, expected in two_ranks.run(one_rank_alone_remembers_layouts):
        torch.testing.assert_close(loss, expected)


def alive_after_a_failure(mesh):
    """The mini-batches of a step that fails on the last rank: how many there were, and how many live afterwards."""
    opened, fails, init = [], [], MiniBatch.__init__

    def watched(self, *arguments, **more):
        init(self, *arguments, **more)
        opened.append(weakref.ref(self))

    def loss_fn(y, t):
        if fails:
            raise ArithmeticError
        return F.mse_loss(y, t)

    x = torch.randn(4, 4)
    pipe = fxpipe.pipeline(Dense(), mesh, 2, example_args=(x,), balance=DENSE_CUTS[2], progress=False)
    pipe.forward_backward(x, target=x, loss_fn=loss_fn)
    gc.collect()
    gc.disable()
    MiniBatch.__init__ = watched
    fails.append(True)
    try:
        with contextlib.suppress(DistributedError, ArithmeticError):
            pipe.forward_backward(x, target=x, loss_fn=loss_fn)
        return len(opened), sum(ref() is not None for ref in opened)
    finally:
        MiniBatch.__init__ = init
        gc.enable()


def test_no_rank_holds_a_step_that_has_failed(two_ranks):
    """Not even until the garbage collector runs, also where another rank has failed."""
    assert two_ranks.run(alive_after_a_failure) == [(1, 0), (1, 0)]


def test_a_gradient_is_complete_after_the_last_weight_gradients_if_the_last_backward_computes_some():
    def last(text):
        return sorted(map(str, _last_backwards(tuple(map(Action.parse, text.split())))))

    assert last("0F0 0F1 0B0 0B1") == ["0B1"]
    assert last("0F0 0F1 0B0 0B1 0W0 0W1") == ["0B1", "0W1"]  # B completes what W does not compute
    assert last("0F0 0F1 0B0 0B1 0W0") == ["0W0"]  # B of micro-batch 1 computes all, to which W adds
