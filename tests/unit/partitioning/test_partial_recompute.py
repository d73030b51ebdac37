"""A stage of which only a part recomputes: it fits, it recomputes less, a step is shorter, and it trains the same."""

import copy
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.partition_problems import problems
from helpers.plan_models import assert_trains_like
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.hardware import HARDWARE
from fxpipe.partitioning.chain import Chain, HeldStorage, StageSite, stage_loads
from fxpipe.partitioning.optimal import optimal_partition
from fxpipe.partitioning.partial_recompute import StagePart, partial_recompute_cuts
from fxpipe.scheduling import ActionKind, activations_in_flight, make_schedule, micro_batches_in_flight

CHUNKS = 8


class Block(nn.Module):
    """Keeps much more than it sends."""

    def __init__(self, width: int = 8, wide: int = 32):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(width, wide), nn.Dropout(0.1), nn.Linear(wide, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(torch.sin(self.up(x)) * 2)))


class Blocks(nn.Sequential):
    def __init__(self, count: int = 8):
        super().__init__(*(Block() for _ in range(count)))


def rows() -> torch.Tensor:
    return torch.randn(CHUNKS, 64, 8)


@functools.cache
def profile(slowdown: float = 1000.0) -> fxpipe.Profile:
    """Estimated, so that no noise decides, for a CPU on which Python takes a small part of the time."""
    cpu, x = HARDWARE["cpu"], rows()
    slow = replace(
        cpu,
        arithmetic_efficiency=cpu.arithmetic_efficiency / slowdown,
        memory_efficiency=cpu.memory_efficiency / slowdown,
    )
    return fxpipe.profile(fxpipe.trace(Blocks(), (x,), chunks=CHUNKS), (x,), micro_batch=1, hardware=slow)


def planned(stages: int = 2, **options: Any) -> fxpipe.Plan:
    options = {"chunks": CHUNKS, "profile": profile(), "optimizer_state": 0.0, "example_args": (rows(),)} | options
    return fxpipe.plan(Blocks(), stages, **options)


def needs(plan: fxpipe.Plan) -> list[int]:
    """Bytes, by device."""
    found = [0] * len(plan.workers)
    for stage in plan.stages:
        found[plan.placement[stage.index]] += int(plan.memory(stage.index, b=plan.micro_batch))
    return found


def again(plan: fxpipe.Plan) -> float:
    """Seconds of recomputation, of a micro-batch."""
    return sum(s.forward_seconds for s, mode in zip(plan.stages, plan.modes, strict=True) if mode == "always")


@functools.cache
def limit(share: float, stages: int = 2) -> int:
    """So much of what the device with the most would need without recomputation."""
    return int(share * max(needs(planned(stages))))


def whole(stages: int, most: int, **options: Any) -> fxpipe.Plan:
    """The best plan in which the same devices recompute, each all that it has."""
    plan = planned(stages, memory_limit=most, **options)
    modes = ["never"] * stages
    for stage, mode in zip(plan.stages, plan.modes, strict=True):
        if mode == "always":
            modes[plan.placement[stage.index]] = mode
    return planned(stages, memory_limit=most, checkpoint=tuple(modes), **options)


