"""Pipeline x data on the devices of a cluster, as the tuner chooses it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.plan_hardware import hardware
from torch import nn

import fxpipe
from fxpipe.cluster import Link
from fxpipe.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from fxpipe.planning.tuning.candidates import Tuning

X = torch.zeros(32, 64)
FOUR = replace(hardware(Link(1e12)), devices_per_node=2, nodes=2)


def deep(width: int = 64) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])


def tune(**options: Any) -> Tuning:
    usual = {"schedules": ["1f1b"], "stages_per_device": [1], "data_parallel": "auto", "hardware": FOUR}
    return fxpipe.tune(deep(), **{"example_args": (X,)} | usual | options)


def test_the_best_is_the_best_of_all_numbers_and_orders_of_replicas():
    tuning = tune(chunks=[1, 2, 4, 8])
    steps = {}
    for data in (1, 2, 4):
        for mesh in (("data", "pipe"), ("pipe", "data")):
            for chunks in (1, 2, 4, 8):
                plan = fxpipe.plan(
                    deep(), example_args=(X,), hardware=FOUR, data_parallel=data, mesh=mesh, chunks=chunks
                )
                steps[data, mesh, chunks] = fxpipe.simulate(plan).step_seconds
    assert tuning.best.step_seconds <= 1.1 * min(steps.values())
    best = tuning.best
    assert best.step_seconds == pytest.approx(steps[best.data_parallel, best.mesh, best.chunks])
    assert {row.data_parallel for row in tuning.rows} == {1, 2, 4}
    assert {row.mesh for row in tuning.rows if row.data_parallel == 2} == {("data", "pipe"), ("pipe", "data")}
    assert {row.mesh for row in tuning.rows if row.data_parallel in (1, 4)} == {("data", "pipe")}  # they do not differ


def test_slow_networks_lead_to_pipelines_and_fast_ones_to_replicas():
    slow = replace(FOUR, between=Link(1e3), within=Link(1e3))
    fast = replace(FOUR, between=Link(1e15), within=Link(1e15))
    assert tune(hardware=slow).best.data_parallel == 1
    assert tune(hardware=fast).best.data_parallel == 4


def test_where_only_the_network_is_slow_the_dimension_that_sends_less_crosses_it():
    # Activations are as large as weights where samples are as many as features: eight samples, and of 64.
    network = replace(FOUR, between=Link(1e6))
    assert tune(hardware=network, data_parallel=2, chunks=[2]).best.mesh == ("pipe", "data")
    many = torch.zeros(4096, 8)
    wide = fxpipe.tune(deep(8), hardware=network, data_parallel=2, chunks=[2], schedules=["1f1b"], example_args=(many,))
    assert wide.best.mesh == ("data", "pipe")


def test_the_order_of_replicas_can_be_said():
    rows = tune(mesh=("data", "pipe"), data_parallel=2).rows
    assert {(row.data_parallel, row.mesh) for row in rows} == {(2, ("data", "pipe"))}


def test_replicas_that_cannot_hold_the_parameters_are_not_tried():
    parameters = 8 * (64 * 64 + 64) * 4
    tight = replace(FOUR, memory=int(0.6 * 4 * parameters / 0.94))  # with gradients and the state of Adam: two devices
    assert {row.data_parallel for row in tune(hardware=tight).rows} == {1, 2}
    tighter = replace(FOUR, memory=int(0.1 * 4 * parameters))
    with pytest.raises(MemoryLimitError, match="no number of replicas fits into memory: parameters, gradients and"):
        tune(hardware=tighter)


def test_a_mini_batch_that_does_not_divide_leaves_fewer_numbers():
    assert {row.data_parallel for row in tune(example_args=(X[:6],)).rows} == {1, 2}
    assert {row.data_parallel for row in tune(batch_size=2).rows} == {1, 2}


def test_the_table_says_pipeline_x_data():
    text = str(tune())
    assert "pipeline x data" in text
    assert "mini-batches of 32 on 4 x cuda" in text
    assert "1 x 4" in text
    assert "2 x 2, pipe outside" in text
    assert "pipeline x data" not in str(tune(data_parallel=1))


def test_a_plan_keeps_its_replicas_where_it_is_tuned():
    plan = fxpipe.plan(deep(), example_args=(X,), hardware=FOUR, data_parallel=2, chunks=4)
    tuning = fxpipe.tune(plan, schedules=["1f1b", "gpipe"])
    assert {row.data_parallel for row in tuning.rows} == {2}
    assert tuning.batch == 32
    assert tuning.best.step_seconds <= fxpipe.simulate(plan).step_seconds
    assert fxpipe.tune(plan, batch_size=64).best.plan.batch == 32


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"hardware": None, "devices": ["cpu"] * 4}, ArgumentError, "data_parallel='auto' without hardware"),
        ({"data_parallel": "all"}, ArgumentTypeError, "data_parallel='all': expected 'auto' or a whole number of"),
        ({"devices": ["cuda:0"] * 3}, ArgumentError, "devices: .*a cluster of 2 nodes with 2 devices each: give 4"),
    ],
)
def test_what_cannot_be_is_one_clear_error(options, error, words):
    with pytest.raises(error, match=words):
        tune(**options)
