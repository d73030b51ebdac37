"""Plans for streams count the versions of the weights: in memory, in limits, in simulations, and in what is printed."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import PartitionError

WIDTH, STAGES = 8, 3
WEIGHTS = 4 * WIDTH * WIDTH  # bytes of a stage
EXAMPLE = (torch.ones(6, WIDTH),)


def model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(STAGES)))


def planned(schedule, chunks="auto", **options):
    options = {
        "hardware": "cpu",
        "check": False,
        "balance": ["0", "1"],
        "optimizer_state": 1.0,
        "checkpoint": "never",
    } | options
    return fxpipe.plan(model(), STAGES, example_args=EXAMPLE, schedule=schedule, chunks=chunks, **options)


@pytest.mark.parametrize(
    ("schedule", "chunks", "versions", "in_flight"),
    [("pipedream", "auto", (3, 2, 1), (3, 2, 1)), ("pipedream_2bw", 4, (2, 2, 2), (3, 2, 1))],
)
def test_memory_is_that_of_1f1b_and_the_older_versions(schedule, chunks, versions, in_flight):
    plan = planned(schedule, chunks)
    assert plan.chunks == (1 if chunks == "auto" else chunks)
    other = planned("1f1b", 4)
    own, flush = (fxpipe.simulate(one, schedule=one.schedule, chunks=4) for one in (plan, other))
    for j in range(STAGES):
        assert plan.weight_versions(j) == versions[j]
        assert plan.in_flight(j) == in_flight[j]
        assert other.weight_versions(j) == 1
        assert plan.memory(j, b=2) - other.memory(j, b=2) == (versions[j] - 1) * WEIGHTS
    if schedule == "pipedream_2bw":
        assert [a.peak - b.peak for a, b in zip(own.memory, flush.memory, strict=True)] == [WEIGHTS] * STAGES
    assert f"versions of the weights, by stage: {', '.join(map(str, versions))}" in str(plan)
    assert "by stage:" not in str(other)


def test_versions_count_in_the_limit_of_memory_and_the_error_tells_how_many():
    plain = planned("1f1b", 1)
    limit = int(max(planned("pipedream").memory(j, b=6) for j in range(STAGES)))
    planned("pipedream", memory_limit=limit)
    assert int(plain.memory(0, b=6)) < limit - WEIGHTS
    with pytest.raises(PartitionError, match="3 versions"):
        planned("pipedream", memory_limit=limit - WEIGHTS)


def shortage(schedule, chunks, lack, **options):
    """The error where each stage lacks so many bytes of what the largest one takes."""
    plan = planned(schedule, chunks, **options)
    limit = int(max(plan.memory(j, b=plan.micro_batch) for j in range(STAGES))) - lack
    with pytest.raises(PartitionError) as caught:
        planned(schedule, chunks, memory_limit=limit, **options)
    return " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    ("lack", "fitting"),
    [
        (1, "2 of 3 in stage 0, 2 of 2 in stage 1, 1 of 1"),
        (WEIGHTS + 1, "1 of 3 in stage 0, 1 of 2 in stage 1, 1 of 1"),
    ],
)
def test_where_memory_is_too_little_for_the_versions_the_error_tells_how_many_fit(lack, fitting):
    text = shortage("pipedream", "auto", lack)
    assert f"Versions of the weights, for the mini-batches in flight, that would fit: {fitting} in stage 2." in text
    size = "1 B" if lack == 1 else f"{lack} B"
    assert f"or raise the memory limit of each stage by {size}" in text


def test_the_error_names_schedules_with_fewer_versions_that_fit():
    text = shortage("pipedream", "auto", 1)
    assert "use schedule='pipedream_2bw', chunks=3 (at most 2 versions)" in text
    options = {"schedule": "pipedream_2bw", "chunks": 3}
    limit = int(max(planned("pipedream").memory(j, b=6) for j in range(STAGES))) - 1
    planned(memory_limit=limit, **options)
    other = shortage("pipedream_2bw", 3, 1)
    assert "1 of 2 in stage 0, 1 of 2 in stage 1, 2 of 2 in stage 2" in other
    assert "use schedule='1f1b', chunks=3 (one version, with a flush)" in other
    assert "Versions of the weights" not in shortage("1f1b", 3, 1)


def replicated(replicas, **options):
    plan = planned("pipedream", **options)
    return replace(plan, replica_devices=tuple(("cpu",) * count for count in replicas))


def test_versions_of_replicas_count_once_more_where_a_round_is_updated_while_others_run():
    plan = replicated((3, 2, 1))
    assert [plan.weight_versions(j) for j in range(STAGES)] == [4, 3, 1]
    assert [plan.in_flight(j) for j in range(STAGES)] == [3, 2, 1]
    one = planned("pipedream")
    for j, more in enumerate((1, 1, 0)):  # versions; a replica has as many in flight as a stage alone
        assert plan.memory(j, b=6) - one.memory(j, b=6) == more * WEIGHTS
    assert "versions of the weights, by stage: 4, 3, 1" in str(plan)
    simulated = fxpipe.simulate(plan)
    assert simulated.steady is not None
    assert len(simulated.devices) == 6
