"""Graphs in plain numbers: what a cut sends, holds and saves is what its stages do; one number for a stage's memory."""

import functools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.branching_models import Parts, Tied, Towers, Translation, tokens, vectors
from helpers.layered import Layered
from helpers.models import BY_NAME
from helpers.plan_models import Deep, rows
from helpers.run_stages import Stages, leaves_of, sample
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import fxpipe
from fxpipe._torch.tensor_data import storages_of
from fxpipe.cluster import Link
from fxpipe.partitioning.chain import Chain, StageSite, stage_loads
from fxpipe.partitioning.intervals import StageMemory
from fxpipe.planning.choose import choose_cut
from fxpipe.planning.cost_model import chain_of
from fxpipe.planning.describe_cut import time_shares
from fxpipe.planning.options.pipeline_options import PipelineOptions, make_settings
from fxpipe.planning.passes import ProfiledModel, prepare_cut, trace_and_profile
from fxpipe.planning.plans.figures import plan_figures
from fxpipe.profiling import NodeCost, Profile, Seconds, profile
from fxpipe.profiling.profile_data import ZERO_FORMULA
from fxpipe.rewriting.build_stages import split_into_stages
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.rewriting.program import PIPE_INPUT
from fxpipe.simulation import transfers_of
from fxpipe.tracing import Traced, trace

BATCH, SAMPLES = 6, 3
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    name: (case.make, lambda case=case: case.inputs(BATCH)[0], case.inputs(BATCH)[1]) for name, case in BY_NAME.items()
} | {
    "translation": (Translation, tokens, {}),
    "towers": (Towers, vectors, {}),
    "tied": (Tied, vectors, {}),
    "parts": (Parts, vectors, {}),
}


@dataclass(frozen=True)
class Seen:
    """A stage that ran with what it received as copies."""

    parameters: dict[str, torch.Tensor]  # and buffers
    arrives: dict[str, int]  # by name: bytes of a value that another stage has made
    kept: int  # bytes of storages that are there until backward: saved by autograd, or a leaf that gets a gradient
    kept_to_recompute: int  # and if it is recomputed: all that it was given, and what running it again saves
    returning: frozenset[str]  # names of what it sends that get a gradient
    views: frozenset[str]  # names of what it sends that are parts of something else


def run(stages: Stages, leaves: list[Any]) -> list[Seen]:
    """Runs all stages."""
    numbers = iter(range(len(stages.program.stages)))

    def around(forward: Callable[..., Any], own: list[torch.Tensor], given: list[Any]) -> tuple[Any, Seen]:
        stage = stages.program.stages[next(numbers)]
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.update((storage._cdata, storage) for storage in storages_of(tensor))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            made = forward()
        from_others = {
            r.name: value
            for r, value in zip(stage.receives, given, strict=True)
            if r.source != PIPE_INPUT and isinstance(value, torch.Tensor)
        }
        came = {s._cdata: s for v in from_others.values() for s in storages_of(v)}
        leaf = {s._cdata: s for v in from_others.values() if v.requires_grad for s in storages_of(v)}
        models = {s._cdata for tensor in own for s in storages_of(tensor)}

        def size(storages: dict[int, torch.UntypedStorage]) -> int:
            return sum(storage.nbytes() for key, storage in storages.items() if key not in models)

        sent = {n: v for n, v in zip(stage.sends, made, strict=False) if isinstance(v, torch.Tensor)}
        return made, Seen(
            dict(zip(stage.attributes, own, strict=True)),
            {name: value.nbytes for name, value in from_others.items()},
            size(saved | leaf),
            size(saved | came),
            frozenset(name for name, value in sent.items() if value.requires_grad),
            frozenset(name for name, value in sent.items() if value._is_view()),
        )

    return stages.run(leaves, around)


def arriving(stages: Stages, seen: list[Seen]) -> list[int]:
    """For each stage the bytes that come to it for one micro-batch: values, and gradients by the wiring of the pipe."""
    found = [sum(one.arrives.values()) for one in seen]
    users: dict[tuple[int, str], list[int]] = {}
    for j, stage in enumerate(stages.program.stages):
        for r in stage.receives:
            if r.name in seen[j].arrives:
                users.setdefault((r.source, r.name), []).append(j)
    for (maker, name), those in users.items():
        ways = transfers_of(maker, those, seen[those[0]].arrives[name], returns=name in seen[maker].returning)
        for way in ways:
            found[way.target] += int(way.bytes) if way.is_gradient else 0
    return found


