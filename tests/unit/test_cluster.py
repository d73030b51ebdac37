"""Clusters: which link is between two devices, what a reduction of gradients takes, and plans that heed both."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.plan_hardware import hardware
from torch import nn

import fxpipe
from fxpipe.cluster import BUCKET_BYTES, MESHES, Cluster, Link, ReductionGroup
from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.hardware import HARDWARE, cluster_of, device_names

NEAR, FAR = Link(100e9, 1e-6), Link(10e9, 1e-5)
DATA_OUTSIDE, PIPE_OUTSIDE = MESHES


def cluster(
    pipe: int, data: int = 1, mesh: tuple[str, str] = DATA_OUTSIDE, size: int = 4, adapters: int = 4
) -> Cluster:
    return Cluster(size, adapters, NEAR, FAR, pipe, data, mesh)


def test_replicas_fill_nodes_as_a_device_mesh_of_that_order():
    whole = torch.arange(8)
    for mesh in MESHES:
        place = cluster(4, 2, mesh)
        as_mesh = whole.reshape(2, 4) if mesh == DATA_OUTSIDE else whole.reshape(4, 2).T
        assert [[place.rank(r, k) for k in range(4)] for r in range(2)] == as_mesh.tolist()
    assert [cluster(4, 2).node(r, 0) for r in range(2)] == [0, 1]
    assert [cluster(4, 2, PIPE_OUTSIDE).node(0, k) for k in range(4)] == [0, 0, 1, 1]


def test_data_outside_keeps_a_pipeline_in_its_node_and_pipe_outside_does_not():
    assert [cluster(4, 2).link(k, k + 1) for k in range(3)] == [NEAR] * 3
    assert [cluster(4, 2, PIPE_OUTSIDE).link(0, k) for k in range(4)] == [None, NEAR, FAR, FAR]
    assert cluster(4, 2, PIPE_OUTSIDE).crossings(1, 2) == 2
    assert cluster(4, 2).crossings(1, 2) == 0


def test_replicas_that_send_over_one_adapter_at_once_share_it():
    alone = cluster(4, 2, PIPE_OUTSIDE, adapters=4)
    assert alone.link(1, 2) == FAR
    shared = cluster(4, 2, PIPE_OUTSIDE, adapters=1)
    assert shared.link(1, 2) == Link(FAR.bytes_per_second / 2, FAR.latency)


def test_a_boundary_that_crosses_nodes_in_some_replica_costs_that_in_all():
    uneven = cluster(3, 2)  # devices 0 1 2 | 3 4 5 in nodes of four
    assert [uneven.crossings(k, k + 1) for k in range(2)] == [1, 0]
    assert uneven.link(0, 1) == FAR
    assert uneven.link(1, 2) == NEAR


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_ring_moves_2_n_minus_1_of_n_of_the_bytes(n):
    group = cluster(1, n, size=8).group(0)
    seconds = replace(group, hop=0.0, hop_within=0.0).seconds(1e9)
    assert seconds == pytest.approx(2 * (n - 1) / n * 1e9 / NEAR.bytes_per_second)
    steps = group.seconds(1e9) - seconds
    assert steps == pytest.approx(2 * (n - 1) * NEAR.latency)


def test_far_groups_go_at_the_share_of_the_adapters_that_their_members_have():
    one_each = cluster(4, 2)  # each device of node 0 with its own of node 1
    assert one_each.group(0) == ReductionGroup(2, 2, FAR.bytes_per_second, FAR.latency, NEAR.latency)
    one_adapter = cluster(4, 2, adapters=1)
    assert one_adapter.group(0).bytes_per_second == FAR.bytes_per_second / 4
    all_of_a_node = cluster(1, 8)
    assert all_of_a_node.group(0).bytes_per_second == 4 * FAR.bytes_per_second
    slow_inside = replace(all_of_a_node, within=Link(1e9))
    assert slow_inside.group(0).bytes_per_second == 1e9


def test_small_reductions_of_many_nodes_go_by_a_tree():
    group = ReductionGroup(64, 64, 1e9, 1e-5, 1e-6)
    assert group.seconds(8.0) == pytest.approx(2 * 6 * 1e-5, rel=1e-3)
    assert group.seconds(1e12) == pytest.approx(2 * 63 * (1e-5 + 1e3 / 64))  # of many bytes a ring moves fewer


def test_gradients_are_reduced_in_buckets_as_large_as_those_of_ddp():
    seconds, buckets = cluster(1, 4).reduction(0, 10 * BUCKET_BYTES)
    assert buckets == 10
    assert seconds == pytest.approx(10 * cluster(1, 4).group(0).seconds(BUCKET_BYTES))
    assert cluster(1, 4).reduction(0, 0) == (0.0, 1)
    assert cluster(4).reduction(0, 10**9) == (0.0, 1)


def deep(layers: int = 8, width: int = 64) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def planned(**options: Any) -> fxpipe.Plan:
    own = {"hardware": replace(hardware(), devices_per_node=2, nodes=4), "data_parallel": 4, "chunks": 4}
    return fxpipe.plan(deep(), **{"example_args": (torch.zeros(64, 64),)} | own | options)


def test_a_plan_for_a_cluster_has_the_stages_of_one_replica_and_its_part_of_the_mini_batch():
    plan = planned()
    assert (len(plan.stages), plan.data_parallel, plan.batch, plan.micro_batch) == (2, 4, 16, 4)
    assert plan.cluster == cluster_of(replace(hardware(), devices_per_node=2, nodes=4), 2, 4)
    assert fxpipe.simulate(plan).samples == 64
    alone = fxpipe.plan(deep(), 2, example_args=(torch.zeros(16, 64),), chunks=4, hardware=hardware())
    assert [stage.nodes for stage in plan.stages] == [stage.nodes for stage in alone.stages]
    assert [stage.forward_seconds for stage in plan.stages] == [stage.forward_seconds for stage in alone.stages]


def test_a_plan_of_no_replicas_is_simulated_with_some():
    plan = fxpipe.plan(deep(), 2, example_args=(torch.zeros(64, 64),), chunks=4, hardware=hardware(devices_per_node=2))
    four = fxpipe.simulate(plan, data_parallel=4)
    assert (four.samples, four.cluster.data) == (64, 4)
    assert fxpipe.simulate(plan, data_parallel=4, batch=256).samples == 256
    assert four.reduction_seconds == fxpipe.simulate(planned()).reduction_seconds > 0
    assert fxpipe.simulate(planned(), data_parallel=1) == fxpipe.simulate(plan)


def test_the_bytes_of_a_step_are_counted_within_nodes_and_between_them():
    boundary = 4 * 64 * 4  # of a micro-batch
    sent = 4 * 4 * 2 * boundary  # four replicas, four micro-batches, there and back
    gradients = 8 * (64 * 64 + 64) * 4
    within, between = fxpipe.simulate(planned()).traffic
    assert (within.pipeline, between.pipeline) == (sent, 0)
    assert (within.reduction, between.reduction) == (0, 2 * 3 * gradients)
    within, between = fxpipe.simulate(planned(mesh=PIPE_OUTSIDE)).traffic
    assert (within.pipeline, between.pipeline) == (0, sent)
    assert (within.reduction, between.reduction) == (3 * gradients, 3 * gradients)  # of four ways two cross


def test_plans_have_their_devices_by_the_number_of_replicas_and_stages():
    two = replace(hardware(), devices_per_node=2, nodes=None)
    assert len(planned(stages=4, hardware=two, data_parallel=2).workers) == 4
    assert len(planned(hardware=replace(two, nodes=1), data_parallel=1).workers) == 2
    with pytest.raises(ArgumentError, match="stages=4, but devices has 2 entries for each of 2 replicas"):
        planned(stages=4, hardware=two, data_parallel=2, devices=["cuda:0"] * 4)


def test_devices_of_a_cluster_have_the_names_that_they_have_in_their_nodes():
    assert device_names(replace(HARDWARE["h100"], nodes=2, devices_per_node=2), 4) == ["cuda:0", "cuda:1"] * 2
    assert device_names(HARDWARE["h100"], 10)[-1] == "cuda:9"
    assert {*device_names(HARDWARE["h100"], 1024)} == {f"cuda:{k}" for k in range(8)}  # torch has indices up to 127
    with pytest.raises(ArgumentError, match="no index above 127"):
        fxpipe.plan(deep(), 2, devices=["cuda:0", "cuda:128"], hardware="h100", example_args=(torch.zeros(8, 64),))


def test_a_plan_for_several_nodes_does_not_run_on_the_devices_of_one():
    with pytest.raises(ArgumentError, match=r"plan is for devices in 2 nodes.*DeviceMesh"):
        fxpipe.pipeline(deep(), plan=planned(data_parallel=2, mesh=PIPE_OUTSIDE, hardware=replace(
            HARDWARE["cpu"], nodes=2, devices_per_node=2)))  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data_parallel": 3}, ArgumentError, "data_parallel=3: 8 devices cannot be shared out evenly"),
        ({"data_parallel": 0}, ArgumentError, "data_parallel=0"),
        ({"data_parallel": "auto"}, ArgumentTypeError, "data_parallel='auto'"),
        ({"stages": 2, "data_parallel": 2}, ArgumentError, r"2 x 2 = 4, but .* 4 nodes with 2 devices each: give 8"),
        ({"stages": 4, "data_parallel": 1}, ArgumentError, r"devices: 4, but .* give 8"),
        ({"example_args": (torch.zeros(6, 64),)}, ArgumentError, "6 samples does not divide .*; give 4 or 8"),
        ({"mesh": ("data", "data")}, ArgumentError, r"mesh=\('data', 'data'\): expected"),
        ({"mesh": "data"}, ArgumentTypeError, "mesh='data'"),
        ({"hardware": None, "stages": 2}, ArgumentError, "data_parallel=4 without hardware"),
        (
            {"hardware": replace(hardware(), devices_per_node=2, nodes=4, between=None)},
            ArgumentError,
            r"no link between nodes \(between=None\), and 8 devices stand in 4 nodes of 2",
        ),
    ],
)
def test_what_cannot_be_on_a_cluster_is_one_clear_error(options, error, words):
    with pytest.raises(error, match=words):
        planned(**options)


def test_replicas_of_a_plan_that_knows_no_links_cannot_be_simulated():
    plan = fxpipe.plan(deep(), 2, example_args=(torch.zeros(8, 64),), profile_budget=0.01)
    with pytest.raises(ArgumentError, match="data_parallel=2 without hardware"):
        fxpipe.simulate(plan, data_parallel=2)
    with pytest.raises(ArgumentError, match="5 samples does not divide over 4 replicas"):
        fxpipe.simulate(planned(), batch=5)
    assert math.isclose(fxpipe.simulate(plan, data_parallel=2, hardware="cpu").samples, 8)
