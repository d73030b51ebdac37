"""`fxpipe.simulate`: plans as they are and otherwise; and the simulator against published figures."""

import copy
import functools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.plan_hardware import without_host
from helpers.plan_models import Deep
from helpers.schedule_cases import any_case
from helpers.simulated_models import CUT, TABLE_5, Skipping, skipping
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe.cluster import Link
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import HARDWARE, Hardware, cluster_of
from fxpipe.planning.plans import Plan
from fxpipe.planning.plans.data import StagePlan
from fxpipe.planning.plans.simulate_plan import vary_plan
from fxpipe.runtime.step_record import ActionRecord, DeviceRecord, StepRecord
from fxpipe.scheduling import ActionKind, make_schedule, parse_schedule
from fxpipe.simulation import Simulation, StageCost, Transfer, simulate_schedule
from fxpipe.utils.text_table import bytes_of_limit
from fxpipe.utils.units import human_bytes

# -- published figures -------------------------------------------------------------------------------------------------

SETTINGS = pytest.mark.parametrize(
    ("p", "m", "layers", "f", "b", "w", "c", "one_f", "loops", "h1", "h2"),
    TABLE_5,
    ids=[f"{row[0]} devices, {row[1]} micro-batches, {row[3]} ms" for row in TABLE_5],
)


def chain_of(name: str, n: int, m: int, cost: StageCost, c: float, placement: Any = None) -> Simulation:
    """Equal stages, each of which sends to its neighbours for so many milliseconds."""
    ways = [Transfer(j, k, 1, c) for one in pairwise(range(n)) for j, k in (one, one[::-1])]
    return simulate_schedule(make_schedule(name, n, m, placement=placement), [cost] * n, ways)


@pytest.mark.slow
@SETTINGS
def test_bubble_rates_of_table_5(p, m, layers, f, b, w, c, one_f, loops, h1, h2):
    """Over the step: of 1F1B and ZB-H1. Of ZB-H2 over the longest time of a device, from its first action to its last:
    the authors' optimizer lets no device wait for the others."""
    cost, work = StageCost(f, b + w, weight=w), m * (f + b + w)
    assert round(1 - work / chain_of("1f1b", p, m, cost, c).step_seconds, 4) == one_f
    assert round(1 - work / chain_of("zero_bubble", p, m, cost, c).step_seconds, 4) == h1
    spans = chain_of("zero_bubble_2p", p, m, cost, c).spans
    times = [[time for s in spans if s.device == d for time in (s.start, s.end)] for d in range(p)]
    assert round(1 - work / max(of[-1] - of[0] for of in times), 4) == h2


# -- plans of equal stages: closed forms -------------------------------------------------------------------------------


def even_plan(placement: tuple[int, ...], m: int = 8, **fields: Any) -> Plan:
    """Stages of 1 second forward and 2 back, half of it for weights, that hold nothing."""
    stages = tuple(
        StagePlan(j, "cpu", (f"n{j}",), "", 1.0, 2.0, 0, 0, 0, weight_seconds=1.0) for j in range(len(placement))
    )
    return Plan(
        stages, (), ("cpu",) * len(placement), "gpipe", m, 1, "never", "by hand", "record", "", placement=placement,
        **fields,
    )  # fmt: skip


# -- memory ------------------------------------------------------------------------------------------------------------


@functools.cache
def planned() -> Plan:
    return skipping()


@pytest.mark.parametrize(
    ("name", "mode"), [("gpipe", "except_last"), ("1f1b", "always"), ("1f1b", "never"), ("zero_bubble", "always")]
)
def test_peaks_are_those_of_the_formulas_of_the_plan(name: str, mode: str) -> None:
    """Also of a plan that was made for another schedule and another mode; and their parts are those of the plan."""
    made, other = skipping(schedule=name, checkpoint=mode), vary_plan(planned(), schedule=name, checkpoint=mode)
    assert [stage.bytes for stage in other.stages] == [stage.bytes for stage in made.stages]
    assert [stage.activation_bytes for stage in other.stages] == [stage.activation_bytes for stage in made.stages]
    found = fxpipe.simulate(planned(), schedule=name, checkpoint=mode)
    assert len(found.memory) == len(made.stages)  # each stage has a device of its own
    for j, memory in enumerate(found.memory):
        stage, parts = made.stages[j], memory.at_peak
        assert memory.peak == made.memory(j, b=made.micro_batch) == other.memory(j, b=made.micro_batch)
        assert parts.total == memory.peak
        assert (parts.parameters, parts.gradients) == (stage.parameter_bytes, stage.gradient_bytes)
        assert parts.gradients + parts.optimizer == stage.state_bytes
        assert bool(parts.portals) == any(portal.target == j for portal in made.portals)


