"""The loss is costed like a node: on the last stage, in F, in its memory, and for any size and hardware."""

import gc
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, LossError
from fxpipe.profiling import Profile, Seconds
from fxpipe.profiling.loss_cost import MicroBatchLoss
from fxpipe.scheduling.actions import ActionKind
from fxpipe.tracing import trace

CLASSES, WIDTH, BATCH = 64, 8, 8


class Waits(torch.autograd.Function):
    """The same, after some milliseconds forward and back."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-3)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-3)
        return gradient


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count - 1)), nn.Linear(WIDTH, CLASSES))


def batch(samples: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, WIDTH), torch.randint(CLASSES, (samples,))


def profiled(loss_fn: Any = F.cross_entropy, target: Any = None, **options: Any) -> Profile:
    x, t = batch()
    traced = trace(layers(), (x,))
    return fxpipe.profile(
        traced, (x,), micro_batch=4, loss_fn=loss_fn, target=t if target is None else target, **options
    )


def with_known_seconds(loss: float, count: int = 8) -> tuple[nn.Module, torch.Tensor, Profile]:
    """A chain of nodes of 1 ms forward and 1 ms back, and a loss of so many ms each way."""
    x, t = batch()
    model = layers(count)
    measured = fxpipe.profile(trace(model, (x,)), (x,), micro_batch=4, loss_fn=F.cross_entropy, target=t)
    assert measured.loss is not None
    even = tuple(replace(n, forward=Seconds(1e-3), backward=Seconds(1e-3)) for n in measured.nodes)
    of_loss = replace(measured.loss, forward=Seconds(loss * 1e-3), backward=Seconds(loss * 1e-3))
    return model, x, replace(measured, nodes=even, loss=of_loss)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, t: Waits.apply(F.cross_entropy(out, t)),  # longer than a call of autograd by itself
        lambda out, t: (Waits.apply(F.cross_entropy(out, t, reduction="sum")), len(t)),
    ],
)
def test_a_profile_knows_what_the_loss_takes(loss_fn):
    costs = profiled(loss_fn)
    assert costs.loss is not None
    assert costs.loss.forward.at(4) > 0
    assert costs.loss.backward.at(4) > 0
    assert "loss" in str(costs).split()


def test_the_loss_holds_its_log_softmax_and_two_gradients_at_a_time():
    costs = profiled()
    assert costs.loss is not None
    at = costs.loss.working_bytes.subs(costs.batch, 16)
    logits = 16 * CLASSES * 4
    assert 3 * logits <= at <= 3.1 * logits


def test_a_loss_without_a_target_takes_the_output_alone():
    x, _ = batch()
    costs = fxpipe.profile(trace(layers(), (x,)), (x,), loss_fn=lambda out: out.square().mean())
    assert costs.loss is not None


# -- nothing is changed by it ------------------------------------------------------------------------------------------


class CountingLoss(Layered, calls=lambda: torch.zeros(()), scale=lambda: nn.Parameter(torch.ones(()))):
    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        target.clamp_(max=1)
        return F.cross_entropy(F.dropout(out) * self.scale, target)


def test_the_loss_leaves_everything_as_it_was():
    x, t = batch()
    model, loss_fn, before = layers(), CountingLoss(), t.clone()
    traced = trace(model, (x,))
    state = torch.get_rng_state()
    fxpipe.profile(traced, (x,), micro_batch=4, loss_fn=loss_fn, target=t)
    assert loss_fn.calls == 0
    assert loss_fn.scale.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(t, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("loss_fn", "target", "error", "message"),
    [
        (F.cross_entropy, torch.zeros(3, dtype=torch.long), ArgumentError, r"shape \(3,\), but the inputs hold 8"),
        (nn.CrossEntropyLoss, torch.zeros(8, dtype=torch.long), ArgumentTypeError, "the class CrossEntropyLoss"),
        (None, torch.zeros(8), ArgumentError, "target without loss_fn"),
        (7, None, ArgumentTypeError, "loss_fn is an int"),
        (lambda out, t: out, torch.zeros(8), LossError, "expected a 0-dim floating point tensor"),
        (lambda out, t: out[t], torch.full((8,), 99), IndexError, "out of bounds"),
    ],
)
def test_what_is_no_loss_is_refused(loss_fn, target, error, message):
    x, _ = batch()
    with pytest.raises(error, match=message):
        fxpipe.profile(trace(layers(), (x,)), (x,), loss_fn=loss_fn, target=target)


def test_an_error_of_the_loss_says_why_it_was_called():
    def broken(out: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of mine")

    x, _ = batch()
    with pytest.raises(ZeroDivisionError) as raised:
        fxpipe.plan(layers(), 2, example_args=(x,), loss_fn=broken)
    assert "called to find out what it costs" in raised.value.__notes__[0]


class Distances(Layered, lin=WIDTH):
    def forward(self, x):
        z = self.lin(x)
        return (torch.cdist(z, z) - torch.eye(len(z), device=z.device)).mean()


class OneAndTwoSeconds:
    """A clock: forward takes one, backward two."""

    def seconds(self, function: Any) -> Any:
        return 1.0, function()

    def backward_seconds(self, *_: Any) -> float:
        return 2.0


# Also of sizes that do not divide the mini-batch, and on another device than the recording's.
@pytest.mark.parametrize(("samples", "device"), [(2, "cpu"), (3, "meta"), (16, "cpu")])
def test_a_micro_batch_has_its_share_of_a_joint_tail(samples, device):
    traced = trace(Distances(), (batch()[0],), chunks=4)
    z = torch.randn(samples, WIDTH, requires_grad=True, device=device)
    values = {piece: samples if piece.target == torch.Tensor.size else z for piece in traced.pieces}
    loss = MicroBatchLoss.of(traced, None, BATCH, values, samples)
    assert [v if isinstance(v, int) else len(v) for v in loss.outputs if v is not None] == [BATCH, BATCH]
    assert loss.seconds(OneAndTwoSeconds(), 1) == pytest.approx((samples / BATCH, 2 * samples / BATCH))
    assert loss.probe()[0] >= BATCH * BATCH * 4


# -- the plan heeds it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "counts"), [(0, [4, 4]), (1, [4, 4]), (2, [5, 3]), (4, [6, 2])])
def test_the_cut_heeds_the_loss(loss, counts):
    model, x, costs = with_known_seconds(loss)
    plan = fxpipe.plan(model, 2, example_args=(x,), chunks=2, profile=costs)
    assert [len(stage.nodes) for stage in plan.stages] == counts
    assert plan.stages[0].loss_seconds == 0
    assert plan.stages[1].loss_seconds == pytest.approx(2e-3 * loss)
    assert plan.stages[1].backward_seconds == pytest.approx(1e-3 * counts[1])
    assert ("\nloss " in str(plan)) == (loss > 0)


def test_f_of_the_last_stage_takes_the_loss_and_r_does_not():
    model, x, costs = with_known_seconds(3)
    plan = fxpipe.plan(model, 2, example_args=(x,), chunks=2, profile=costs, balance=[4, 4], checkpoint="always")
    seconds = {
        (span.action.kind, span.action.stage): span.seconds - plan.stages[span.action.stage].action_seconds
        for span in fxpipe.simulate(plan).spans
    }
    assert seconds[ActionKind.FORWARD, 0] == pytest.approx(4e-3)
    assert seconds[ActionKind.FORWARD, 1] == pytest.approx(4e-3 + 6e-3)
    assert seconds[ActionKind.RECOMPUTE, 1] == pytest.approx(4e-3)
    assert seconds[ActionKind.BACKWARD, 1] == pytest.approx(4e-3)


def test_inference_takes_no_loss():
    model, x, costs = with_known_seconds(3)
    plan = fxpipe.plan(model, 2, example_args=(x,), chunks=2, profile=costs, balance=[4, 4])
    spans = fxpipe.simulate(plan, schedule="inference").spans
    assert max(span.seconds for span in spans) < 5e-3


def test_the_loss_grows_with_the_micro_batch_but_for_its_fixed_part():
    model, x, costs = with_known_seconds(0)
    assert costs.loss is not None
    costs = replace(costs, loss=replace(costs.loss, forward=Seconds(1e-3, 2e-3)))
    plan = fxpipe.plan(model, 2, example_args=(x,), chunks=2, profile=costs)
    assert plan.stages[-1].loss_seconds == pytest.approx(9e-3)
    assert fxpipe.simulate(plan, chunks=4).stages[-1].loss == pytest.approx(5e-3)


def test_the_memory_of_the_loss_counts_on_the_last_stage():
    x, t = batch()
    plain, of_loss = (
        fxpipe.plan(layers(), 2, example_args=(x,), chunks=2, balance=[2, 2], **options)
        for options in ({}, {"loss_fn": F.cross_entropy, "target": t})
    )
    assert of_loss.memory(0, b=4) == plain.memory(0, b=4)
    assert of_loss.memory(1, b=4) > plain.memory(1, b=4)


def test_the_loss_is_estimated_for_other_hardware(tmp_path):
    x, t = batch()
    planned = fxpipe.plan(layers(), 2, example_args=(x,), chunks=2, hardware="h100", loss_fn=F.cross_entropy, target=t)
    assert planned.stages[-1].loss_seconds > 0
    measured = fxpipe.plan(layers(), 2, example_args=(x,), chunks=2, loss_fn=F.cross_entropy, target=t)
    measured.save(tmp_path / "plan.json")
    loaded = fxpipe.Plan.load(tmp_path / "plan.json")
    assert loaded == measured
    elsewhere = fxpipe.simulate(loaded, hardware="h100").stages[-1]
    assert elsewhere.loss == pytest.approx(planned.stages[-1].loss_seconds)


def test_a_model_without_values_is_planned_with_its_loss():
    with torch.device("meta"):
        model, x, t = layers(), torch.empty(BATCH, WIDTH), torch.empty(BATCH, dtype=torch.long)
    plan = fxpipe.plan(model, 2, example_args=(x,), chunks=2, hardware="h100", loss_fn=F.cross_entropy, target=t)
    assert plan.stages[-1].loss_seconds > 0


def test_a_profile_that_knows_no_loss_is_refused_beside_one():
    x, t = batch()
    model = layers()
    costs = fxpipe.profile(trace(model, (x,)), (x,))
    with pytest.raises(ArgumentError, match="loss_fn and a profile that does not know what a loss costs"):
        fxpipe.plan(model, 2, example_args=(x,), profile=costs, loss_fn=F.cross_entropy, target=t)


def test_tuning_takes_the_loss_into_its_plans():
    x, t = batch()
    tuning = fxpipe.tune(layers(), ["cpu", "cpu"], example_args=(x,), loss_fn=F.cross_entropy, target=t, progress=False)
    assert tuning.best.plan is not None
    assert tuning.best.plan.stages[-1].loss_seconds > 0


@pytest.mark.parametrize("chunks", [2, "auto"])
def test_a_pipe_does_not_keep_the_example_target(chunks):
    x, t = batch()
    gone = weakref.ref(t)
    pipe = fxpipe.pipeline(layers(), ["cpu", "cpu"], chunks, example_args=(x,), loss_fn=F.cross_entropy, target=t)
    with pipe:
        assert pipe.plan.stages[-1].loss_seconds > 0
        del t
        gc.collect()
        assert gone() is None
        larger, target = batch(2 * BATCH)
        pipe.forward_backward(larger, loss_fn=F.cross_entropy, target=target)


def test_a_step_tells_what_the_loss_took():
    x, t = batch()
    with_loss = {"loss_fn": F.cross_entropy, "target": t}
    for planned in ({}, with_loss):
        pipe = fxpipe.pipeline(layers(), ["cpu", "cpu"], 4, example_args=(x,), **planned)
        try:
            pipe.forward_backward(x, **with_loss)
            step = pipe.last_step
            assert step is not None
            assert len(step.losses) == 4
            assert 0 < step.loss_seconds <= max(step.losses)
            assert "the loss took" in str(step)
            comparison = fxpipe.simulate(pipe.plan).compared(step)
            assert comparison.loss is not None
            assert comparison.loss.measured == pytest.approx(sum(step.losses))
            assert comparison.learns_loss == (not planned)
            assert ("does not know the loss" in str(comparison)) == (not planned)
            if not planned:
                assert comparison.loss.simulated == pytest.approx(sum(step.losses))
                assert comparison.step.simulated > fxpipe.simulate(pipe.plan).step_seconds
            F.cross_entropy(pipe(x), t).backward()
            assert pipe.last_step is not None
            assert pipe.last_step.losses == ()
        finally:
            pipe.close()


def test_a_step_tells_how_long_its_loss_was_verified():
    x, t = batch()
    with fxpipe.pipeline(layers(), ["cpu", "cpu"], 4, example_args=(x,)) as pipe:
        told = []
        for _ in range(2):
            pipe.forward_backward(x, target=t, loss_fn=F.cross_entropy)
            assert pipe.last_step is not None
            told.append((pipe.last_step.verification > 0, "then it was verified in" in str(pipe.last_step)))
    assert told == [(True, True), (False, False)]
