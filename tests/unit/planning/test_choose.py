"""What planning decides, through the public API: cuts within memory, recomputation, balance, order, and by what."""

import contextlib
import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.oracle import closing
from helpers.plan_models import (
    BATCH,
    CHUNKS,
    Deep,
    assert_trains_like,
    assert_within,
    bottleneck,
    deep_profile,
    needs,
    planned,
    rows,
)
from torch import nn

import fxpipe
from fxpipe.errors import MemoryLimitError
from fxpipe.hardware import HARDWARE
from fxpipe.profiling import Seconds
from fxpipe.scheduling import ActionKind


def recomputed(pipe: Any) -> set[int]:
    """The stages that ran a micro-batch's forward again in the last step."""
    return {record.action.stage for record in pipe.last_step.actions if record.action.kind is ActionKind.RECOMPUTE}


def test_where_all_fits_nobody_recomputes() -> None:
    free = planned()
    plan = planned(memory_limit=max(needs(free)))
    assert plan.checkpoint == "never"
    assert [stage.nodes for stage in plan.stages] == [stage.nodes for stage in free.stages]
    assert [stage.memory_limit for stage in plan.stages] == [max(needs(free))] * 3
    assert (free.balance, plan.balance) == ("block", "optimal")


def test_the_least_limit_at_which_nobody_recomputes_moves_the_cut() -> None:
    """Rather a slower cut than one that does not fit; rather a move of the cut than recomputation."""
    free = planned()
    limit = max(needs(free)) - 1
    never = planned(memory_limit=limit, checkpoint="never")
    assert_within(never)
    assert never.checkpoint == "never"
    assert [stage.nodes for stage in never.stages] != [stage.nodes for stage in free.stages]
    auto = planned(memory_limit=limit)
    assert_within(auto)
    assert bottleneck(auto)["optimal"] <= bottleneck(never)["optimal"]


def test_stages_that_do_not_fit_recompute_and_train_like_the_plain_model() -> None:
    limit = int(max(needs(planned())) * 0.8)
    plain = Deep()
    options: dict[str, Any] = {"profile": deep_profile(), "optimizer_state": 1.0, "memory_limit": limit}
    pipe = fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 3, CHUNKS, example_args=(rows(),), **options)
    with closing(pipe):
        assert_within(pipe.plan)
        assert set(pipe.plan.modes) == {"always", "never"}
        assert pipe.plan.modes[-1] == "never"  # it has one micro-batch in flight
        assert_trains_like(plain, pipe, lambda: (rows(),))
        assert recomputed(pipe) == {j for j, mode in enumerate(pipe.plan.modes) if mode == "always"}


@pytest.mark.parametrize(
    ("schedule", "checkpoint"), each_once(["1f1b", "gpipe"], ["auto", "never", "always", "except_last"])
)
def test_what_is_planned_fits_by_the_plans_own_word(schedule: str, checkpoint: str) -> None:
    """From where all fits easily down to where nothing does."""
    options = {"schedule": schedule, "checkpoint": checkpoint}
    largest, fitted, refused = max(needs(planned(**options))), 0, 0
    for share in (1.1, 0.95, 0.85, 0.75, 0.65, 0.4):
        try:
            plan = planned(memory_limit=int(share * largest), **options)
        except MemoryLimitError:
            refused += 1
        else:
            assert not refused, "a higher limit was refused"
            assert_within(plan)
            assert plan.checkpoint == checkpoint or checkpoint == "auto"
            fitted += 1
    assert fitted
    assert refused


def refusal(**options: Any) -> str:
    with pytest.raises(MemoryLimitError) as caught:
        planned(**options)
    return str(caught.value)