def test_parts_of_memory_over_time() -> None:
    cost = StageCost(1, 2, None, None, 100, 10, 20, saved_bytes=5, input_bytes=3, portal_bytes=2, working_bytes=1)
    (memory,) = simulate_schedule(make_schedule("gpipe", 1, 1), [cost]).memory
    held = [(p.parameters, p.gradients, p.optimizer, p.activations, p.portals, p.working) for _, p in memory.steps]
    assert held == [
        (100, 10, 20, 0, 0, 0),
        (100, 10, 20, 8, 2, 1),
        (100, 10, 20, 8, 2, 0),
        (100, 10, 20, 8, 2, 1),
        (100, 10, 20, 0, 0, 0),
    ]
    assert memory.at_peak is memory.steps[1][1]
    assert memory.peak == 141


def limited(limits: Sequence[int | None]) -> Plan:
    plan = planned()
    return replace(
        plan, stages=tuple(replace(s, memory_limit=limit) for s, limit in zip(plan.stages, limits, strict=True))
    )


def test_what_takes_all_of_its_limit_fits() -> None:
    peaks = [memory.peak for memory in fxpipe.simulate(planned()).memory]
    for less, fits in ((0, True), (1, False)):
        assert fxpipe.simulate(limited([peak - less for peak in peaks])).fits == (fits,) * 4


def test_a_plan_says_which_device_lacks_how_much() -> None:
    limits = [10_000_000, 9_000, 10_000_000, 10_000_000]
    small = limited(limits)
    peaks = [memory.peak for memory in fxpipe.simulate(small).memory]
    assert small.fits == (True, False, True, True)
    assert not small.fits
    assert (small.fits.needs, small.fits.limits) == (tuple(peaks), tuple(limits))
    over = f"does not fit: device 1 lacks {human_bytes(peaks[1] - 9_000)}, it needs {bytes_of_limit(peaks[1], 9_000)}"
    assert str(small.fits) == over
    assert over in " ".join(str(small).split())
    assert copy.deepcopy(small.fits).needs == pickle.loads(pickle.dumps(small.fits)).needs == tuple(peaks)

    roomy = limited([10**7] * 4)
    fullest = max(range(4), key=peaks.__getitem__)
    assert roomy.fits
    assert f"\nfits: device {fullest} needs {bytes_of_limit(peaks[fullest], 10**7)}" in str(roomy)

    unknown = limited([None] * 4)
    assert unknown.fits == (None,) * 4
    assert unknown.fits, "no device is known to lack memory"
    assert "fits" not in str(unknown)


# -- other micro-batches, other hardware -------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunks", "batch"), [(1, 8), (3, 8), (100, 8), (4, 24)])
def test_other_micro_batches_are_those_of_a_plan_made_for_them(chunks: int, batch: int) -> None:
    """Bytes exactly. Seconds to rounding: here they are those of launches, whatever the size."""
    ids = torch.zeros(batch, 5, dtype=torch.long)
    made = fxpipe.plan(Skipping(), 4, example_args=(ids,), chunks=chunks, balance=CUT, hardware="h100")
    other = vary_plan(planned(), chunks=chunks, batch=batch)
    assert (other.chunks, other.batch, other.micro_batch) == (made.chunks, made.batch, made.micro_batch)
    assert [portal.bytes for portal in other.portals] == [portal.bytes for portal in made.portals]
    assert [(s.bytes, s.size) for s in other.sendings] == [(s.bytes, s.size) for s in made.sendings]
    assert [s.sent_bytes for s in other.stages] == [s.sent_bytes for s in made.stages]
    one, two = fxpipe.simulate(made), fxpipe.simulate(planned(), chunks=chunks, batch=batch)
    assert two.step_seconds == pytest.approx(one.step_seconds)
    assert [memory.peak for memory in two.memory] == [memory.peak for memory in one.memory]
    assert two.samples == batch
    assert two.sent == one.sent


