"""PipeDream's planner over graphs: which stages have how many replicas, what is shown of them, what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.layered import Layered
from helpers.plan_hardware import hardware, narrow_then_wide
from torch import nn

import fxpipe
from fxpipe.cluster import Cluster, Link
from fxpipe.errors import ArgumentError
from fxpipe.planning.options.pipeline_options import PipelineOptions, check_replicas, make_settings
from fxpipe.planning.passes import prepare_profiled, trace_and_profile
from fxpipe.planning.replication import bandwidth_levels

X = torch.zeros(24, 4)
CUDA = [f"cuda:{k}" for k in range(16)]


def planned(model: nn.Module, devices: int = 4, x: torch.Tensor = X, **options: Any) -> fxpipe.Plan:
    usual = {"hardware": hardware(Link(1e9)), "chunks": 6, "optimizer_state": 0, "balance": "pipedream"}
    return fxpipe.plan(model, devices=CUDA[:devices], example_args=(x,), **usual | options)


@pytest.fixture(scope="module")
def unequal() -> fxpipe.Plan:
    plan = planned(narrow_then_wide(8192))
    assert plan.replicas == (3, 1)
    return plan


def test_what_takes_time_is_replicated_and_what_has_weights_is_not(unequal):
    assert unequal.cluster.replicas == (3, 1)
    assert unequal.cluster.devices == 4
    assert unequal.balance == "pipedream"
    assert unequal.devices == ("cuda:0", "cuda:3")  # the first one of each stage
    small, large = (stage.parameter_bytes for stage in unequal.stages)
    assert large > 50 * small


def test_replicas_take_micro_batches_in_turn_and_reduce_gradients(unequal):
    costs, _ = unequal.costs()
    assert costs[0].forward == unequal.stages[0].forward_seconds
    step = fxpipe.simulate(unequal)  # of six micro-batches
    rows = [[span.action.micro_batch for span in step.spans if span.device == d] for d in range(4)]
    assert [{*row} for row in rows] == [{0, 3}, {1, 4}, {2, 5}, {*range(6)}]
    assert step.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert [len(held.steps) > 1 for held in step.memory] == [True] * 4
    four = fxpipe.simulate(unequal, chunks=4)
    assert [sum(span.device == d for span in four.spans) for d in range(4)] == [4, 2, 2, 8]
    size = unequal.stages[0].gradient_bytes
    reduction, _ = Cluster(8, 8, Link(1e9), Link(1e9), pipe=2, replicas=(3, 1)).reduction(0, size)
    assert costs[0].reduction == reduction > 0
    assert costs[1].reduction == 0
    (reduced,) = step.reductions
    assert reduced.stage == 0
    assert reduced.end >= max(span.end for span in step.spans if span.action.stage == 0)
    within, between = step.traffic
    sent = sum(step.sent.values())
    assert {*step.sent} == {(d, 3) for d in range(3)} | {(3, d) for d in range(3)}
    assert (within.pipeline, within.reduction, between.pipeline) == (sent, pytest.approx(4 * size), 0)


def test_memory_counts_what_is_in_flight_on_one_replica():
    def wide_then_narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8192), nn.Linear(8192, 4), *(nn.Linear(4, 4) for _ in range(15)))

    plan = planned(wide_then_narrow())
    assert plan.replicas == (1, 3)
    assert [plan.in_flight(k) for k in range(2)] == [4, 1]
    kept = plan.stages[0].bytes.held.at({"b": plan.micro_batch})
    again = fxpipe.simulate(plan).memory[0].peak
    assert again <= plan.memory(0, plan.micro_batch)
    assert plan.memory(0, plan.micro_batch) >= plan.stages[0].parameter_bytes + 4 * kept


def test_the_plan_says_its_replicas_in_text_and_json_and_keeps_them(unequal, tmp_path):
    assert "replicas 3-1: the devices of a stage take micro-batches in turn" in str(unequal)
    assert "balance pipedream" in str(unequal)
    unequal.save(tmp_path / "plan.json")
    assert fxpipe.Plan.load(tmp_path / "plan.json") == unequal


def test_fast_links_lead_to_data_parallelism_as_it_is_asked_for():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    plan = planned(model, hardware=hardware(Link(1e12)))
    assert plan.replicas == (4,)
    assert plan.data_parallel == 4
    assert plan.batch == 6
    assert plan == planned(model, hardware=hardware(Link(1e12)), data_parallel=4)
    assert "replicas 4: data_parallel=4" in str(plan)


def test_a_slow_network_has_stages_in_nodes_and_replicas_within():
    nodes = replace(hardware(Link(1e12)), devices_per_node=2, nodes=2, between=Link(1e6))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    plan = planned(model, x=torch.zeros(8, 64), hardware=nodes, chunks=4)
    assert plan.replicas == (2, 2)
    assert plan.cluster.mesh == ("pipe", "data")  # what is reduced stays in a node
    steps = {
        mesh: fxpipe.simulate(
            planned(model, x=torch.zeros(8, 64), hardware=nodes, chunks=4, data_parallel=2, mesh=mesh)
        ).step_seconds
        for mesh in (("data", "pipe"), ("pipe", "data"))
    }
    assert fxpipe.simulate(plan).step_seconds == min(steps.values())


def test_levels_follow_the_nodes_and_their_adapters():
    nodes = replace(hardware(Link(1e12)), devices_per_node=8, adapters_per_node=4, between=Link(1e9))
    within, between = bandwidth_levels(nodes, 32)
    assert (within.workers, within.bytes_per_second) == (8, 1e12)
    assert (between.workers, between.bytes_per_second) == (4, 4e9)  # all adapters of a node
    assert [level.workers for level in bandwidth_levels(nodes, 8)] == [8]
    groups, between = bandwidth_levels(nodes, 12)  # the last node is not full
    assert (groups.workers, between.workers, between.bytes_per_second) == (4, 3, 2e9)
    assert [level.workers for level in bandwidth_levels(nodes, 9)] == [9]


def test_a_cut_in_forward_is_heeded():
    class Marked(Layered, parts=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(6))):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, part in enumerate(self.parts):
                x = part(x)
                if k == 0:
                    fxpipe.cut()
            return x

    plan = planned(Marked(), hardware=hardware(Link(1e12)))
    assert len(plan.stages[0].nodes) == 1
    assert plan.replicas == (1, 3)


def test_the_number_of_stages_can_be_said():
    plan = fxpipe.plan(
        narrow_then_wide(8192), 3, example_args=(X,), chunks=6, hardware=hardware(Link(1e9)), balance="pipedream"
    )
    assert plan.replicas == (1, 1, 1)


def test_the_tuner_has_the_balance_for_each_number_of_replicas():
    tuning = fxpipe.tune(
        narrow_then_wide(8192),
        CUDA[:4],
        example_args=(X,),
        balance="pipedream",
        data_parallel="auto",
        hardware=hardware(Link(1e9)),
        schedules=["1f1b"],
        stages_per_device=[1],
    )
    plans = [row.plan for row in tuning.rows if row.plan is not None]
    assert {plan.balance for plan in plans} == {"pipedream"}
    assert {plan.replicas for plan in plans} == {(1,) * 4, (2, 2), (4,)}


def test_chunks_and_schedule_are_chosen_for_the_stages_there_are():
    plan = planned(narrow_then_wide(8192), chunks="auto", schedule="auto")
    assert plan.replicas == (3, 1)
    assert len(plan.stages) == 2


def test_replicas_that_do_not_share_the_mini_batch_evenly_take_micro_batches_in_turn():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    plan = planned(model, x=torch.zeros(6, 4), hardware=hardware(Link(1e12)))
    assert plan.replicas == (4,)
    assert plan.data_parallel == 1
    assert plan.turns == (4,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pin": {"0": 0}}, "balance='pipedream' cannot heed pins"),
        ({"stages_per_device": 2}, "puts one stage on a device"),
        ({"schedule": "zbv"}, "puts one stage on a device"),
        ({"checkpoint": ["never"] * 4}, "checkpoint=.* has a mode for each stage"),
        ({"memory_limit": ["1GiB", "2GiB", "1GiB", "1GiB"]}, "memory_limit differs from device to device"),
        ({"schedule": lambda m, n: fxpipe.scheduling.make_schedule("gpipe", n, m)}, "this schedule is an order"),
    ],
)
def test_options_for_stages_that_are_not_known_are_refused(options, message):
    with pytest.raises(fxpipe.errors.FxpipeError, match=message):
        planned(narrow_then_wide(8192), **options)


def test_replicas_are_not_chosen_without_hardware_or_where_they_are_said():
    def chooses(runs_here: bool = False, **options: Any) -> bool:
        given = PipelineOptions(devices=["cpu"] * 4, **options)
        return make_settings(given, anywhere=True, runs_here=runs_here).chooses_replicas

    assert chooses(balance="pipedream", hardware="h100")
    assert not chooses(balance="pipedream")
    assert not chooses(balance="pipedream", hardware="h100", data_parallel=2)
    assert not chooses(hardware="h100")
    assert chooses(balance="pipedream", hardware="h100", runs_here=True)
    assert chooses(balance="pipedream", hardware="h100", schedule="pipedream", runs_here=True)  # a stream, too


def test_a_plan_with_replicas_does_not_run_as_something_else(unequal):
    model = narrow_then_wide(8192)
    with pytest.raises(ArgumentError, match=r"devices with 3-1 replicas.* but devices has 2 entries: give 4"):
        fxpipe.pipeline(model, ["cpu", "cpu"], plan=unequal)
    with pytest.raises(ArgumentError, match="3-1 replicas that take micro-batches in turn, and over processes only"):
        check_replicas(unequal, 1)
    equal = planned(model, hardware=hardware(Link(1e12)), data_parallel=2)
    with pytest.raises(ArgumentError, match=r"2-2 replicas of its stages, and here each has 1: .*\(2, 2\)"):
        check_replicas(equal, 1)


def test_unequal_replicas_stay_where_they_are(unequal):
    for other in ({"hardware": "h100"}, {"data_parallel": 2}, {"mesh": ("pipe", "data")}):
        with pytest.raises(ArgumentError, match="3-1 replicas, which were chosen for its devices: plan again"):
            fxpipe.simulate(unequal, **other)


def test_a_cluster_with_replicas_that_cannot_be_is_refused():
    for fields in ({"replicas": (2,)}, {"replicas": (2, 0)}, {"replicas": (2, 1), "data": 2}):
        with pytest.raises(ArgumentError, match="replicas="):
            Cluster(4, 4, None, None, pipe=2, **fields)


def test_replicas_over_processes_count_where_stages_begin():
    options = PipelineOptions(
        devices=CUDA[:2], hardware=hardware(Link(5e8)), chunks=6, balance="pipedream", data_parallel=1
    )
    settings = make_settings(options, anywhere=True)
    profiled = trace_and_profile(narrow_then_wide(8192), (X,), {}, settings)
    count = len(profiled.traced.nodes)
    (_, alone), (_, replicated) = (
        prepare_profiled(profiled, replace(settings, ranks_per_stage=ranks)).starts for ranks in (1, 4)
    )
    assert alone < count - 2  # by time
    assert replicated == count - 2  # what has the weights takes longest to reduce, and so gets nothing beside them
