"""Where tuning could go wrong without a word: modes and schedules of one's own."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tuning_settings import settings_for
from torch import nn

import fxpipe
from fxpipe.errors import MemoryLimitError
from fxpipe.planning.passes import trace_and_profile
from fxpipe.planning.plans import Plan
from fxpipe.planning.tuning import tuner
from fxpipe.planning.tuning.candidates import SAME_STEP_TOLERANCE, Candidate, CandidateResult, ModelPlans
from fxpipe.profiling import Profile

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
LARGE = 1 << 40


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


@pytest.fixture(scope="module")
def profile(model: nn.Module) -> Profile:
    return fxpipe.profile(fxpipe.trace(model, (X,)), (X,), hardware="cpu")


def test_modes_of_ones_own_stay_where_cuts_move_to_fit(model: nn.Module, profile: Profile) -> None:
    settings = settings_for(["cpu", "cpu"], profile, checkpoint=["always", "never"], memory_limit=LARGE)
    plans = ModelPlans(trace_and_profile(model, (X,), {}, settings), settings)
    candidate = Candidate("1f1b", 4, 1)
    for plan in (plans.plan(candidate, "never"), plans.plan(candidate, "never", is_limited=True)):
        assert plan is not None
        assert plan.checkpoint == ("always", "never")


def for_eight_only(m: int, n: int) -> str:
    if m != 8:
        raise ValueError("a table of 8 micro-batches is all there is")
    rows = (" ".join([f"{j}F{i}" for i in range(m)] + [f"{j}B{i}" for i in range(m)]) for j in range(n))
    return "\n".join(rows)


def for_four_or_more(m: int, n: int) -> str:
    order = range(m) if m >= 4 else range(m - 1)  # one is missing
    rows = (" ".join([f"{j}F{i}" for i in range(m)] + [f"{j}B{i}" for i in order]) for j in range(n))
    return "\n".join(rows)


@pytest.mark.parametrize(("function", "known"), [(for_eight_only, {8}), (for_four_or_more, {4, 8})])
def test_a_function_need_not_know_every_number_of_micro_batches(
    model: nn.Module, profile: Profile, function: Any, known: set[int]
) -> None:
    plan = fxpipe.plan(model, devices=["cpu", "cpu"], example_args=(X,), schedule=function, profile=profile)
    assert plan.chunks in known


def test_where_the_best_are_refused_others_are_tried_before_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is about as long as the second and takes less memory, but is no choice before the first has gone."""
    plan: Any = object()
    rows = [
        CandidateResult("1f1b", 1, 1, plan=plan, step_seconds=1.0, memory=(1.0,)),
        CandidateResult("1f1b", 2, 1, plan=plan, step_seconds=1.0 + 0.9 * SAME_STEP_TOLERANCE, memory=(9.0,)),
        CandidateResult("1f1b", 4, 1, plan=plan, step_seconds=1.0 + 1.5 * SAME_STEP_TOLERANCE, memory=(5.0,)),
    ]
    tried: list[int] = []

    def is_the_model(traced: Any, batch: int, args: Any, kwargs: Any, chunks: int, settings: Any) -> bool:
        tried.append(chunks)
        return chunks == 2

    monkeypatch.setattr(tuner, "holds_for_chunks", is_the_model)
    nothing: Any = None
    found = tuner._check_best(rows, SimpleNamespace(traced=nothing, batch=8), (), {}, nothing)
    assert tried == [1, 4, 2]
    assert [row.plan is None for row in found] == [True, False, True]


def test_a_plan_that_names_a_worker_far_away_is_damaged(model: nn.Module, profile: Profile, tmp_path: Any) -> None:
    plan = fxpipe.plan(model, 2, example_args=(X,), profile=profile)
    replace(plan, placement=(0, 10**12)).save(tmp_path / "plan.json")
    with pytest.raises(fxpipe.errors.ArgumentError, match="placement"):
        Plan.load(tmp_path / "plan.json")


def test_what_does_not_fit_is_not_explained_for_each_candidate(monkeypatch):
    monkeypatch.setattr("fxpipe.partitioning.optimal.memory_limit_error", lambda *args: pytest.fail("nobody reads it"))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with pytest.raises(MemoryLimitError, match="would do"):
        fxpipe.tune(
            model, ["cuda:0", "cuda:1"], example_args=(torch.randn(8, 64),), hardware="h100", memory_limit="40KiB"
        )