def assert_alike(one: Plan, two: Plan) -> None:
    for mine, yours in zip(one.stages, two.stages, strict=True):
        for name in ("forward_seconds", "backward_seconds", "weight_seconds", "update_seconds", "action_seconds"):
            assert getattr(mine, name) == pytest.approx(getattr(yours, name), rel=1e-9), name
        assert (mine.device, mine.memory_limit) == (yours.device, yours.memory_limit)
    assert one.sendings == two.sendings
    assert one.estimated_for == two.estimated_for


@pytest.mark.parametrize("name", ["h100", "cpu"])
def test_other_hardware_is_planning_for_that_hardware(name: str) -> None:
    """Of a plan that was measured here, and of one that was made for other hardware."""
    for plan in (skipping(hardware=None, profile_budget=0.01), planned()):
        assert_alike(vary_plan(plan, hardware=name), skipping(hardware=name))
        made, found = fxpipe.simulate(skipping(hardware=name)), fxpipe.simulate(plan, hardware=name)
        assert found.step_seconds == pytest.approx(made.step_seconds)
        assert (found.devices, found.limits, found.fits) == (made.devices, made.limits, made.fits)


def test_work_that_grows_takes_as_long_as_on_a_plan_made_for_it() -> None:
    """Of a machine that is slow, so that arithmetic counts: in every size, from a plan of one."""
    slow = Hardware("slow", {"float32": 1e6}, 1e6, memory=2**30, within=None, between=Link(1e6, 1e-3))
    x = torch.randn(8, 4, 8)

    def made(chunks: int, hardware: Any) -> Plan:
        return fxpipe.plan(Deep(), 3, example_args=(x,), chunks=chunks, balance=[8, 8, 8], hardware=hardware)

    one = made(4, "h100")
    for chunks in (2, 8):
        assert_alike(vary_plan(one, hardware=slow, chunks=chunks), made(chunks, slow))
        assert vary_plan(one, hardware=slow, chunks=chunks).stages[1].forward_seconds > 1e-3
    again = vary_plan(vary_plan(one, hardware=slow), chunks=2)  # by the part that is fixed and the part that grows
    assert again.stages[1].forward_seconds == pytest.approx(made(2, slow).stages[1].forward_seconds)


def test_a_plan_that_does_not_know_its_operations_says_so() -> None:
    with pytest.raises(ArgumentError, match=r"hardware='NVIDIA H100 SXM': the plan does not know .* fxpipe\.plan"):
        fxpipe.simulate(even_plan((0, 1)), hardware="h100")


def test_updates_take_what_it_takes_to_move_their_bytes() -> None:
    """Adam: parameters, gradients and twice as much state are read, and all but gradients written."""
    plan, known = planned(), HARDWARE["h100"]
    for stage in plan.stages:
        assert stage.state_bytes == 3 * stage.gradient_bytes > 0
        moved = 7 * stage.gradient_bytes
        assert stage.update_seconds == pytest.approx(moved / (known.bytes_per_second * known.memory_efficiency))
    found = fxpipe.simulate(plan)
    assert found.update_seconds == max(stage.update_seconds for stage in plan.stages)
    assert found.step_seconds == max(span.end for span in found.spans)
    within = fxpipe.simulate(plan, schedule=parse_schedule("0F0 0B0 0U0\n1F0 1B0 1U0\n2F0 2B0 2U0\n3F0 3B0 3U0"))
    updates = [span for span in within.spans if span.action.kind is ActionKind.UPDATE]
    assert [span.seconds for span in updates] == pytest.approx([stage.update_seconds for stage in plan.stages])
    assert within.update_seconds == 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_updates_that_overlap_end_the_rows_of_their_devices(schedule: str) -> None:
    """A device that has gone back updates at once, and does not wait for the others."""
    plan = planned()
    behind, within = (fxpipe.simulate(plan, schedule=schedule, updates=updates) for updates in (False, True))
    ends = {span.device: span.end for span in behind.spans}
    updates = [span for span in within.spans if span.action.kind is ActionKind.UPDATE]
    assert [str(span.action) for span in updates] == [f"{j}U{plan.chunks - 1}" for j in range(len(plan.stages))]
    for span in updates:
        assert (span.start, span.seconds) == pytest.approx((ends[span.device], plan.stages[span.device].update_seconds))
    assert within.update_seconds == 0
    last = max(ends[j] + stage.update_seconds for j, stage in enumerate(plan.stages))
    assert behind.step_seconds < within.step_seconds == pytest.approx(last)
    assert [memory.peak for memory in within.memory] == [memory.peak for memory in behind.memory]
    assert " 0U" not in str(behind)
    assert "U" in str(within)
    with pytest.raises(ArgumentError, match="updates=True over processes"):
        fxpipe.simulate(plan, updates=True, processes=True)


