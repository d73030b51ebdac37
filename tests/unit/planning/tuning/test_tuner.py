"""`fxpipe.tune`, and what is left to it by chunks="auto" and schedule="auto"."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import assert_same_gradients, assert_step
from helpers.tuning_settings import BATCH, Net, settings_for
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from fxpipe.planning.options.parse import COMPARED_SCHEDULES, place_stages
from fxpipe.planning.passes import prepare_profiled, trace_and_profile
from fxpipe.planning.tuning.candidates import (
    SAME_STEP_TOLERANCE,
    CandidateResult,
    candidates_of_model,
    order_for_table,
    rank_fitting,
)
from fxpipe.profiling import Profile, Seconds


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def profile(model: Net, x: torch.Tensor) -> Profile:
    """Milliseconds instead of what these small nodes take, with a fixed part, so that small micro-batches cost more."""
    found = fxpipe.profile(fxpipe.trace(model, (x,)), (x,), hardware="cpu")
    nodes = []
    for place, cost in enumerate(found.nodes):
        times = 1 + place % 3
        forward = Seconds(1e-4 * times, 4e-4 * times)
        nodes.append(replace(cost, forward=forward, backward=forward + forward, weight=forward))
    return replace(found, nodes=tuple(nodes), estimated_for="")


@pytest.mark.parametrize("devices", [2, 3])
def test_the_best_is_what_trying_all_of_them_finds(model: Net, x: torch.Tensor, profile: Profile, devices: int) -> None:
    workers = ["cpu"] * devices
    tuning = fxpipe.tune(model, workers, example_args=(x,), profile=profile, stages_per_device=[1, 2])
    usual = settings_for(workers, profile)
    studied = trace_and_profile(model, (x,), {}, usual)
    steps = {}
    for one in candidates_of_model(COMPARED_SCHEDULES, (1, 2, 4, 8), (1, 2)):
        placement = place_stages(devices, one.stages_per_device, one.schedule, one.chunks, None)
        settings = replace(usual, schedule=one.schedule, chunks=one.chunks, placement=placement)
        plan = prepare_profiled(studied, settings).plan
        steps[one.schedule, one.chunks, one.stages_per_device] = fxpipe.simulate(plan).step_seconds
    # A single sample is refused by batch norm, so that no plan of it can be chosen.
    least = min(seconds for (_, chunks, _), seconds in steps.items() if chunks < BATCH)
    best = tuning.best
    assert best.step_seconds == pytest.approx(steps[best.schedule, best.chunks, best.stages_per_device])
    assert least <= best.step_seconds * (1 + 1e-9)
    assert best.step_seconds <= (1 + SAME_STEP_TOLERANCE) * least
    for row in tuning.rows:  # a bound is none if a real step is below it
        if row.plan is None and row.step_seconds:
            assert row.step_seconds <= steps[row.schedule, row.chunks, row.stages_per_device] * (1 + 1e-9)


def test_every_row_says_what_its_plan_comes_to(model: Net, x: torch.Tensor, profile: Profile) -> None:
    tuning = fxpipe.tune(model, ["cpu", "cpu"], example_args=(x,), profile=profile, stages_per_device=[1, 2])
    cut = [row for row in tuning.rows if row.plan is not None]
    assert len(cut) >= 4
    assert tuning.best in tuning.rows
    for row in cut:
        assert row.plan is not None
        assert (row.plan.schedule, row.plan.chunks, row.plan.checkpoint) == (row.schedule, row.chunks, row.checkpoint)
        assert row.plan.micro_batch == -(-BATCH // row.chunks)
        assert row.plan.batch == BATCH
        assert len(row.plan.stages) == 2 * row.stages_per_device
        assert row.simulation.step_seconds == row.step_seconds == fxpipe.simulate(row.plan).step_seconds
        assert row.memory == tuple(memory.peak for memory in row.simulation.memory)
    tried = {(row.schedule, row.chunks, row.stages_per_device) for row in tuning.rows}
    everything = candidates_of_model(COMPARED_SCHEDULES, (1, 2, 4, 8), (1, 2))
    assert tried == {(one.schedule, one.chunks, one.stages_per_device) for one in everything}


def test_a_limit_changes_the_choice(model: Net, x: torch.Tensor, profile: Profile) -> None:
    tried: dict[str, Any] = {"example_args": (x,), "profile": profile, "stages_per_device": [1, 2]}
    free = fxpipe.tune(model, ["cpu", "cpu"], **tried)
    limit = int(free.best.peak) - 1
    tight = fxpipe.tune(model, ["cpu", "cpu"], memory_limit=limit, **tried)
    assert tight.best.peak <= limit < free.best.peak
    assert tight.best.step_seconds >= free.best.step_seconds
    lacking = [row for row in tight.rows if row.lacks]
    assert lacking
    assert all(row.lacks == max(row.memory) - limit for row in lacking)
    assert all(not row.fits for row in lacking)
    assert "lacks" in str(tight)
    assert tight.best.plan is not None
    assert sum(s.memory_limit or 0 for s in tight.best.plan.stages[:1]) <= limit


def test_where_nothing_fits_otherwise_stages_recompute(model: Net, x: torch.Tensor, profile: Profile) -> None:
    tried: dict[str, Any] = {"example_args": (x,), "profile": profile, "chunks": [4], "batch_size": 256}
    tried["stages_per_device"] = [1]
    free = fxpipe.tune(model, ["cpu", "cpu"], schedules=["gpipe"], **tried)
    always = fxpipe.tune(model, ["cpu", "cpu"], schedules=["gpipe"], checkpoint=["always"], **tried)
    assert free.best.checkpoint == "never"
    assert always.best.checkpoint == "always"
    assert always.best.peak < free.best.peak
    assert always.best.step_seconds > free.best.step_seconds
    between = always.best.peak + 0.1 * (free.best.peak - always.best.peak)
    found = fxpipe.tune(model, ["cpu", "cpu"], schedules=["gpipe"], memory_limit=between, **tried).best
    assert found.checkpoint != "never"
    assert found.peak <= between
    assert free.best.step_seconds < found.step_seconds <= always.best.step_seconds


def test_nothing_fits_says_what_is_the_least_that_would(model: Net, x: torch.Tensor, profile: Profile) -> None:
    tried: dict[str, Any] = {"example_args": (x,), "profile": profile, "schedules": ["1f1b"], "chunks": [2, 4]}
    with pytest.raises(MemoryLimitError, match="lacks least is schedule='1f1b'") as caught:
        fxpipe.tune(model, ["cpu", "cpu"], memory_limit="1KiB", **tried)
    told = str(caught.value).split("memory_limit='")[1].split("'")[0]
    assert fxpipe.tune(model, ["cpu", "cpu"], memory_limit=told, **tried).best.fits


def test_batch_size_is_that_of_training_not_of_the_example(model: Net, x: torch.Tensor, profile: Profile) -> None:
    tuning = fxpipe.tune(model, ["cpu", "cpu"], example_args=(x,), profile=profile, batch_size=64)
    assert tuning.batch == 64
    assert tuning.best.plan is not None
    assert tuning.best.plan.batch == 64
    assert max(row.chunks for row in tuning.rows) == 64
    with fxpipe.pipeline(model, **tuning.best.arguments) as pipe:
        pipe.forward_backward(torch.randn(64, 8), target=torch.randn(64, 4), loss_fn=F.mse_loss)
        assert pipe.plan.micro_batches == tuning.best.chunks


@pytest.mark.parametrize("options", [{}, {"schedule": "auto"}, {"schedule": "auto", "chunks": 2}, {"schedule": "zbv"}])
def test_what_is_left_to_the_tuner_trains_as_the_model_does(options: dict[str, Any], x: torch.Tensor) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    with fxpipe.pipeline(
        copy.deepcopy(plain), ["cpu", "cpu"], example_args=(x,), profile_budget=0.05, **options
    ) as pipe:
        assert pipe.plan.chunks == options.get("chunks", pipe.plan.chunks)
        assert pipe.plan.schedule == options.get("schedule") or options.get("schedule", "auto") == "auto"
        assert_step(pipe, plain, x, one_pass=True)
        assert_step(pipe, plain, x)


def test_auto_is_what_tune_would_choose(model: Net, x: torch.Tensor, profile: Profile) -> None:
    given: dict[str, Any] = {"devices": ["cpu", "cpu"], "example_args": (x,), "profile": profile}
    best = fxpipe.tune(model, **given).best
    plan = fxpipe.plan(model, schedule="auto", **given)
    assert (plan.schedule, plan.chunks, len(plan.stages)) == (best.schedule, best.chunks, 2 * best.stages_per_device)
    best = fxpipe.tune(model, schedules=["1f1b"], stages_per_device=[1], **given).best
    assert fxpipe.plan(model, schedule="1f1b", **given).chunks == best.chunks
    best = fxpipe.tune(model, chunks=[2], stages_per_device=[1], **given).best
    plan = fxpipe.plan(model, schedule="auto", chunks=2, stages_per_device=1, **given)
    assert (plan.schedule, plan.chunks, len(plan.stages)) == (best.schedule, 2, 2)


def test_auto_heeds_what_is_asked_for_beside_it(model: Net, x: torch.Tensor, profile: Profile) -> None:
    given: dict[str, Any] = {"devices": ["cpu", "cpu"], "example_args": (x,), "profile": profile, "schedule": "auto"}
    by_hand = fxpipe.plan(model, balance=["layers.1"], **given)
    assert by_hand.balance == "by hand"
    assert len(by_hand.stages) == 2
    pinned = fxpipe.plan(model, pin={"last": 0, "layers.3": 1}, **given)
    assert next(stage for stage in pinned.stages if any("last" in node for node in stage.nodes)).index != 1
    modes = fxpipe.plan(model, checkpoint=["always", "never"], **given)
    assert modes.checkpoint == ("always", "never")
    assert fxpipe.plan(model, checkpoint="always", **given).checkpoint == "always"


def test_a_plan_tries_what_needs_no_new_cut(model: Net, x: torch.Tensor, profile: Profile) -> None:
    plan = fxpipe.plan(model, 2, example_args=(x,), profile=profile, chunks=2)
    tuning = fxpipe.tune(plan)
    assert {row.schedule for row in tuning.rows} == {"gpipe", "1f1b", "zero_bubble", "zero_bubble_2p"}
    assert {row.chunks for row in tuning.rows} == {1, 2, 4, 8}
    for row in tuning.rows:
        assert row.plan is not None
        assert [stage.nodes for stage in row.plan.stages] == [stage.nodes for stage in plan.stages]
    assert tuning.best.step_seconds <= (1 + SAME_STEP_TOLERANCE) * min(row.step_seconds for row in tuning.rows)
    assert {row.schedule for row in fxpipe.tune(plan, schedules=["1f1b"], chunks=[4]).rows} == {"1f1b"}
    assert fxpipe.tune(plan, batch_size=64).best.plan.batch == 64
    with fxpipe.pipeline(model, plan=plan, schedule="auto") as pipe:
        assert pipe._fxpipe.settings.schedule == fxpipe.tune(plan, chunks=[2]).best.schedule
    with pytest.raises(MemoryLimitError, match="lacks least"):
        fxpipe.tune(plan, memory_limit=10)


def test_of_equally_long_steps_the_one_with_least_memory_is_chosen() -> None:
    plan: Any = object()
    rows = [
        CandidateResult("gpipe", 8, 1, plan=plan, step_seconds=1.0, memory=(30.0, 10.0)),
        CandidateResult("1f1b", 8, 1, plan=plan, step_seconds=1.0 + SAME_STEP_TOLERANCE / 2, memory=(20.0, 10.0)),
        CandidateResult("zbv", 8, 2, plan=plan, step_seconds=0.9, memory=(50.0, 10.0), lacks=5.0),
        CandidateResult("zero_bubble", 8, 1, why="too long", step_seconds=1.2),
        CandidateResult("zero_bubble", 4, 1, why="another graph"),
    ]
    assert [row.schedule for row in rank_fitting(rows)] == ["1f1b", "gpipe"]
    assert order_for_table(rows[::-1]) == (rows[0], rows[1], rows[3], rows[2], rows[4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": "1f1b"}, "schedules='1f1b': expected a list"),
        ({"schedules": ["inference"]}, "schedules='inference' is unknown"),
        ({"schedules": []}, "schedules is empty"),
        ({"chunks": [0]}, "chunks=0: expected a whole number, at least 1"),
        ({"chunks": 4}, "chunks=4: expected a list"),
        ({"checkpoint": ["sometimes"]}, "checkpoint='sometimes' is unknown"),
        ({"stages_per_device": [1.5]}, "stages_per_device=1.5: expected a whole number"),
        ({"batch_size": 0}, "batch_size"),
        ({"balance": [3, 4]}, "balance="),
        ({"example_args": ()}, "example_args is empty"),
        ({"schedules": ["zbv"], "stages_per_device": [1]}, "no schedule goes with"),
        ({"stages_per_device": [64]}, "nothing can be tried: 128 stages need as many nodes"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    model: Net, x: torch.Tensor, profile: Profile, options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"example_args": (x,), "profile": profile}
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        fxpipe.tune(model, ["cpu", "cpu"], **{**given, **options})


def test_beside_a_plan_nothing_that_makes_one_is_accepted(model: Net, x: torch.Tensor, profile: Profile) -> None:
    plan = fxpipe.plan(model, 2, example_args=(x,), profile=profile)
    given: list[dict[str, Any]] = [{"devices": ["cpu"]}, {"hardware": "h100"}, {"example_args": (x,)}]
    given += [{"optimizer_state": 0}, {"balance": "block"}, {"loss_fn": F.mse_loss}, {"in_dims": 0}]
    for options in given:
        with pytest.raises(ArgumentError, match=f"{next(iter(options))} beside a plan"):
            fxpipe.tune(plan, **options)
    with pytest.raises(ArgumentTypeError, match="model_or_plan is a str"):
        fxpipe.tune("model")


def _model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers, *more, nn.Linear(8, 4))


def _data(samples: int) -> torch.Tensor:
    return torch.randn(samples, 8, generator=torch.Generator().manual_seed(samples))


def _profile(model: nn.Module, call: float = 1e-3) -> Profile:
    """A millisecond for a sample and as much for a call: more micro-batches pay, but not with few samples."""
    x = _data(8)
    found = fxpipe.profile(fxpipe.trace(model, (x,)), (x,), hardware="cpu")
    forward = Seconds(call, 1e-3)
    nodes = [replace(cost, forward=forward, backward=forward + forward, weight=forward) for cost in found.nodes]
    return replace(found, nodes=tuple(nodes), estimated_for="")


def _pipe(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.pipeline(model, ["cpu", "cpu"], profile=_profile(model), **options)


def _chosen_first(samples: int, **options: Any) -> int:
    """By a pipe whose first mini-batch has so many samples."""
    with _pipe(_model(), **options) as pipe:
        pipe(_data(samples))
        return pipe.plan.micro_batches


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_tiny_first_mini_batch_does_not_bind_later_ones(evaluates: bool) -> None:
    plain = copy.deepcopy(model := _model())
    x, target = _data(32), torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    with _pipe(model) as pipe:
        with torch.set_grad_enabled(not evaluates):
            pipe(_data(2))
        before = pipe.plan
        loss = pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
        assert pipe.plan.micro_batches == _chosen_first(32) > before.micro_batches
        assert pipe.plan.batch == 32
        assert [stage.nodes for stage in pipe.plan.stages] == [stage.nodes for stage in before.stages]
        ran = {one.action.micro_batch for one in pipe.last_step.actions}
        assert len(ran) == pipe.plan.micro_batches
    expected = F.mse_loss(plain(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])


def test_smaller_mini_batches_and_those_that_evaluate_change_nothing() -> None:
    with _pipe(_model(), example_args=(_data(16),)) as pipe:
        plan = pipe.plan
        pipe(_data(4))
        pipe(_data(16))
        with torch.no_grad():
            pipe(_data(64))
        assert pipe.plan is plan


def test_an_evaluation_counts_until_there_is_training() -> None:
    with _pipe(_model()) as pipe:
        with torch.no_grad():
            pipe(_data(2))
            pipe(_data(64))
        assert pipe.plan.micro_batches == _chosen_first(64)
        pipe(_data(4))  # trains, and has fewer samples
        assert pipe.plan.batch == 4
        assert pipe.plan.micro_batches == _chosen_first(4)


def test_a_number_that_was_given_stays_and_one_that_the_model_refuses_is_not_chosen() -> None:
    """Batch norm takes no single value for each channel."""
    with _pipe(_model(), chunks=3) as pipe:
        pipe(_data(2))
        pipe(_data(32))
        assert pipe.plan.chunks == 3
    for more, chosen in (((), 8), ((nn.BatchNorm1d(8),), 4)):
        model = _model(*more)
        profile = _profile(model, call=0.0)
        with fxpipe.pipeline(model, ["cpu", "cpu"], profile=profile, example_args=(_data(4),)) as pipe:
            pipe(_data(8))
            assert pipe.plan.micro_batches == chosen


def test_where_nothing_fits_the_number_stays() -> None:
    model = _model()
    least = fxpipe.plan(model, 2, example_args=(_data(2),), profile=_profile(model), chunks=1)
    limit = max(int(least.memory(j, b=2)) for j in range(2))
    with _pipe(model, memory_limit=limit, checkpoint="never") as pipe:
        pipe(_data(2))
        before = pipe.plan
        pipe(_data(4096))
        assert pipe.plan is before
    assert _chosen_first(4096) != before.micro_batches
