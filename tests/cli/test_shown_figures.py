"""Figures that reports, tables and documents show are those of the plan: computed in one place, and read from there."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.drawn_plans import drawn_plan
from helpers.inspected import make_plan
from torch import nn

import fxpipe
from fxpipe.inspect.json_document import plan_document, simulation_document
from fxpipe.inspect.report import report_page, stages_section
from fxpipe.inspect.stage_graph import draw_stage_graph
from fxpipe.inspect.step_summary import one_device_text
from fxpipe.inspect.svg import Text
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.data import PlannedSize, StageBytes
from fxpipe.planning.plans.figures import plan_figures
from fxpipe.planning.tuning.candidates import NO_SHORTER, CandidateResult, Tuning
from fxpipe.simulation import HostCost
from fxpipe.utils.polynomial import Polynomial
from fxpipe.utils.units import human_bytes


def table_of(markup: str, headers: str) -> list[dict[str, str]]:
    """The rows of the first table with such a header, as text."""
    table = next(one for one in re.findall(r"<table.*?</table>", markup, re.S) if f">{headers}<" in one)
    rows = [
        [re.sub(r"<[^>]*>", " ", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)]
        for row in re.findall(r"<tr.*?</tr>", table, re.S)
    ]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_the_report_has_the_memory_of_a_stage_with_a_dynamic_size() -> None:
    plan = drawn_plan(2)
    grown = StageBytes(held=Polynomial.of({(("b", 1), ("s", 1)): 2**16}))
    stages = tuple(replace(stage, bytes=grown, memory_limit=None) for stage in plan.stages)
    plan = replace(plan, stages=stages, sizes=(PlannedSize("s", size=128, largest=128),))
    shown = [row["memory"] for row in table_of(stages_section(plan), "in flight")]
    assert shown == [human_bytes(float(plan.memory(j, b=plan.micro_batch))) for j in range(2)]
    assert shown != [human_bytes(float(plan.memory(j, b=plan.micro_batch, s=plan.micro_batch))) for j in range(2)]


def in_turn() -> Plan:
    """Four devices: three replicas of the first stage, one of the second."""
    plan = drawn_plan(2, chunks=6, batch=24)
    return replace(plan, replica_devices=(("cuda:0", "cuda:1", "cuda:2"), ("cuda:3",)))


def test_the_report_has_the_stages_of_devices_whose_replicas_take_turns() -> None:
    plan = in_turn()
    simulation = fxpipe.simulate(plan)
    page = report_page(plan)
    devices = table_of(page, "bubble")
    assert [row["stages"] for row in devices] == [
        ", ".join(map(str, sorted({span.action.stage for span in simulation.spans if span.device == device})))
        for device in range(4)
    ]
    stages = table_of(stages_section(plan), "in flight")
    assert [row["device"] for row in stages] == ["0-2: cuda:0 cuda:1 cuda:2", "3: cuda:3"]
    assert "2 stages on 4 devices" in page
    document = plan_document(plan)
    assert document["devices"] == [one["device"] for one in simulation_document(simulation)["devices"]]
    assert (document["placement"], document["replicas"]) == ([0, 3], [3, 1])
    assert len(document["totals"]["device_bubbles"]) == len(document["devices"])
    texts = [item.text for item in draw_stage_graph(plan).items if isinstance(item, Text)]
    assert [text.partition(",")[0] for text in texts if text.startswith("device")] == ["devices 0-2", "device 3"]
    assert str(plan).startswith("2 stages on 4 devices")


def test_balance_is_that_of_devices() -> None:
    """Two parts of one device's stage count as one; each replica in turn has a part of its stage."""
    plan = make_plan(3)  # 3, 6 and 9 ms
    assert plan_figures(replace(plan, placement=(0, 0, 1))).slowest_to_mean == pytest.approx(1)
    assert plan_figures(plan).slowest_to_mean == pytest.approx(1.5)
    shared = replace(make_plan(2), replica_devices=(("cpu",), ("cpu", "cpu")))  # 3, 6 / 2 and 6 / 2
    assert plan_figures(shared).slowest_to_mean == pytest.approx(1)


def test_a_share_of_the_threads_is_not_compared_with_the_model_alone() -> None:
    """A worker of two has half the threads; the model alone would have them all."""
    plan = make_plan(2)
    text = " ".join(one_device_text(fxpipe.tune(plan, schedules=["1f1b"], chunks=[4])).split())
    assert text.startswith("one device alone is not compared: a worker's share of the CPU's threads was measured")
    estimated = fxpipe.tune(replace(plan, estimated_for="NVIDIA H100"), schedules=["1f1b"], chunks=[4])
    assert "times as fast" in one_device_text(estimated)


def test_estimates_are_of_that_hardware_alone() -> None:
    """The devices that run are the CPU's, the seconds an H100's: its kernels, and the Python of a host of GPUs."""
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(16, 64)
    options: dict[str, Any] = {"example_args": (x,), "chunks": 4, "progress": False}
    for name, devices in (("h100", ["cpu", "cpu"]), ("cpu", ["cuda:0", "cuda:1"])):
        here = fxpipe.plan(model, devices=devices, hardware=name, **options)
        there = fxpipe.plan(model, 2, hardware=name, **options)
        assert list(here.devices) == devices
        assert fxpipe.simulate(here).step_seconds == fxpipe.simulate(there).step_seconds
        assert [stage.action_seconds for stage in here.stages] == [stage.action_seconds for stage in there.stages]
        assert [stage.host for stage in here.stages] == [stage.host for stage in there.stages]


def test_the_report_says_that_the_host_bounds_the_step() -> None:
    plan = drawn_plan(2)
    page = report_page(plan)
    assert "bound by the host" not in page
    slow = HostCost(forward=1.0, backward=1.0, action=1e-4, runs_ahead=True)
    bound = replace(plan, stages=tuple(replace(stage, host=slow) for stage in plan.stages))
    note = fxpipe.simulate(bound).host_note
    assert note.startswith("bound by the host for")
    assert note in " ".join(str(bound).split())
    assert f"The step is {note}." in report_page(bound)


def result(chunks: int, seconds: float, **options: Any) -> CandidateResult:
    return CandidateResult("1f1b", chunks, 1, step_seconds=seconds, **options)


def test_a_row_that_could_be_faster_than_the_choice_says_by_how_much() -> None:
    best = result(4, 1.0, plan=make_plan(2))
    assert "≥" not in str(Tuning(best, (best,), 8, ("cpu", "cpu")))
    slower = str(Tuning(best, (best, result(8, 1.2, why=NO_SHORTER)), 8, ("cpu", "cpu")))
    assert slower.endswith("≥: lower bound, with perfectly even stages; not simulated")
    faster = str(Tuning(best, (best, result(8, 0.95, why=NO_SHORTER)), 8, ("cpu", "cpu")))
    assert "even stages, at most 5.0 % shorter than the chosen step; not simulated" in faster
