"""Stages whose replicas take micro-batches in turn train as the plain model does; updates wait for all readers."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import accumulate_gradients, closing
from helpers.plan_hardware import hardware, narrow_then_wide
from helpers.tried_orders import InterleavedExecutor, JitteredExecutor
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.cluster import Link
from fxpipe.errors import StateError
from fxpipe.optim import StageOptimizer
from fxpipe.runtime.bound_program import StageReplica
from fxpipe.runtime.stage_updates import actions_before_updates, update_rows
from fxpipe.scheduling import make_schedule

QUICK = {"progress": False}
REPLICAS = [(2, 1), (1, 2), (3, 1), (2, 2), (3,)]


class Net(nn.Module):
    """The last layer has the weight of the first, and a value goes past the middle."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.c.weight = self.a.weight

    def forward(self, x):
        first = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(first)) + first)


class Tracking(nn.Module):
    """Batch norm in each stage, and a buffer whose value depends on the order of the micro-batches."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.last_norm = nn.BatchNorm1d(6), nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        x = self.norm(self.a(x))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return self.last_norm(self.b(torch.tanh(x)))


class Head(Layered, scale=lambda: nn.Parameter(torch.ones(6))):
    """A loss with parameters, and a mean over what counts."""

    def forward(self, y, t):
        weights = (t > 0).float()
        return ((y * self.scale - t) ** 2 * weights).sum(), weights.sum()


def plan_with(model, replicas, **options):
    """A plan of as many stages, the devices of which are replicated."""
    plan = fxpipe.plan(model, len(replicas), example_args=(torch.randn(6, 6),), **QUICK, **options)
    return replace(plan, replica_devices=tuple(("cpu",) * count for count in replicas))


def replicated(model, replicas, chunks=4, executor=None, **options):
    planning = {name: options.pop(name) for name in ("balance",) if name in options}
    plan = plan_with(model, replicas, chunks=chunks, **planning)
    pipe = fxpipe.pipeline(model, ["cpu"] * sum(replicas), chunks, plan=plan, **QUICK, **options)
    if executor is not None:
        pipe._fxpipe.engine.executor.close()
        pipe._fxpipe.engine.executor = executor
    return pipe


def plain_step(model, x, t, chunks, loss_fn=F.mse_loss):
    """The plain model on the micro-batches, one after the other; returns outputs and loss."""
    parts = [*zip(x.tensor_split(chunks), t.tensor_split(chunks), strict=True)]
    total, outputs = accumulate_gradients(model, parts, loss_fn)
    return torch.cat(outputs), total


def assert_same(model, plain):
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
        torch.testing.assert_close(one.detach(), other.detach(), msg=name)
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_steps_come_to_the_gradients_of_the_plain_model(replicas, schedule):
    plain, head = Net(), Head()
    model, own_head = copy.deepcopy((plain, head))
    with closing(replicated(model, replicas, schedule=schedule)) as pipe:
        pairs = (model, own_head), (plain, head)
        optimizers = [torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1, momentum=0.9) for one, two in pairs]
        for batch in (6, 9, 5, 2):  # other batches than it was planned with, and fewer samples than replicas
            x, t = torch.randn(batch, 6), torch.randn(batch, 6)
            loss, outputs = pipe.forward_backward(x, target=t, loss_fn=own_head, return_outputs=True)
            wanted = plain(x)
            total, weight = head(wanted, t)
            (total / weight).backward()
            torch.testing.assert_close(loss, (total / weight).detach())
            torch.testing.assert_close(outputs, wanted.detach())
            assert_same(model, plain)
            assert_same(own_head, head)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert len(pipe.last_step.devices) == sum(replicas)
        used = {one.device for one in pipe.last_step.actions}
        assert len(used) == sum(min(count, 2) for count in replicas)  # the last mini-batch has two samples


@pytest.mark.parametrize(("replicas", "checkpoint"), [((2, 1), "always"), ((1, 3), "never"), ((1, 3), "except_last")])
def test_the_drop_in_runs_on_replicas(replicas, checkpoint):
    model = copy.deepcopy(plain := nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)))
    alone = copy.deepcopy(plain)
    with (
        closing(replicated(model, replicas, balance=["1"], checkpoint=checkpoint)) as pipe,
        fxpipe.pipeline(alone, ["cpu", "cpu"], 4, balance=["1"], **QUICK) as other,
    ):
        x, t = torch.randn(6, 6, requires_grad=True), torch.randn(6, 3)
        again = x.detach().clone().requires_grad_()
        for one, leaf in ((pipe, x), (other, again)):  # random numbers depend on the micro-batch, not on its device
            torch.manual_seed(5)
            F.mse_loss(one(leaf), t).backward()
        torch.testing.assert_close(x.grad, again.grad)
        assert_same(model, alone)
        model.eval()
        torch.testing.assert_close(pipe(x).detach(), model(x).detach())


@pytest.mark.parametrize("seed", range(6))
def test_whatever_order_the_fences_allow_the_bits_are_the_same(seed):
    def step(executor):
        torch.manual_seed(3)
        model, head = Tracking(), nn.Linear(3, 3)
        # The cut is said: one by measured seconds may be another, and sum in another order.
        with closing(replicated(model, (2, 3), 5, executor, balance=["norm"])) as pipe:
            x, t = torch.randn(10, 6), torch.randn(10, 3)
            pipe.forward_backward(x, target=t, loss_fn=lambda y, t: F.mse_loss(head(y), t))
        own = {f"head.{name}": p for name, p in head.named_parameters()} | dict(model.named_parameters())
        return {name: p.grad for name, p in own.items()} | dict(model.named_buffers())

    first, other = step(None), step(InterleavedExecutor(seed))
    for name, value in first.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("seed", range(2))
def test_replicas_go_back_after_the_one_loss_of_all_micro_batches(seed):
    """The last micro-batch of a replica is not the last of all, with whose forward the loss is computed."""
    model = copy.deepcopy(plain := Net())
    x, t = torch.randn(8, 6), torch.randn(8, 6)
    with closing(replicated(model, (1, 2), executor=InterleavedExecutor(seed))) as pipe:
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, reduction="batch")
        F.mse_loss(plain(x), t).backward()
        assert_same(model, plain)


class CountingMode(TorchDispatchMode):
    """A mode of the caller's, under which one action runs at a time."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("replicas", "mode", "executor"),
    [
        ((1, 3), nullcontext, None),
        ((2, 2), CountingMode, None),
        *((replicas, nullcontext, InterleavedExecutor(seed)) for seed in range(2) for replicas in ((1, 3), (2, 2))),
        ((1, 3), CountingMode, InterleavedExecutor(2)),
    ],
)
def test_losses_are_taken_in_the_order_of_micro_batches(replicas, mode, executor):
    plain, called = Net(), []
    model = copy.deepcopy(plain)
    count = sum(replicas)
    executor = JitteredExecutor([torch.device("cpu")] * count, 0) if executor is None else executor

    def noisy(y, t):
        called.append(t[0, 0].item())
        return F.mse_loss(y + torch.randn_like(y), t)

    with closing(replicated(model, replicas, 7, executor)) as pipe, closing(executor):
        for _ in range(3):  # the first one takes the loss of the whole mini-batch, too
            x, t = torch.randn(7, 6), torch.randn(7, 6)
            torch.manual_seed(5)
            with mode():
                loss = pipe.forward_backward(x, target=t, loss_fn=noisy)
            torch.manual_seed(5)
            _, wanted = plain_step(plain, x, t, 7, lambda y, t: F.mse_loss(y + torch.randn_like(y), t))
            torch.testing.assert_close(loss, wanted)
            assert called[:7] == t[:, 0].tolist()
            called.clear()
        assert_same(model, plain)