@pytest.mark.parametrize(
    ("schedule", "stages", "share"), [("1f1b", 2, 0.8), ("1f1b", 2, 0.7), ("1f1b", 3, 0.65), ("zero_bubble", 3, 0.95)]
)
def test_a_stage_recomputes_no_more_than_its_memory_asks_for(schedule: str, stages: int, share: float) -> None:
    most = limit(share, stages)
    plan, other = planned(stages, memory_limit=most, schedule=schedule), whole(stages, most, schedule=schedule)
    assert len(plan.stages) > stages == len(other.stages) == len(plan.workers)
    assert plan.placement == tuple(sorted(plan.placement))
    assert {"always", "never"} == {*plan.modes}
    assert max(needs(plan)) <= most
    for stage in plan.stages:
        assert plan.memory(stage.index, b=plan.micro_batch) <= stage.memory_limit
    limits = [sum(s.memory_limit or 0 for s in plan.stages if plan.placement[s.index] == k) for k in range(stages)]
    assert max(limits) <= most
    assert 0 < again(plan) < again(other)
    assert fxpipe.simulate(plan).step_seconds <= 0.99 * fxpipe.simulate(other).step_seconds
    by_device = [0.0] * stages
    for stage, mode in zip(plan.stages, plan.modes, strict=True):
        seconds = stage.forward_seconds * (2 if mode == "always" else 1) + stage.backward_seconds
        by_device[plan.placement[stage.index]] += seconds
    assert math.isclose(max(by_device), {b.balance: b.seconds for b in plan.bottlenecks}["optimal"], rel_tol=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_it_trains_like_the_plain_model(schedule: str, tmp_path: Path) -> None:
    plain = Blocks()
    share = {"1f1b": 0.8, "zero_bubble": 0.95}[schedule]
    options: dict[str, Any] = {"profile": profile(), "optimizer_state": 0.0, "memory_limit": limit(share)}
    inputs: dict[str, Any] = {"example_args": (rows(),)}
    first = fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 2, CHUNKS, schedule=schedule, **inputs, **options)
    first.close()
    first.plan.save(tmp_path / "plan.json")
    plan = fxpipe.Plan.load(tmp_path / "plan.json")
    assert plan == first.plan
    assert len(plan.stages) > 2
    with fxpipe.pipeline(copy.deepcopy(plain), schedule=schedule, plan=plan, **inputs) as pipe:
        assert (pipe.plan.placement, pipe.plan.modes) == (plan.placement, plan.modes)
        assert_trains_like(plain, pipe, lambda: (rows(),), chunks=CHUNKS)  # dropout is recomputed, too
        ran = {record.action.stage for record in pipe.last_step.actions if record.action.kind is ActionKind.RECOMPUTE}
        assert ran == {j for j, mode in enumerate(plan.modes) if mode == "always"}
        x = rows()
        pipe.eval()
        plain.eval()
        with torch.no_grad():
            assert torch.equal(pipe(x), plain(x))


def test_parts_that_only_take_the_host_longer_are_not_made() -> None:
    """Python takes most of a step of such small stages: more actions take longer than the recomputation."""
    plan = planned(profile=profile(slowdown=1.0), memory_limit=limit(0.7))
    assert len(plan.stages) == 2
    assert "always" in plan.modes


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": ("always", "never")},
        {"balance": ["3"]},
        {"schedule": "interleaved_1f1b", "stages": 4},
        {"stages_per_device": 2, "stages": 4},
        {"schedule": lambda m, n: make_schedule("1f1b", n, m)},
    ],
    ids=["modes", "names", "bound", "stages_per_device", "function"],
)
def test_who_says_how_many_stages_has_as_many(options: dict[str, Any]) -> None:
    plan = planned(**{"memory_limit": limit(0.8)} | options)
    assert "always" in plan.modes
    assert len(plan.stages) == options.get("stages", 2)


def test_one_device_recomputes_a_part() -> None:
    """GPipe keeps all micro-batches: what is kept counts eight times, what is recomputed once."""
    free = planned(1, schedule="gpipe")
    assert free.placement == (0,)
    most = int(0.6 * max(needs(free)))
    plan = planned(1, memory_limit=most, schedule="gpipe")
    assert (plan.placement, {*plan.modes}) == ((0, 0), {"always", "never"})
    assert max(needs(plan)) <= most
    assert again(plan) < 0.6 * sum(stage.forward_seconds for stage in plan.stages)


