"""Backward in two of compiled stages: their weights get their gradients in W."""

from __future__ import annotations

import copy
import shutil
import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import Ops
from helpers.oracle import assert_same_gradients, assert_same_state
from torch import nn

import fxpipe
from fxpipe.rewriting import split_into_stages
from fxpipe.rewriting.split_backward import split_stage_backward
from fxpipe.rewriting.split_backward_compiled import split_compiled_stage_backward
from fxpipe.runtime.step import Step
from fxpipe.scheduling.actions import ActionKind
from fxpipe.tracing import trace
from fxpipe.tracing.node_info import info, update_info

BATCH = 7  # uneven over three micro-batches
AOT = {"backend": "aot_eager"}

# torch hides its warnings while it compiles, by a way that does not heed what pytest makes of warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Uses(nn.Module):
    """A use of every kind, in a model that changes in place what it may."""

    def __init__(self):
        super().__init__()
        self.tokens, self.first, self.again = nn.Embedding(11, 6, padding_idx=-1), nn.Linear(6, 8), nn.Linear(8, 8)
        self.only_bias, self.only_weight, self.frozen = (nn.Linear(8, 8) for _ in range(3))
        self.only_bias.weight.requires_grad_(False)
        self.only_weight.bias.requires_grad_(False)
        self.frozen.requires_grad_(False)
        self.right, self.turned, self.bias = (nn.Parameter(torch.randn(s) * 0.4) for s in ((8, 6), (6, 6), (6,)))
        self.conv, self.wide = nn.Conv1d(5, 4, 3, padding="same"), nn.ConvTranspose1d(4, 5, 2)
        self.norm = nn.BatchNorm1d(5)
        self.twice, self.with_b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids):
        x = self.tokens(ids)
        y = F.relu(self.again(self.first(x)), inplace=True)
        y = self.again(y).mul_(0.5) + y
        y = self.only_weight(torch.tanh(self.frozen(self.only_bias(y))))
        with torch.no_grad():
            gate = self.first(x).sigmoid()
        y = y * gate
        y = torch.tanh(y @ self.right) @ self.turned.t()
        y = torch.addmm(self.bias, y.reshape(-1, 6), self.twice.weight).view(y.shape) + self.twice(y)
        y = self.with_b(y) * self.with_b.weight.mean()
        y = self.wide(self.norm(torch.cat([self.conv(y), y[:, :1]], 1))[:, :4])
        return F.linear(y[..., :6], self.tokens.weight)


def ids():
    return torch.randint(0, 11, (BATCH, 5))


def square(y):
    return y.float().square().mean()


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def stages_of(model, *args, starts=(0,)):
    return split_into_stages(trace(model, args, chunks=3), starts, [torch.device("cpu")] * len(starts)).stages


def both(model, args, steps=3, compile=AOT, devices=("cpu", "cpu"), **how):
    """Steps of the model with an optimizer, in a plain loop and with compiled stages whose backward is split."""
    ours = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, ours)]
    how = {"chunks": 3, "example_args": args, "schedule": "zero_bubble"} | how
    with (
        fxpipe.pipeline(model, [*devices], **how) as plain,
        fxpipe.pipeline(ours, [*devices], compile=compile, plan=plain.plan, **how) as compiled,  # cut alike: same bits
    ):
        for seed in range(steps):
            losses = []
            for pipe in (plain, compiled):
                torch.manual_seed(seed)
                losses.append(pipe.forward_backward(*args, loss_fn=square))
            torch.testing.assert_close(*losses)
            assert_same_gradients(ours, model, loose=[n for n, _ in model.named_parameters()])
            yield model, ours
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_state(ours, model, exact=False)


def test_steps():
    """Graphs that R makes, and one that F makes."""
    for _ in both(Uses(), (ids(),), steps=2, checkpoint="except_last"):
        pass


def test_the_same_parameters_are_left_to_w():
    for starts in ((0,), (0, 9)):
        for stage in stages_of(Uses(), ids(), starts=starts):
            tapped = split_compiled_stage_backward(stage)
            assert tapped.split_parameters == split_stage_backward(stage).split_parameters != frozenset()
            assert tapped.taps.taps
            assert "with_b.weight" not in tapped.split_parameters


def test_products_of_two_values_are_left_alone():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

        def forward(self, x):
            return torch.matmul(self.q(x), self.k(x).mT) @ x

    for starts in ((0,), (0, 3)):  # the second operand made in the stage, and received
        for make in (split_stage_backward, split_compiled_stage_backward):
            first, *rest = (make(s).split_parameters for s in stages_of(Scores(), torch.randn(6, 5, 6), starts=starts))
            assert first == {"q.weight", "q.bias", "k.weight"}
            assert rest == [frozenset()] * len(rest)