@pytest.mark.parametrize("seed", range(6))
def test_weights_are_updated_once_all_replicas_have_gone_back(seed):
    model = copy.deepcopy(plain := Net())
    want = torch.optim.SGD(plain.parameters(), lr=0.1)
    with closing(replicated(model, (3, 2), executor=InterleavedExecutor(seed))) as pipe:
        have = StageOptimizer(pipe, torch.optim.SGD, overlap=True, lr=0.1)
        for _ in range(2):  # the first one verifies the loss, and is updated behind it
            x, t = torch.randn(8, 6), torch.randn(8, 6)
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss, optimizer=have)
            plain_step(plain, x, t, 4)
            want.step()
            want.zero_grad()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), msg=name)
        assert sorted(str(s.action) for s in pipe.last_step.spans if str(s.action.kind) == "U") == ["0U3", "1U3"]


def test_micro_batches_that_are_handed_over_go_round():
    model = copy.deepcopy(plain := Net())
    with closing(replicated(model, (2, 1))) as pipe:
        parts = [(torch.randn(size, 6), torch.randn(size, 6)) for size in (2, 3, 1, 4, 2)]
        pipe.forward_backward(micro_batches=parts, loss_fn=F.mse_loss)
        for x, t in parts:
            (F.mse_loss(plain(x), t) * (len(x) / 12)).backward()
        assert_same(model, plain)