@settings(max_examples=100, deadline=None)
@given(problems(), st.booleans())
def test_parts_fit_and_recompute_less(problem: tuple[Chain, list[StageSite]], is_free: bool) -> None:
    chain, sites = problem
    try:
        found = optimal_partition(chain, sites)
    except fxpipe.errors.PartitionError:
        return
    stages = range(len(sites))
    is_free = is_free and not (chain.first_stages or chain.required_cuts)
    below = found.bottleneck if is_free else None
    for parts in partial_recompute_cuts(chain, sites, found.starts, found.recompute, below):
        starts = [part.start for part in parts]
        assert starts == sorted({*starts})
        assert starts[0] == 0
        assert not {*starts} & {*chain.forbidden_cuts}
        assert [part.stage for part in parts] == sorted(part.stage for part in parts)
        assert {part.stage for part in parts} == {*stages}
        own = [sites[part.stage] for part in parts]
        loads = stage_loads(chain, own, starts, [part.recompute for part in parts])
        for j in stages:
            memory = sum(load.memory for load, part in zip(loads, parts, strict=True) if part.stage == j)
            most = sites[j].memory
            assert most is None or memory <= most * (1 + 1e-12)
            modes = [part.recompute for part in parts if part.stage == j]
            assert sites[j].may_recompute or sites[j].must_recompute or not any(modes)
            assert not sites[j].must_recompute or all(modes)
        if not is_free:
            assert {*found.starts} <= {*starts}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=9), st.integers(2, 4), st.data())
def test_no_two_parts_recompute_less(nodes: list[tuple[int, int]], in_flight: int, data: st.DataObject) -> None:
    """Where nothing crosses a cut, bisection is right: compared with every way to have two parts."""
    n = len(nodes)
    held = tuple(HeldStorage(float(size), place, (place,)) for place, (_, size) in enumerate(nodes))
    chain = Chain((tuple(float(f) for f, _ in nodes),), ((0.0,) * n,), held=held)
    total = sum(size for _, size in nodes)
    most = float(data.draw(st.integers(total, in_flight * total - 1)))
    site = StageSite(memory=most, in_flight=in_flight, may_recompute=True)

    def recomputed(parts: tuple[StagePart, ...]) -> int:
        ends = [*(part.start for part in parts[1:]), n]
        return sum(sum(f for f, _ in nodes[p.start : e]) for p, e in zip(parts, ends, strict=True) if p.recompute)

    ways = [(StagePart(0, 0, True),)]
    ways += [(StagePart(0, 0, mode), StagePart(0, p, not mode)) for p in range(1, n) for mode in (False, True)]
    fitting = [
        way
        for way in ways
        if sum(
            x.memory for x in stage_loads(chain, [site] * len(way), [p.start for p in way], [p.recompute for p in way])
        )
        <= most
    ]
    best = min(map(recomputed, fitting))
    found = list(partial_recompute_cuts(chain, [site], (0,), (True,), None))
    assert [recomputed(parts) for parts in found] == ([best] if best < recomputed(ways[0]) else [])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "zero_bubble_2p"])
@pytest.mark.parametrize("placement", [(0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0, 0, 0, 2)])
def test_neighbours_on_a_device_keep_what_one_stage_keeps(name: str, placement: tuple[int, ...]) -> None:
    devices = list(dict.fromkeys(placement))
    for m in (1, 2, 5, 8):
        parts = make_schedule(name, len(placement), m, placement=placement)
        one = make_schedule(name, len(devices), m)
        expected = [micro_batches_in_flight(one)[devices.index(k)] for k in placement]
        assert list(micro_batches_in_flight(parts)) == expected


def test_what_recomputes_does_so_before_the_gradient_comes() -> None:
    """Also where it comes through a part that has kept what it made."""
    schedule = make_schedule("1f1b", 3, 2, ("always", "never", "never"), (0, 0, 1))
    assert str(schedule).splitlines()[1] == "device 0: 0F0 1F0 0F1 1F1 0R0 1B0 0B0 0R1 1B1 0B1"
    assert activations_in_flight(schedule) == (1, 2, 1)
    both = make_schedule("1f1b", 3, 2, ("always", "always", "never"), (0, 0, 1))
    assert str(both).splitlines()[1] == "device 0: 0F0 1F0 0F1 1F1 1R0 1B0 0R0 0B0 1R1 1B1 0R1 0B1"  # one at a time