def test_a_simulation_with_updates_is_compared_with_a_step_that_has_some() -> None:
    model, x = Deep(), torch.randn(8, 8)
    with fxpipe.pipeline(model, ["cpu"] * 3, 4, example_args=(x,), balance=[8, 8, 8]) as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        pipe.forward_backward(x, loss_fn=lambda y: y.square().mean(), optimizer=optimizer)
        with_some = fxpipe.simulate(pipe.plan, updates=True).compared(pipe.last_step)
        without = fxpipe.simulate(pipe.plan).compared(pipe.last_step)
    assert with_some.kinds[ActionKind.UPDATE].measured > 0
    assert with_some.step.measured > without.step.measured


# -- the critical path -------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(any_case(), st.data())
def test_the_critical_path_goes_without_a_gap_from_beginning_to_end(case: Any, data: st.DataObject) -> None:
    schedule, stages, transfers, overlaps = case
    shared = st.lists(st.sampled_from("xy"), unique=True, max_size=2).map(tuple)
    transfers = [replace(way, over=data.draw(shared)) for way in transfers]
    found = simulate_schedule(schedule, stages, transfers, overlaps=overlaps)
    legs = found.legs
    assert legs[0].start == 0
    assert legs[-1].end == found.step_seconds
    assert all(one.end == two.start for one, two in pairwise(legs))
    assert sum(leg.seconds for leg in legs) == found.step_seconds
    assert sum(found.critical_shares.values()) == pytest.approx(1 if found.step_seconds else 0)
    for leg in legs:
        span = leg.span
        assert span in found.spans
        if leg.kind not in ("sending", "waiting"):
            assert (leg.kind, leg.start, leg.end) == (str(span.action.kind), span.start + span.receiving, span.end)
        elif overlaps:
            assert leg.end <= span.start
    assert [span.start for span in found.critical_path] == sorted(span.start for span in found.critical_path)


def test_the_critical_path_of_a_pipeline_that_waits_for_its_link() -> None:
    """Two micro-batches over a link that takes 10 s for each, forward only."""
    ways = [Transfer(0, 1, 1, 10.0)]
    found = simulate_schedule(make_schedule("inference", 2, 2), [StageCost(1, 1)] * 2, ways)
    legs = [(leg.kind, leg.start, leg.end) for leg in found.legs]
    assert legs == [("F", 0, 1), ("F", 1, 2), ("waiting", 2, 11), ("sending", 11, 21), ("F", 21, 22)]
    assert [str(span.action) for span in found.critical_path] == ["0F0", "0F1", "1F1"]
    assert found.critical_shares == pytest.approx({"sending": 10 / 22, "waiting": 9 / 22, "F": 3 / 22})
    copied = simulate_schedule(make_schedule("inference", 2, 2), [StageCost(1, 1)] * 2, ways, overlaps=False)
    assert [(leg.kind, leg.start, leg.end) for leg in copied.legs] == [
        ("F", 0, 1), ("sending", 1, 11), ("F", 11, 12), ("sending", 12, 22), ("F", 22, 23),
    ]  # fmt: skip


# -- links that share a way --------------------------------------------------------------------------------------------


def crossing(over: tuple[str, ...], overlaps: bool) -> Simulation:
    """Stages 0 and 1 both send to stage 2, for 4 s; stage 0 has ended 1 s earlier."""
    ways = [Transfer(0, 2, 1, 4.0, over), Transfer(1, 2, 1, 4.0, over), Transfer(1, 3, 1, 4.0, over)]
    return simulate_schedule(make_schedule("inference", 4, 1), [StageCost(1, 1)] * 4, ways, overlaps=overlaps)