def test_a_shape_that_is_not_known_keeps_its_node_whole():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    (stage,) = stages_of(model, torch.randn(6, 6))
    nodes = {node.name: node for node in stage.run.graph.nodes}
    _, _, of_last = (n for n in nodes.values() if n.op == "call_function" and info(n).known_shapes is not None)
    update_info(of_last, known_shapes=None)
    assert split_compiled_stage_backward(stage).split_parameters == {"0.weight", "0.bias"}
    for node in nodes.values():
        if node.op == "placeholder" and not info(node).attribute:
            update_info(node, known_shapes=None)
    assert split_compiled_stage_backward(stage).run is stage.run


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.first, self.second = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.conv1, self.conv2 = nn.Conv1d(6, 6, 3), nn.Conv1d(6, 6, 3)

    def forward(self, ids):
        return self.conv2(self.conv1(self.second(F.gelu(self.first(self.tokens(ids)))).mT))


def test_w_carries_the_weights(monkeypatch):
    counts = {kind: Counter() for kind in ActionKind}
    perform, lock = Step.perform, threading.Lock()

    def counting(step, action):
        if action.kind is ActionKind.FORWARD:  # compiles
            return perform(step, action)
        with lock, Ops(counts[action.kind]):
            return perform(step, action)

    monkeypatch.setattr(Step, "perform", counting)
    how = {"chunks": 2, "example_args": (torch.randint(0, 11, (4, 9)),), "schedule": "zero_bubble", "compile": AOT}
    with fxpipe.pipeline(Tower(), ["cpu", "cpu"], **how) as pipe:
        pipe.forward_backward(*how["example_args"], loss_fn=square)
    assert counts[ActionKind.BACKWARD] == {"mm": 2 * 2, "conv x": 2 * 2, "conv w": 0}
    assert counts[ActionKind.WEIGHT] == {"mm": 2 * 2, "conv x": 0, "conv w": 2 * 2, "embedding_dense_backward": 2}


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_taps_cost_no_compilation(checkpoint):
    found = []

    def backend(graph, example_inputs):
        found.append(threading.current_thread().name)
        return graph.forward

    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), torch.randn(BATCH, 6)
    how = {"chunks": 3, "example_args": (x,), "compile": {"backend": backend}, "checkpoint": checkpoint}
    counts = []
    for schedule in ("1f1b", "zero_bubble"):
        torch.compiler.reset()
        found.clear()
        with fxpipe.pipeline(model, ["cpu", "cpu"], schedule=schedule, **how) as pipe:
            for batch in (BATCH, BATCH - 1, BATCH, BATCH + 4):
                pipe.forward_backward(torch.randn(batch, 6), loss_fn=square)
        counts.append(Counter(found))
    assert counts[0] == counts[1] != {}


def test_parameters_that_are_frozen_and_thawed():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    frozen = iter((["2.weight"], ["0.weight", "0.bias", "2.bias"], []))
    for models in both(model, (torch.randn(6, 6),), steps=4):
        names = next(frozen, [])
        for one in models:
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name not in names)


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        for plain, ours in both(Tower(), (torch.randint(0, 11, (6, 9)),), steps=2):
            for one in (plain, ours):
                assert all(p.grad.dtype == torch.float32 for p in one.parameters())


def test_a_model_that_changes_its_dtype():
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6))
    for models in both(model, (torch.randint(0, 11, (6, 9)),), steps=2):
        for one in models:
            one.double()


class Spoils(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.outer = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        hidden = torch.tanh(self.inner(self.first(x))) * 2
        y = self.outer(hidden)
        hidden.add_(1)
        return y + hidden


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_an_input_that_is_written_to_raises_as_ever():
    """Within a stage, that is: one that is sent is copied before it is written to."""
    x = torch.randn(6, 6)
    how = {"chunks": 2, "example_args": (x,), "schedule": "zero_bubble", "compile": AOT, "balance": [4, 3]}
    with (
        fxpipe.pipeline(Spoils(), ["cpu", "cpu"], **how) as pipe,
        pytest.raises(Exception, match="modified by an inplace operation"),
    ):
        pipe.forward_backward(x, loss_fn=square)


# torch warns of its own code while it loads the compiler.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler for CPUs calls g++, which is not there")
def test_the_compiler_of_torch_itself():
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
    for _ in both(model, (torch.randn(4, 6),), steps=2, chunks=2, devices=["cpu"], compile=True):
        pass