# -- Plans -------------------------------------------------------------------------------------------------------------


def test_what_pipedreams_planner_chooses_for_devices_of_one_process_runs():
    model = copy.deepcopy(plain := narrow_then_wide())
    x, t = torch.randn(24, 4), torch.randn(24, 4)
    options = {"balance": "pipedream", "hardware": hardware(Link(1e8)), "example_args": (x,), **QUICK}
    with fxpipe.pipeline(model, ["cpu"] * 4, 6, **options) as pipe:
        assert pipe.plan.replicas == (3, 1)
        assert pipe.plan.row_devices == ("cpu",) * 4
        for _ in range(2):
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
            plain_step(plain, x, t, 6)
        assert_same(model, plain)
        saved = pipe.plan
    again = copy.deepcopy(model)
    with fxpipe.pipeline(again, plan=saved, **QUICK) as pipe:  # the plan has all of the devices
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
        assert len(pipe.last_step.devices) == 4


def test_a_plan_of_data_parallelism_runs_as_replicas_that_take_turns():
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    x, t = torch.randn(24, 4), torch.randn(24, 4)
    fast = {"hardware": hardware(Link(1e12)), "example_args": (x,), "chunks": 2, "balance": "pipedream", **QUICK}
    for devices, data in ((4, None), (4, 2)):
        model = copy.deepcopy(plain)
        plan = fxpipe.plan(model, devices=["cuda:0"] * devices, data_parallel=data, **fast)
        assert plan.data_parallel == (data or 4)
        wanted = copy.deepcopy(plain)
        with fxpipe.pipeline(model, ["cpu"] * devices, plan=plan, **QUICK) as pipe:
            pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
            plain_step(wanted, x, t, 2 * (data or 4))
            assert_same(model, wanted)
            assert pipe.plan.replicas == ((4,) if data is None else (2, 2))
            assert pipe.plan.batch == 24
            assert len({one.device for one in pipe.last_step.actions}) == devices


def test_a_mini_batch_of_a_stream_sees_the_replicas_in_the_order_of_its_turns():
    with closing(replicated(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), (3, 2), balance=["0"])) as pipe:
        pipe(torch.randn(6, 6))
        ((_, bound, _),) = pipe._fxpipe.graphs
        own = [tuple(one.stage for one in bound.replicas_of(j)) for j in (0, 1)]
        devices = [[torch.device("cuda", 4 * j + r) for r in range(len(own[j]))] for j in (0, 1)]
        pairs = tuple(tuple(map(StageReplica, devices[j], own[j])) for j in (0, 1))
        turned = replace(bound, replicas=pairs).with_turns_from(5)
        assert [[device.index for device in of_stage] for of_stage in turned.stage_devices] == [[2, 0, 1], [5, 4]]
        assert turned.devices == bound.devices


@pytest.mark.parametrize(
    ("model", "width", "what"),
    [(Net, 6, "loss_fn, "), (Tracking, 3, "forward changes buffers")],
    ids=["losses", "buffers"],
)
def test_a_table_that_does_not_go_in_the_order_of_micro_batches_is_refused(model, width, what):
    table = "0F0 0F2 0B2 0F1 0B0 0B1\n1F0 1F2 1B2 1B0 1F1 1B1"
    refusal = rf"(?s)stage 1 has replicas, and {what}.*waits before 1F2 for .* of 1F1"
    with closing(replicated(model(), (1, 2), 3, schedule=table)) as pipe, pytest.raises(StateError, match=refusal):
        pipe.forward_backward(torch.randn(12, 6), target=torch.randn(12, width), loss_fn=F.mse_loss)


def _trained(schedule, seed=None):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 6)
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