def test_transfers_over_one_adapter_take_turns() -> None:
    """In the order in which they are handed over: 0 to 2 from 1 to 5, then 1 to 2 until 9, and 1 to 3 until 13."""
    apart, together = ([s.start for s in crossing(over, True).spans] for over in ((), ("adapter",)))
    assert apart == [0, 1, 6, 7]
    assert together == [0, 1, 9, 13]
    assert crossing(("adapter",), True).critical_shares["waiting"] > 0


def test_devices_that_copy_for_themselves_take_turns_at_an_adapter() -> None:
    """Stage 1 and stage 2 would both copy from 1 on; the second of them, which has 1 s of F less to wait for, waits."""
    ways = [Transfer(0, 1, 1, 4.0, ("a",)), Transfer(0, 2, 1, 4.0, ("a",))]
    schedule = parse_schedule("0F0 0F1\n1F0 1F1\n2F0 2F1")
    found = simulate_schedule(schedule, [StageCost(1, 1), StageCost(1, 1), StageCost(1, 1)], ways, overlaps=False)
    spans = {str(span.action): (span.start, span.end) for span in found.spans}
    # 1F0 copies from 1 to 5 and ends at 6, when 2F0 begins to copy, and so does 1F1, which was due first.
    assert spans["1F0"] == (1, 6)
    copying = sorted((s.start, s.start + s.receiving) for s in found.spans if s.receiving)
    assert all(one[1] <= two[0] for one, two in pairwise(copying))
    assert len(copying) == 4


def test_devices_of_a_node_share_its_adapters() -> None:
    four = replace(HARDWARE["h100"], devices_per_node=4, adapters_per_node=2)
    assert cluster_of(four, 8).adapters(0, 3) == ()
    assert cluster_of(four, 8).adapters(1, 4) == ("node 0 adapter 0 out", "node 1 adapter 0 in")
    assert cluster_of(four, 8).adapters(2, 7) == ("node 0 adapter 1 out", "node 1 adapter 1 in")
    assert cluster_of(HARDWARE["h100"], 16).adapters(7, 9) == ("node 0 adapter 7 out", "node 1 adapter 1 in")
    assert cluster_of(four, 8).adapters(4, 1) == ("node 1 adapter 0 out", "node 0 adapter 0 in")
    with pytest.raises(ArgumentError, match="adapters_per_node=0"):
        replace(four, adapters_per_node=0)
    plan = skipping(hardware=replace(HARDWARE["h100"], devices_per_node=2, adapters_per_node=1))
    over = {(way.source, way.target): way.over for way in plan.sendings}
    assert over[0, 1] == over[3, 2] == ()
    assert over[1, 2] == over[1, 3] == over[0, 3] == ("node 0 adapter 0 out", "node 1 adapter 0 in")
    assert over[2, 1] == ("node 1 adapter 0 out", "node 0 adapter 0 in")
    plan = without_host(plan)
    schedule, (costs, _) = plan.as_schedule(), plan.costs()
    free = [replace(way, over=()) for way in plan.sendings]
    shared = simulate_schedule(schedule, costs, plan.sendings)
    assert shared.step_seconds > simulate_schedule(schedule, costs, free).step_seconds