def remedies(message: str, per_device: int = 1) -> list[dict[str, Any]]:
    """What it says would fit, as arguments of `plan`."""
    said = re.search(r"What would fit: (.*)\.$", message)
    assert said is not None, message
    found: list[dict[str, Any]] = []
    for words in said[1].split("; or "):
        if words == "let stages recompute":
            found.append({"checkpoint": "auto"})
        elif words == "use balance='optimal'":
            found.append({"balance": "optimal"})
        elif devices := re.fullmatch(r"use (\d+) devices", words):
            found.append({"stages": per_device * int(devices[1])})
        else:
            chunks = re.fullmatch(r"use chunks=(\d+) \(micro-batches of (\d+)\)", words)
            assert chunks is not None, words
            assert -(-BATCH // int(chunks[1])) == int(chunks[2])
            found.append({"chunks": int(chunks[1])})
    return found


@pytest.mark.parametrize(
    ("options", "share", "kinds"),
    [
        ({"checkpoint": "never"}, 0.7, {"checkpoint", "stages", "chunks"}),
        ({"checkpoint": "never", "schedule": "gpipe"}, 0.8, {"checkpoint", "stages"}),
        ({"checkpoint": "auto"}, 0.6, {"stages", "chunks"}),
        ({"checkpoint": "except_last"}, 0.8, {"stages", "chunks"}),
        ({"checkpoint": "always", "schedule": "gpipe"}, 0.9, {"stages", "chunks"}),
        ({"balance": "block", "checkpoint": "never"}, 0.7, {"checkpoint", "stages", "chunks"}),
        ({"balance": "block"}, 0.6, {"stages", "chunks"}),
        ({"balance": [8, 8, 8]}, 0.6, {"chunks"}),
        ({"balance": ["layers.2"]}, 0.6, {"chunks"}),
        ({"pin": {"layers.0": 0, "layers.5": 0}, "memory_limit": 3_340}, 1.0, {"chunks"}),
        ({"stages_per_device": 3, "stages": 6, "checkpoint": "never"}, 2.6, {"checkpoint", "stages", "chunks"}),
        ({"schedule": "zbv", "stages": 4, "checkpoint": "never"}, 1.1, {"checkpoint", "stages", "chunks"}),
    ],
)
def test_every_remedy_that_is_named_works(options: dict[str, Any], share: float, kinds: set[str]) -> None:
    """`share`: of what a stage needs where nothing is limited, a device has. With pins the host bounds that cut."""
    if "memory_limit" not in options:
        options |= {"memory_limit": int(share * max(needs(planned(**options))))}
    found = remedies(refusal(**options), {"zbv": 2}.get(options.get("schedule"), options.get("stages_per_device", 1)))
    assert {key for remedy in found for key in remedy} - {"balance"} == kinds  # that depends on measured seconds
    for remedy in found:
        assert_within(planned(**options | remedy))


def test_smaller_micro_batches_are_cut_anew_where_time_decides() -> None:
    """A head with a fixed cost: the smaller the micro-batch, the more of the model is before it."""
    profile = deep_profile()
    *rest, last = profile.nodes
    heavy = replace(last, forward=Seconds(fixed=200e-6), backward=Seconds())
    grows = [replace(cost, forward=Seconds(per_sample=5e-6), backward=Seconds(per_sample=15e-6)) for cost in rest]
    options = {"profile": replace(profile, nodes=(*grows, heavy)), "balance": "block", "stages": 2}
    cuts = {chunks: len(planned(chunks=chunks, **options).stages[1].nodes) for chunks in (2, 4, 8)}
    assert cuts[2] > cuts[4] > cuts[8]
    before = {chunks: max(needs(planned(chunks=chunks, **options, checkpoint="always"))) for chunks in (2, 4, 8)}
    for limit in range(min(before.values()), before[2], 400):
        try:
            planned(chunks=2, **options, memory_limit=limit)
        except MemoryLimitError as error:
            for remedy in remedies(str(error)) if "What would fit" in str(error) else ():
                assert_within(planned(memory_limit=limit, **options | {"chunks": 2} | remedy))


def test_nothing_that_was_tried_would_fit() -> None:
    message = refusal(memory_limit=1000)
    assert "The problem: node 'layers_1' alone needs 1.6 KiB, more than any stage may take." in message
    assert message.endswith("Nothing that was tried would fit: the model needs devices with more memory.")


def test_what_is_refused_can_be_caught_as_what_it_is() -> None:
    for error in (fxpipe.errors.PartitionError, fxpipe.errors.FxpipeError, ValueError):
        with pytest.raises(error, match="fits into memory"):
            planned(memory_limit="1KiB")


def test_unequal_limits_move_the_cut() -> None:
    largest = max(needs(planned(2)))
    even, first, second = (
        planned(2, memory_limit=limits, checkpoint="never")
        for limits in ([largest, largest], [2 * largest, int(0.7 * largest)], [int(0.9 * largest), largest])
    )
    for plan in (even, first, second):
        assert_within(plan)
    assert len(first.stages[0].nodes) > len(even.stages[0].nodes) > len(second.stages[0].nodes)
    assert [stage.memory_limit for stage in second.stages] == [int(0.9 * largest), largest]


def test_a_device_may_be_without_a_limit() -> None:
    largest = max(needs(planned(2)))
    plan = planned(2, memory_limit=[int(0.5 * largest), None], checkpoint="auto")
    assert_within(plan)
    assert [stage.memory_limit for stage in plan.stages] == [int(0.5 * largest), None]
    assert plan.modes[1] == "never"  # there is no need


@pytest.mark.parametrize(
    "options",
    [{"balance": "block"}, {"balance": [8, 8, 8]}, {"balance": ["layers.1", "layers.3"]}, {"balance": ["layers.1"]}],
    ids=["block", "counts", "names", "a name"],
)
def test_a_cut_that_is_given_stays_and_its_stages_recompute(options: dict[str, Any]) -> None:
    free = planned(**options)
    plan = planned(**options, memory_limit=int(0.85 * max(needs(free))))
    assert_within(plan)
    assert [stage.nodes for stage in plan.stages] == [stage.nodes for stage in free.stages]
    assert plan.balance == free.balance
    assert plan.modes[0] == "always"
    assert plan.modes[2] == "never"


class Lopsided(Layered, large=lambda: nn.ModuleList(nn.Linear(64, 64) for _ in range(2))):
    """All parameters are in the first layers, and all time is in the last ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.large:
            x = layer(x)
        for _ in range(12):
            x = torch.tanh(x)
        return x


def of_each_worker(plan: fxpipe.Plan, figures: list[int]) -> list[int]:
    return [sum(f for f, k in zip(figures, plan.placement, strict=True) if k == own) for own in {*plan.placement}]


def test_stages_that_fit_together_need_not_each_fit_into_an_even_share() -> None:
    """Two stages on one device: one holds parameters, one nearly nothing. They were refused."""
    x, options = torch.randn(BATCH, 64), {"chunks": CHUNKS, "hardware": "cpu", "stages_per_device": 2}
    free = fxpipe.plan(Lopsided(), 2, example_args=(x,), balance=["large"], memory_limit="1GiB", **options)
    needed = needs(free)
    limit = sum(needed) + 8
    assert max(needed) > 1.5 * limit / 2
    plan = fxpipe.plan(Lopsided(), 2, example_args=(x,), balance=["large"], memory_limit=limit, **options)
    assert plan.placement == (0, 0)
    assert [stage.nodes for stage in plan.stages] == [stage.nodes for stage in free.stages]
    assert_within(plan)
    assert of_each_worker(plan, [stage.memory_limit or 0 for stage in plan.stages])[0] <= limit
    with pytest.raises(MemoryLimitError) as caught:
        fxpipe.plan(Lopsided(), 2, example_args=(x,), balance=["large"], memory_limit=limit // 4, **options)
    assert str(caught.value).startswith("stages on one device share its memory, here as even parts of it:\nno cut")


@pytest.mark.parametrize("stages", [4, 6])
def test_a_device_is_never_promised_twice(stages: int) -> None:
    """From where all fits easily down to where nothing does: stages of a worker fit into its memory together."""
    free = planned(stages, stages_per_device=2)
    largest, fitted = max(of_each_worker(free, needs(free))), 0
    for share in (1.05, 0.95, 0.85, 0.75, 0.6, 0.3):
        with contextlib.suppress(MemoryLimitError):
            plan = planned(stages, stages_per_device=2, memory_limit=int(share * largest))
            assert_within(plan)
            assert max(of_each_worker(plan, needs(plan))) <= share * largest
            fitted += 1
    assert 0 < fitted < 6


def test_chunks_are_halved_down_to_one_sample_and_no_further() -> None:
    """7 samples: micro-batches of 4, 2, 1."""
    x = torch.randn(7, 4, 8)
    options: dict[str, Any] = {"example_args": (x,), "profile": deep_profile(), "checkpoint": "always"}
    whole = fxpipe.plan(Deep(), 1, chunks=2, **options)
    assert whole.micro_batch == 4
    limit = int(whole.memory(0, b=1))
    with pytest.raises(MemoryLimitError, match=r"use chunks=8 \(micro-batches of 1\)"):
        fxpipe.plan(Deep(), 1, chunks=2, memory_limit=limit, **options)
    plan = fxpipe.plan(Deep(), 1, chunks=8, memory_limit=limit, **options)
    assert plan.micro_batch == 1
    assert_within(plan)


def test_no_more_devices_are_tried_than_a_node_without_a_network_has() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    hardware = replace(HARDWARE["h100"], between=None, devices_per_node=4)
    with pytest.raises(MemoryLimitError, match="Nothing that was tried would fit"):
        fxpipe.plan(model, 4, hardware=hardware, memory_limit="1MiB", example_args=(torch.randn(8, 256),))
