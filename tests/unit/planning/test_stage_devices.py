"""Where stages run: hardware that is not here, links, devices that are not equal, and the memory that they have."""

from dataclasses import replace

import pytest
import torch
from helpers.plan_hardware import SLOW, estimated, hardware, without_host
from helpers.plan_models import BATCH, CHUNKS, Deep, assert_within, bottleneck, needs, planned, rows
from torch import nn

import fxpipe
from fxpipe.cluster import Link
from fxpipe.errors import MemoryLimitError
from fxpipe.hardware import HARDWARE
from fxpipe.planning.choose import choose_cut
from fxpipe.planning.cost_model import MEMORY_MARGIN
from fxpipe.planning.options.pipeline_options import PipelineOptions, make_settings
from fxpipe.planning.passes import prepare_cut
from fxpipe.planning.plans.figures import simulate_step
from fxpipe.profiling import Seconds


@pytest.mark.parametrize("name", [*HARDWARE][::4])
def test_a_plan_for_hardware_that_is_not_here(name: str) -> None:
    known = HARDWARE[name]
    plan = estimated(Deep(), 2, rows(), hardware=name)
    assert plan.estimated_for == known.name
    assert plan.balance == "optimal"
    assert plan.devices == (("cpu",) * 2 if name == "cpu" else ("cuda:0", "cuda:1"))
    for stage in plan.stages:
        assert stage.memory_limit == int(known.memory * (1 - MEMORY_MARGIN))
        assert stage.forward_seconds >= known.launch
    ways = {(way.source, way.target): way for way in plan.sendings}
    assert set(ways) == {(0, 1), (1, 0)}
    for way in ways.values():
        assert way.bytes == 2 * 4 * 8 * 4
        link = known.within
        assert way.seconds == (0.0 if link is None else link.latency + way.bytes / link.bytes_per_second)


def test_the_memory_of_the_hardware_is_a_limit() -> None:
    free = estimated(Deep(), 3, rows(), hardware=hardware())
    small = int(max(needs(free)) * 0.85 / (1 - MEMORY_MARGIN))
    plan = estimated(Deep(), 3, rows(), hardware=hardware(memory=small))
    assert_within(plan)
    assert "always" in plan.modes
    assert {stage.memory_limit for stage in plan.stages} == {int(small * (1 - MEMORY_MARGIN))}
    given = estimated(Deep(), 3, rows(), hardware=hardware(memory=small), memory_limit="1GiB")  # the user knows better
    assert given.checkpoint == "never"
    with pytest.raises(MemoryLimitError, match="What would fit"):
        estimated(Deep(), 1, rows(), hardware=hardware(memory=small))


class Narrow(nn.Module):
    """Wide values but at one place, which is not in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Linear(64, 64), nn.Linear(64, 1)
        self.wide, self.last = nn.Linear(1, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.narrow(torch.tanh(self.first(x))))
        for layer in self.last:
            x = layer(x)
        return x


def test_slow_links_move_the_cut_to_where_little_is_sent() -> None:
    x = torch.randn(BATCH, 64)
    handed_over, fast, slow = (estimated(Narrow(), 2, x, hardware=hardware(link)) for link in (None, Link(1e12), SLOW))
    for plan in (handed_over, fast):
        assert plan.stages[0].nodes[-1].startswith("last")
    assert slow.stages[0].nodes[-1] == "narrow"
    for plan in (handed_over, fast, slow):
        assert bottleneck(plan)["optimal"] <= bottleneck(plan)["block"]
    assert bottleneck(slow)["optimal"] < bottleneck(slow)["block"]
    block = estimated(Narrow(), 2, x, hardware=hardware(SLOW), balance="block")
    assert block.balance == "block"
    assert [stage.nodes for stage in block.stages] == [stage.nodes for stage in handed_over.stages]
    assert bottleneck(block) == {"block": bottleneck(slow)["block"]}
    # Such short stages wait for the host, whatever the links.
    assert simulate_step(without_host(slow)).step_seconds < simulate_step(without_host(block)).step_seconds


@pytest.mark.parametrize("times", [3.0, 1 / 3])
def test_unequal_devices_get_unequal_shares(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """The second device is of another kind, that many times as slow."""
    monkeypatch.setattr("fxpipe.planning.cost_model.local_link", lambda one, other: None)
    traced = fxpipe.trace(Deep(), (rows(),), chunks=CHUNKS)
    first = fxpipe.profile(traced, (rows(),), micro_batch=2, hardware=hardware())

    def slower(seconds: Seconds) -> Seconds:
        return Seconds(times * seconds.fixed, times * seconds.per_sample)

    nodes = (
        replace(n, forward=slower(n.forward), backward=slower(n.backward), weight=slower(n.weight)) for n in first.nodes
    )
    options = PipelineOptions(devices=["cpu", "cuda:0"], chunks=CHUNKS, memory_limit="1GiB")
    settings = make_settings(options, anywhere=True)
    cut = choose_cut(traced, [first, replace(first, nodes=tuple(nodes))], BATCH, settings)
    plan = prepare_cut(cut, BATCH, settings).plan
    assert plan.balance == "optimal"
    assert bottleneck(plan)["optimal"] < bottleneck(plan)["block"]
    fewer, more = sorted(plan.stages, key=lambda stage: len(stage.nodes))
    assert (fewer.index == 1) == (times > 1)
    assert len(more.nodes) == pytest.approx(3 * len(fewer.nodes), abs=2)
    largest = max(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    assert bottleneck(plan)["optimal"] == pytest.approx(largest)
    for stage in plan.stages:  # the parts of a stage's time are those of its own device
        linear = sum(name.startswith("layers") for name in stage.nodes)
        gradients = 2 * linear  # of weight and bias
        assert stage.weight_seconds == pytest.approx(gradients * 1e-6 * (times if stage.index else 1))
    assert "2 stages" in str(plan)


def test_measured_links_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between devices that are at hand."""
    monkeypatch.setattr("fxpipe.planning.cost_model.local_link", lambda one, other: SLOW)
    x = torch.randn(BATCH, 64)
    traced = fxpipe.trace(Narrow(), (x,), chunks=CHUNKS)
    profile = fxpipe.profile(traced, (x,), micro_batch=2, hardware=hardware())
    plan = estimated(Narrow(), 2, x, profile=profile)
    assert plan.balance == "optimal"
    assert plan.stages[0].nodes[-1] == "narrow"
    assert [way.seconds for way in plan.sendings] == [SLOW.latency + 8 / SLOW.bytes_per_second] * 2


def test_memory_at_hand_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = planned()
    memory = int(0.85 * max(needs(free)) / (1 - MEMORY_MARGIN))
    monkeypatch.setattr("fxpipe.planning.cost_model.local_memory", lambda device: 3 * memory)  # shared by three workers
    monkeypatch.setattr("fxpipe.planning.cost_model._bytes_of_model", lambda model, device: 0)
    plan = planned()
    assert_within(plan)
    assert "always" in plan.modes
    assert {stage.memory_limit for stage in plan.stages} == {int(3 * memory * (1 - MEMORY_MARGIN)) // 3}