# -- bad arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"schedule": "zbv"}, ArgumentError, r"schedule='zbv' cannot run over .* 4 stages .* schedule='zbv'\)"),
        ({"schedule": "interleaved_1f1b"}, ArgumentError, r"cannot run over this plan.*fxpipe\.plan\(model"),
        ({"schedule": "fast"}, ArgumentError, "schedule='fast' is unknown; there are 'gpipe'"),
        ({"schedule": "0F0 0B0"}, ArgumentError, "a table for 1 stages, but there are 4"),
        ({"chunks": 0}, ArgumentError, "chunks=0: expected a whole number of micro-batches, at least 1"),
        ({"chunks": 2.5}, ArgumentTypeError, "chunks=2.5: expected a whole number of micro-batches"),
        ({"batch": 0}, ArgumentError, "batch=0: expected a whole number of samples, at least 1"),
        ({"batch": True}, ArgumentTypeError, "batch=True: expected a whole number of samples"),
        ({"checkpoint": "auto"}, ArgumentError, "checkpoint='auto' is unknown; there are 'always'"),
        ({"checkpoint": ["never"]}, ArgumentError, "has 1 modes for 4 stages"),
        ({"hardware": "h1000"}, ArgumentError, "hardware='h1000' is unknown; there are 'a100-80gb'"),
        ({"hardware": 3}, ArgumentTypeError, "hardware=3 is an int; expected"),
    ],
)
def test_a_bad_argument_is_one_clear_error(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fxpipe.simulate(planned(), **options)


def test_what_is_no_plan() -> None:
    with pytest.raises(ArgumentTypeError, match=r"plan is a Skipping; expected a fxpipe\.Plan"):
        fxpipe.simulate(Skipping())  # type: ignore[arg-type]


def test_a_table_of_ones_own_has_its_own_number_of_micro_batches() -> None:
    table = parse_schedule(str(make_schedule("gpipe", 4, 2)))
    found = fxpipe.simulate(planned(), schedule=table)
    assert found.schedule.micro_batches == 2
    assert found.step_seconds == fxpipe.simulate(planned(), schedule="gpipe", chunks=2).step_seconds
    with pytest.raises(ArgumentError, match="a table for 2 micro-batches, but there are 3"):
        fxpipe.simulate(planned(), schedule=table, chunks=3)


# -- beside what was measured ------------------------------------------------------------------------------------------


def as_measured(simulation: Simulation, times: float, on_core: float | None = None) -> StepRecord:
    """The record of a step that took so many times as long; its actions had a core for so many times their seconds."""
    actions = tuple(
        ActionRecord(s.action, times * s.start, times * s.end, s.device, 0.0, 0, 0, on_core and on_core * s.seconds)
        for s in simulation.spans
    )
    devices = tuple(DeviceRecord("cpu", times * busy, 0.0, 0, 0) for busy in simulation.busy)
    return StepRecord(simulation.schedule.name, actions, (), devices, 0.0)


def test_a_step_and_its_simulation_side_by_side() -> None:
    found = fxpipe.simulate(even_plan((0, 1), m=4))
    beside = found.compared(as_measured(found, 2.0))
    assert beside.step.ratio == pytest.approx(0.5)
    assert (beside.step.measured, beside.step.simulated) == (2 * found.step_seconds, found.step_seconds)
    assert [one.busy.simulated for one in beside.devices] == list(found.busy)
    assert [one.bubble.measured for one in beside.devices] == pytest.approx(list(found.bubble))
    assert {str(kind): pair.simulated for kind, pair in beside.kinds.items()} == {"F": 8, "B": 16}
    lines = str(beside).splitlines()
    assert lines[0] == "gpipe"
    assert lines[3].split() == ["step", "30.0", "s", "15.0", "s", "0.50"]
    assert lines[4].split() == ["device", "0", "cpu", "24.0", "s", "12.0", "s", "0.50", "20.0", "%", "20.0", "%"]


def test_a_busy_machine_is_told_from_a_wrong_plan() -> None:
    found = fxpipe.simulate(even_plan((0, 1), m=4))
    beside = found.compared(as_measured(found, 4.0, on_core=1.25))
    assert beside.core_share == pytest.approx(1.25 / 4)
    assert beside.on_core is not None
    assert beside.on_core.ratio == pytest.approx(0.8)
    assert str(beside).splitlines()[-2:] == [
        "The actions had a core for 31% of their time: others wanted it, too.",
        "On it they took 30.0 s, simulated 24.0 s: 0.80",
    ]
    for on_core in (4.0, None):  # a quiet machine, and GPUs
        beside = found.compared(as_measured(found, 4.0, on_core))
        assert beside.core_share == 1
        assert "core" not in str(beside)


def test_another_step_is_refused() -> None:
    plan = even_plan((0, 1), m=4)
    record = as_measured(fxpipe.simulate(plan), 1.0)
    with pytest.raises(ArgumentError, match=r"the step ran gpipe with 16 actions .* with 8 actions .* chunks"):
        fxpipe.simulate(plan, chunks=2).compared(record)
