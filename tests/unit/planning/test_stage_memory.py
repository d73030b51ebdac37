"""The memory of a stage is one number: for the cut, the plan, the simulated step, and what is shown of them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from helpers.branching_models import Towers, Translation, tokens, vectors
from helpers.plan_models import Deep, rows
from torch import nn

import fxpipe
from fxpipe.partitioning.intervals import StageMemory
from fxpipe.planning.choose import choose_cut
from fxpipe.planning.cost_model import chain_of
from fxpipe.planning.options.pipeline_options import PipelineOptions, make_settings
from fxpipe.planning.passes import ProfiledModel, prepare_cut, trace_and_profile
from fxpipe.planning.plans.figures import plan_figures

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "a chain": (Deep, lambda: (rows(),)),
    "an encoder whose output all decoder layers use": (Translation, tokens),
    "two towers": (Towers, vectors),
}
STAGES = 3
OPTIONS = {"devices": ["cpu"] * STAGES, "hardware": "a100-80gb", "check": False}


@functools.cache
def studied(name: str) -> ProfiledModel:
    make, inputs = MODELS[name]
    return trace_and_profile(make(), inputs(), {}, make_settings(PipelineOptions(chunks=4, **OPTIONS), anywhere=True))


SCHEDULES = ["gpipe", "1f1b", "zero_bubble", "zero_bubble_2p"]
MODES = ["never", "except_last", "always", ("never", "always", "never")]


@pytest.mark.parametrize(
    ("name", "schedule", "mode"),
    [(name, schedule, MODES[(i + k) % 4]) for i, name in enumerate(MODELS) for k, schedule in enumerate(SCHEDULES)],
)
def test_cut_plan_and_simulation_say_the_same_bytes(name: str, schedule: str, mode: str | tuple[str, ...]) -> None:
    model = studied(name)
    settings = make_settings(PipelineOptions(chunks=4, schedule=schedule, checkpoint=mode, **OPTIONS), anywhere=True)
    cut = choose_cut(model.orders, model.profiles, model.batch, settings)
    plan = prepare_cut(cut, model.fingerprint, model.batch, settings).plan
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
