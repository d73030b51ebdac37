"""How much workers slow each other down is measured once in a process, on a fixed piece of training."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import profiling
from fxpipe.errors import ArgumentError
from fxpipe.profiling import contention
from fxpipe.profiling.contention import cpu_contention
from fxpipe.tracing import trace


@pytest.fixture(autouse=True)
def not_measured_yet() -> Any:
    cpu_contention.cache_clear()
    yield
    cpu_contention.cache_clear()


def test_the_factor_is_of_the_same_step_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    begun = threading.Barrier(3, timeout=20)

    class Clock(threading.local):
        now = 0.0

    clock = Clock()

    def work(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        if len(at_once) == 3:
            begun.wait()  # all three are in it at one time
        clock.now += float(len(at_once))
        return x @ weight

    at_once: list[int] = []
    monkeypatch.setattr("time.thread_time", lambda: clock.now)
    monkeypatch.setattr(contention.F, "linear", work)

    class Barrier(threading.Barrier):
        def __init__(self, parties: int):
            at_once[:] = range(parties)
            super().__init__(parties)

    monkeypatch.setattr(contention.threading, "Barrier", Barrier)
    assert cpu_contention(3, 1) == 3.0
    assert len(threads) == 3
    monkeypatch.setattr(contention.F, "linear", None)  # it is known by now
    assert cpu_contention(3, 1) == 3.0
    assert cpu_contention(1, 1) == 1.0  # nobody runs next to it


def test_a_profile_has_it_and_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), torch.randn(8, 16)
    traced, state = trace(model, (x,)), torch.get_rng_state()
    asked: list[tuple[int, int]] = []

    def factor(workers: int, threads: int) -> float:
        asked.append((workers, threads))
        assert cpu_contention(workers, threads) >= 1.0
        return 1.5

    monkeypatch.setattr(profiling, "cpu_contention", factor)
    assert profiling.profile(traced, (x,), workers=2).contention == 1.0  # Python takes most of it
    assert not asked
    monkeypatch.setattr(profiling, "LEAST_SECONDS", 0.0)
    costs = profiling.profile(traced, (x,), workers=2, threads=1)
    assert costs.contention == 1.5
    assert asked == [(2, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    costs.save(tmp_path / "profile.json")
    assert fxpipe.Profile.load(tmp_path / "profile.json") == costs
    replace(costs, contention=0.5).save(tmp_path / "profile.json")
    with pytest.raises(ArgumentError, match=r"its contention cannot be"):
        fxpipe.Profile.load(tmp_path / "profile.json")
