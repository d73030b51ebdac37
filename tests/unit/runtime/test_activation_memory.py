"""Nothing lives longer than it must: what crosses between stages, graphs, outputs, and the step itself."""

from collections import defaultdict

import pytest
import torch
from helpers.layered import Layered
from helpers.tried_orders import InterleavedExecutor
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxpipe
from fxpipe.rewriting.program import PIPE_INPUT
from fxpipe.runtime.exchange import Exchange
from fxpipe.runtime.run import Run
from fxpipe.scheduling.actions import Action, ActionKind

STAGES, CHUNKS = 3, 5


class Saved(Layered, layers=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(STAGES))):
    """Each stage saves what it receives: a linear layer does, for its weight's gradient."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Unsaved(Layered, weights=lambda: nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(STAGES))):
    """No stage saves what it receives: to add is all they do with it."""

    def forward(self, x):
        for weight in self.weights:
            x = x + weight
        return x


class Once(Layered, one=4, two=4, three=4):
    """`skip` is saved by nobody and used once, two stages later."""

    def forward(self, x):
        skip = self.one(x)
        return self.three(self.two(x) + 1) + skip


@pytest.fixture
def watched(monkeypatch):
    """By user, name and micro-batch the storages that crossed; by action how many of a stage's are alive behind it."""
    crossed, alive = {}, {}
    take, perform = Exchange.take, Run.perform

    def watched_take(self, user, link, i):
        value = take(self, user, link, i)
        if link.value.source != PIPE_INPUT:
            crossed[user, link.value.name, i] = StorageWeakRef(value.value.untyped_storage())
        return value

    def watched_perform(self, action):
        perform(self, action)
        now = defaultdict(set)
        for (user, _, i), storage in crossed.items():
            if not storage.expired():
                now[user].add(i)
        for j, i in self.mini_batches[0].pending:
            now["graphs", j].add(i)
        alive[action] = now

    monkeypatch.setattr(Exchange, "take", watched_take)
    monkeypatch.setattr(Run, "perform", watched_perform)
    return crossed, alive


def pipe_of(model, seed=0, balance=(1,) * STAGES, **options):
    x = torch.randn(10, 4)
    pipe = fxpipe.pipeline(model, ["cpu"] * STAGES, CHUNKS, example_args=(x,), balance=list(balance), **options)
    pipe._fxpipe.engine.executor = InterleavedExecutor(seed)
    return pipe, x


def _loss(y):
    return y.square().mean()


@pytest.mark.parametrize("drop_in", [False, True])
def test_a_value_that_nobody_has_saved_is_freed_by_forward(watched, drop_in):
    crossed, alive = watched
    pipe, x = pipe_of(Unsaved(), checkpoint="never")
    with pipe:
        _loss(pipe(x)).backward() if drop_in else pipe.forward_backward(x, loss_fn=_loss)
    assert {user for user, _, _ in crossed} == {1, 2, 3}
    for j in (1, 2):
        for i in range(CHUNKS):
            assert i not in alive[Action(ActionKind.FORWARD, j, i)][j], f"stage {j} keeps what no one has saved"


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_holds_as_many_micro_batches_as_the_schedule_says(watched, schedule, checkpoint):
    _, alive = watched
    most, graphs = defaultdict(int), defaultdict(int)
    pipe, x = pipe_of(Saved(), schedule=schedule, checkpoint=checkpoint)
    for seed in range(3):
        pipe._fxpipe.engine.executor = InterleavedExecutor(seed)
        pipe.forward_backward(x, loss_fn=_loss)
        for now in alive.values():
            for j in range(STAGES):
                most[j] = max(most[j], len(now[j]))
                graphs[j] = max(graphs[j], len(now["graphs", j]))
        # B of a micro-batch frees what the stage has received of it.
        for action, now in alive.items():
            assert action.kind is not ActionKind.BACKWARD or action.micro_batch not in now[action.stage]
        alive.clear()
    bound = {j: CHUNKS if schedule == "gpipe" else STAGES - j for j in range(STAGES)}
    assert all(most[j] == bound[j] for j in range(1, STAGES)), "those that are forward of their backward, and no more"
    assert graphs == (bound if checkpoint == "never" else dict.fromkeys(range(STAGES), 1))


def test_inputs_are_let_go_by_the_stage_that_uses_them_last(monkeypatch):
    """Parts of an input that is cut along its second dimension are copies of the pipe's own."""
    x, parts = torch.randn(4, 10), []
    init = Exchange.__init__

    def watched_init(self, inputs, *rest):
        parts.extend(StorageWeakRef(part[0].untyped_storage()) for part in inputs.parts)
        init(self, inputs, *rest)

    class Model(Layered, layers=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2))):
        def forward(self, x):
            y = x.t() + 1
            for layer in self.layers:
                y = layer(y)
            return y

    with fxpipe.pipeline(Model(), ["cpu"] * 2, 5, example_args=(x,), in_dims=1, balance=[3, 1]) as pipe:
        pipe._fxpipe.engine.executor = InterleavedExecutor(0)
        monkeypatch.setattr(Exchange, "__init__", watched_init)
        y = pipe(x)
        assert len(parts) == 5
        assert all(storage.expired() for storage in parts)
        assert y.requires_grad, "its backward is still to come"


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_portal_is_freed_with_the_backward_of_its_user(watched, checkpoint):
    crossed, alive = watched
    pipe, x = pipe_of(Once(), checkpoint=checkpoint, balance=[1, 2, 2])
    with pipe:
        assert [(s.name, s.source, s.target) for s in pipe._fxpipe.first.program.skips] == [("one", 0, 2)]
        pipe.forward_backward(x, loss_fn=_loss)
    assert all(i not in alive[Action(ActionKind.BACKWARD, 2, i)][2] for i in range(CHUNKS))
    assert all(storage.expired() for storage in crossed.values()), "the step has left values behind"
