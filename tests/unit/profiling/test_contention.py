"""What workers cost each other is measured on the nodes that take longest, alone and at once."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe._torch.thread_state import ThreadState
from fxpipe.errors import ArgumentError
from fxpipe.profiling import contention, profile
from fxpipe.profiling.backward_timing import NodeCall
from fxpipe.profiling.contention import ConcurrentCall, heavy_nodes, measure_contention
from fxpipe.profiling.profile_data import Profile
from fxpipe.tracing import trace

AT_ONCE = "fxpipe contention"  # the name of the threads


class Clock(threading.local):
    """The processor time of a thread: calls take three times as long while others run."""

    now = 0.0

    def work(self, x: torch.Tensor) -> torch.Tensor:
        self.now += 3.0 if threading.current_thread().name == AT_ONCE else 1.0
        return x * 2


def test_the_factor_is_of_the_same_calls_alone_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.thread_time", lambda: clock.now)
    node = fx.Graph().placeholder("x")
    value = torch.ones(2, requires_grad=True)

    def call(weight: int) -> ConcurrentCall:
        return ConcurrentCall(NodeCall(clock.work, (node,), {}, False), {node: value}, ThreadState.now(), weight)

    assert measure_contention([[call(1), call(5)], [call(2)]], 0.0) == 3.0
    assert measure_contention([[call(1)], []], 0.0) == 1.0  # nobody is beside it
    assert value.grad is None


def test_what_fails_in_a_thread_is_raised_and_none_hangs() -> None:
    node = fx.Graph().placeholder("x")

    def fails(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == AT_ONCE:
            raise RuntimeError("not at once")
        return x * 2

    calls = [
        ConcurrentCall(NodeCall(f, (node,), {}, False), {node: torch.ones(2)}, ThreadState.now(), 1)
        for f in (fails, torch.neg)
    ]
    with pytest.raises(RuntimeError, match="not at once"):
        measure_contention([[one] for one in calls], 0.0)
    assert not [thread for thread in threading.enumerate() if thread.name == AT_ONCE]


def test_nodes_that_alone_take_longer_than_there_is_time_run_only_where_there_are_no_others() -> None:
    traced = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 9)), (torch.randn(2, 4),))
    nodes = [node for node in traced.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    first, relu, tanh, head = nodes
    effects: Any = SimpleNamespace(nodes=nodes, place={n: i for i, n in enumerate(nodes)}, written_classes=[()] * 4)
    seconds = dict(zip(nodes, (0.5, 0.2, 0.3, 0.6), strict=True))
    kinds = {node: node.name for node in nodes}
    assert heavy_nodes(effects, seconds, kinds, 2, longest=1.0) == [{first: 1, relu: 1}, {head: 1, tanh: 1}]
    assert heavy_nodes(effects, seconds, kinds, 2, longest=0.4) == [{relu: 1}, {tanh: 1}]
    assert heavy_nodes(effects, seconds, kinds, 2, longest=0.1) == [{first: 1, relu: 1}, {head: 1, tanh: 1}]


class Whole(nn.Module):
    """Kept whole; notes the threads in which it runs."""

    threads: ClassVar[set[str]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Whole.threads.add(threading.current_thread().name)
        return x.sin()


def test_a_profile_has_it_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(contention, "LEAST_SECONDS", 0.0)
    measured: list[list[int]] = []

    def noted(parts: list[list[ConcurrentCall]], seconds: float) -> float:
        measured.append([len(part) for part in parts])
        measure_contention(parts, seconds)
        return 1.5

    monkeypatch.setattr("fxpipe.profiling.node_timing.measure_contention", noted)
    blocks = [
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(), Whole(), nn.Linear(64, 16)) for _ in range(2)
    ]
    model, x = nn.Sequential(*blocks), torch.randn(8, 16)
    traced = trace(model, (x,), leaf_modules=[Whole])
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    Whole.threads.clear()
    costs = profile(traced, (x,), workers=2)
    assert costs.contention == 1.5
    ((first, second),) = measured
    assert first
    assert second
    assert AT_ONCE not in Whole.threads  # Python of the user's runs in one thread at a time
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    costs.save(tmp_path / "profile.json")
    assert fxpipe.Profile.load(tmp_path / "profile.json") == costs

    assert profile(traced, (x,)).contention == 1.0  # one worker
    replace(costs, contention=0.5).save(tmp_path / "profile.json")
    with pytest.raises(ArgumentError, match=r"its contention cannot be"):
        Profile.load(tmp_path / "profile.json")