@functools.cache
def case(name: str) -> tuple[Traced, Profile, list[Any]]:
    make, inputs, kwargs = MODELS[name]
    torch.manual_seed(0)
    args = inputs()
    traced = trace(make(), args, kwargs, chunks=BATCH // SAMPLES)
    return traced, profile(traced, args, kwargs, micro_batch=SAMPLES, hardware="cpu"), leaves_of(args, kwargs)


def cuts(traced: Traced, count: int = 6) -> list[tuple[int, ...]]:
    """Random ones, into 2 to 5 stages."""
    dice, forbidden = random.Random(1), forbidden_cuts(traced)
    allowed = [place for place in range(1, len(traced.nodes)) if place not in forbidden]
    return [(0, *sorted(dice.sample(allowed, min(len(allowed), 1 + k % 4)))) for k in range(count)]


def idle(chain: Chain) -> Chain:
    """The chain without work: what a stage takes is for what comes to it."""
    nothing = ((0.0,) * len(chain),)
    return replace(chain, forward=nothing, backward=nothing)


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_comes_to_what_its_stages_do(name: str) -> None:
    traced, costs, leaves = case(name)
    chain, exact = idle(chain_of(traced, [costs], SAMPLES, {})), 0
    for starts in cuts(traced):
        sites = [StageSite(link=Link(1.0), state=3.0)] * len(starts)  # a byte takes a second
        stages = Stages(traced, starts, copied=True)
        seen = run(stages, sample(traced, leaves, SAMPLES))
        kept, again = (stage_loads(chain, sites, starts, [way] * len(starts)) for way in (False, True))
        where = f"cut before {[traced.nodes[s].name for s in starts[1:]]}"
        assert [load.seconds for load in kept] == arriving(stages, seen), where
        parts = {name for one in seen for name in one.views}
        parts |= {node.name for node in traced.nodes if node.target is operator.getitem}
        for j, one in enumerate(seen):
            where_j = f"stage {j}, {where}"
            trained = sum(t.nbytes for t in one.parameters.values() if t.requires_grad)
            plain, recomputing = kept[j].cost, again[j].cost
            assert plain.parameter_bytes == sum(t.nbytes for t in one.parameters.values()), where_j
            assert (plain.gradient_bytes, plain.optimizer_bytes) == (trained, 2 * trained), where_j
            assert recomputing.received_bytes == sum(one.arrives.values()), where_j
            said = [cost.received_bytes + cost.saved_bytes for cost in (plain, recomputing)]
            if parts.isdisjoint(one.arrives):
                assert said == [one.kept, one.kept_to_recompute], where_j
                exact += 1
            else:  # a part counts beside what it is a part of: rather too much than too little
                assert said[0] >= one.kept, where_j
                assert said[1] >= one.kept_to_recompute, where_j
    assert exact >= 6


class WritesToItsInput(Layered, one=4, two=4, three=4):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.one(x + y)
        x.add_(h)
        h = self.two(h)
        out: torch.Tensor = self.three(h) * x + y
        return out


def test_an_input_that_is_written_to_is_sent_by_the_stage_that_does_so() -> None:
    """It was taken for an input that reaches each stage by itself: nothing to send, and nothing to keep."""
    model, x = WritesToItsInput(), torch.randn(3, 4)
    traced = trace(model, (x, x.clone()))
    assert traced.effects is not None
    writer = next(place for place, writes in enumerate(traced.effects.written_classes) if writes)
    later = next(place for place, node in enumerate(traced.nodes) if node.name == "three")
    chain = chain_of(traced, [profile(traced, (x, x.clone()), budget=0.0)], 3, forbidden_cuts(traced))
    program = split_into_stages(traced, (0, later), [torch.device("cpu")] * 2)
    received = {value.name: value.source for value in program.stages[1].receives}
    assert sorted(received.values()) == [PIPE_INPUT, 0, 0]
    arriving = [flow for flow in chain.flows if 0 <= flow.maker < later <= flow.users[-1]]
    # What is left in the input goes to the end as well, back to the caller.
    assert [(flow.bytes, flow.returns) for flow in arriving] == [(48, True)] * 3
    assert writer in {flow.maker for flow in arriving}


COUNTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "a chain": (Deep, lambda: (rows(),)),
    "an encoder whose output all decoder layers use": (Translation, tokens),
    "two towers": (Towers, vectors),
}
STAGES = 3
OPTIONS = {"devices": ["cpu"] * STAGES, "hardware": "a100-80gb", "check": False}


