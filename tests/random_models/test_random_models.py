"""Models made at random, cut at random, run at random: always the plain model. And the judge of `tools/stress.py`."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from helpers.every_cut import EveryCut
from helpers.random_graphs import ANY_MODEL_AND_STEP, random_model

from random_models import judge as judging
from random_models.case import GROUPS, TABLE, Batch, Case, Line, draw
from random_models.judge import judge
from random_models.reads import READERS, SOURCES, USES
from random_models.shrinking import shrunk
from random_models.worker import Worker


@hypothesis.given(**ANY_MODEL_AND_STEP, data=st.data())
@hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))
def test_any_model_in_any_stages_is_the_plain_model(program, data, chunks, schedule, checkpoint):
    model, args = random_model(program)
    # What order the sums of many views of one tensor have, autograd decides late; so a tolerance for all.
    names = tuple(name for name, _ in model.named_parameters())
    cuts = EveryCut(model, *args, loose=names)
    hypothesis.assume(cuts.allowed)
    places = data.draw(st.sets(st.sampled_from(cuts.allowed), min_size=1, max_size=4))
    if cuts.traced.update is None:  # the stages run here without what changes once for the mini-batch
        cuts.check((0, *sorted(places)), chunks, schedule, checkpoint, seed=len(program))


# -- the judge -------------------------------------------------------------------------------------------------------

# A model of these may change a buffer in evaluation, which is then that of the mini-batch.
pytestmark = pytest.mark.filterwarnings("ignore:M changes the buffer")


TRAINING = (Batch(5, 4, "call", seed=1), Batch(7, 3, "step", seed=2), Batch(6, 4, "eval", seed=3))
MIXED = Case(
    tuple(Line(name, 0, 1, is_part) for name in ("linear", "average", "batch_norm", "dropout") for is_part in (0, 1)),
    tuple(dataclasses.replace(batch, samples=batch.samples + 3) for batch in TRAINING),
)


def test_the_judge_lets_a_right_pipeline_pass():
    assert judge(MIXED).kind == "right"
    assert judge(dataclasses.replace(MIXED, deferred=True, schedule="zbv", checkpoint="always")).kind == "right"


@pytest.mark.parametrize(
    ("part", "spoil"),
    [
        ("gradient", lambda model: next(iter(model.parameters())).grad.mul_(1.01)),
        ("gradient", lambda model: setattr(next(iter(model.parameters())), "grad", None)),
        ("buffer", lambda model: next(iter(model.buffers())).add_(0.01)),
        ("parameter", lambda model: next(iter(model.parameters())).data.mul_(1.01)),
        ("attribute", lambda model: setattr(model, "seen_9", torch.ones(2))),
    ],
)
def test_the_judge_finds_a_fault_in_each_part_of_a_step(part, spoil):
    verdict = judge(MIXED, spoil)
    assert verdict.kind == "wrong"
    assert verdict.detail.startswith(f"step 0 (call): {part}")


@pytest.mark.parametrize("mode", ["call", "step", "eval", "no_grad"])
def test_the_judge_finds_a_wrong_output(monkeypatch, mode):
    run = judging.Trial._pipe_step

    def wrong(self, pipe, inputs, batch):
        output = run(self, pipe, inputs, batch)
        return output | {"value": output["value"] * 1.01}

    monkeypatch.setattr(judging.Trial, "_pipe_step", wrong)
    verdict = judge(Case((Line("linear", 0, 0),), (Batch(4, 3, mode),)))
    assert (verdict.kind, "output" in verdict.detail) == ("wrong", True)


# What a pipeline reads for each micro-batch; a loss of products of means; an attribute made of random numbers.
RIGHT = {
    "a mask in the rest of forward": 40252,
    "the loss of a router beside a memory bank": 50182,
    "an attribute of a first call with dropout": 50264,
    "Python in training, a graph in evaluation": 300949,
    "what the rest of forward draws": 302534,
}


@pytest.fixture
def accumulates(monkeypatch):
    """One of these models has a memory bank, which is taken as in gradient accumulation instead of refused."""
    monkeypatch.setattr("fxpipe.tracing.strategies.refuse_remembered_samples", lambda traced: None)


@pytest.mark.parametrize("seed", RIGHT.values(), ids=[*RIGHT])
def test_the_judge_knows_what_else_is_right(seed, accumulates):
    assert judge(draw(seed)).kind == "right"


def test_values_of_inputs_are_the_mini_batchs_unless_their_line_runs_as_python(monkeypatch, accumulates):
    case = draw(RIGHT["a mask in the rest of forward"])
    monkeypatch.setattr(judging, "_python", lambda case, pipe, assembly=None: judging.Python())
    assert judge(case).kind == "wrong"


def test_a_step_that_is_refused_must_change_nothing(monkeypatch):
    from fxpipe.errors import DecisionError

    def refuses(self, pipe, inputs, batch):
        inputs["x"].detach().add_(self.change)
        raise DecisionError("no")

    monkeypatch.setattr(judging.Trial, "_pipe_step", refuses)
    case = Case((Line("linear", 0, 0),), TRAINING[:1])
    for change, kind in ((0.0, "right"), (1.0, "wrong")):
        monkeypatch.setattr(judging.Trial, "change", change, raising=False)
        assert judge(case).kind == kind


def test_an_exception_that_the_plain_model_does_not_raise_is_a_crash(monkeypatch):
    def fails(self, pipe, inputs, batch):
        raise KeyError("x")

    monkeypatch.setattr(judging.Trial, "_pipe_step", fails)
    assert judge(Case((Line("linear", 0, 0),), TRAINING[:1])).kind == "crashes"


def test_seeds_make_the_same_case_again_and_cases_survive_as_text():
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert all(Case.from_json(draw(seed).to_json()) == draw(seed) for seed in range(50))
    drawn = {line.name for seed in range(3000) for line in draw(seed).program}
    assert drawn >= {name for group in GROUPS if group != "reads" for name in GROUPS[group]}


# Each way to read, each kind of tensor and each use, though not each with each other.
READS = sorted(
    {
        f"read_{[*SOURCES][(i + shift) % len(SOURCES)]}_{reader}_{[*USES][(i + 2 * shift) % len(USES)]}"
        for i, reader in enumerate(READERS)
        for shift in range(2)
    }
)


@pytest.mark.parametrize("name", [*(name for name in TABLE if not name.startswith("read_")), *READS])
def test_each_operation_runs_in_plain_torch_and_means_the_same_in_micro_batches(name):
    operation = TABLE[name]
    for is_part in {False, not operation.needs_root}:
        case = Case((Line("linear", 0, 0), Line(name, 0, 1, is_part)), TRAINING)
        for text in judging.plain_differences(case):
            assert not text or operation.per_part or operation.is_random or operation.mixes


def test_a_fault_is_made_as_small_as_it_can_be():
    guilty = Line("relu_", 0, 0)
    program = (*(Line("linear", k, k) for k in range(4)), guilty, *(Line("add", k, k) for k in range(4)))
    case = Case(program, TRAINING, 4, 3, "zbv", "always", input_gradient=True)

    def verdict_of(case):
        return {"kind": "wrong" if any(line.name == "relu_" for line in case.program) else "right", "detail": "output"}

    small = shrunk(case, verdict_of(case), verdict_of)
    assert small == Case((guilty,), TRAINING[:1], chunks=2)


def test_a_case_that_crashes_or_hangs_is_a_verdict_and_the_next_goes_on():
    worker = Worker(limit=120.0)
    good = Case((Line("linear", 0, 0),), TRAINING[:1])
    try:
        unheard = worker.judge(Case((Line("unheard-of", 0, 0),), TRAINING))
        assert (unheard["kind"], "unheard-of" in unheard["detail"]) == ("crashes", True)
        assert worker.judge(good)["kind"] == "right"
        worker.limit = 0.001
        hanging = worker.judge(good)
        assert (hanging["kind"], "; File " in hanging["detail"]) == ("hangs", True)  # it says where
    finally:
        worker.close()