@functools.cache
def studied(name: str) -> ProfiledModel:
    make, inputs = COUNTED[name]
    return trace_and_profile(make(), inputs(), {}, make_settings(PipelineOptions(chunks=4, **OPTIONS), anywhere=True))


SCHEDULES = ["gpipe", "1f1b", "zero_bubble", "zero_bubble_2p"]
MODES = ["never", "except_last", "always", ("never", "always", "never")]


@pytest.mark.parametrize(
    ("name", "schedule", "mode"),
    [(name, schedule, MODES[(i + k) % 4]) for i, name in enumerate(COUNTED) for k, schedule in enumerate(SCHEDULES)],
)
def test_cut_plan_and_simulation_say_the_same_bytes(name: str, schedule: str, mode: str | tuple[str, ...]) -> None:
    model = studied(name)
    settings = make_settings(PipelineOptions(chunks=4, schedule=schedule, checkpoint=mode, **OPTIONS), anywhere=True)
    cut = choose_cut(model.traced, model.profiles, model.batch, settings)
    plan = prepare_cut(cut, model.batch, settings).plan
    samples = plan.micro_batch
    assert len(plan.stages) == STAGES

    of_cut = [load.memory for load in cut.loads]
    of_plan = [int(plan.memory(j, b=samples)) for j in range(STAGES)]
    assert of_plan == of_cut
    exact = StageMemory(chain_of(cut.traced, cut.profiles, samples, {}), cut.sites)
    ends = [*cut.starts[1:], len(cut.traced.nodes)]
    of_search = [
        exact.memory(site, again, start, end) / exact.unit
        for site, again, start, end in zip(cut.sites, cut.recompute, cut.starts, ends, strict=True)
    ]
    assert of_search == of_cut
    of_step = [memory.peak for memory in fxpipe.simulate(plan).memory]
    assert of_step == of_plan
    assert [stage.memory_bytes for stage in plan_figures(plan).stages] == of_plan

    larger = [int(plan.memory(j, b=2 * samples)) for j in range(STAGES)]
    assert [memory.peak for memory in fxpipe.simulate(plan, batch=2 * samples * plan.chunks).memory] == larger


def test_shares_of_nodes_are_those_of_forward_and_backward_together() -> None:
    costs = [
        NodeCost("a", Seconds(1e-3), Seconds(2e-3), ZERO_FORMULA, ZERO_FORMULA),
        NodeCost("b", Seconds(0.0, 1e-3), Seconds(), ZERO_FORMULA, ZERO_FORMULA),
    ]
    assert time_shares(costs, 3) == (0.5, 0.5)
    assert time_shares([replace(cost, forward=Seconds(), backward=Seconds()) for cost in costs], 3) == ()


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {}),  # threads of one process
        (2, {"processes": True}),
        (4, {}),  # two nodes, and so processes
        (2, {"schedule": "interleaved_1f1b"}),
        (2, {"checkpoint": "always"}),
        (4, {"hardware": "h100", "schedule": "zero_bubble"}),
    ],
)
def test_cuts_are_compared_by_the_step_that_their_plan_will_have(devices: int, options: dict[str, Any]) -> None:
    model, x = Deep(), rows()
    settings = make_settings(
        {"devices": ["cpu"] * devices, "hardware": "cpu", "chunks": 2, "balance": "optimal", **options}, anywhere=True
    )
    studied = trace_and_profile(model, (x,), {}, settings)
    cut = choose_cut(studied.traced, studied.profiles_for(settings), studied.batch, settings)
    plan = prepare_cut(cut, studied.batch, settings).plan
    assert cut.simulation.step_seconds == pytest.approx(fxpipe.simulate(plan).step_seconds, rel=1e-6)
