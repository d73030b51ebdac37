"""A pipeline equals the plain model: outputs, loss, every gradient, every buffer, over several optimizer steps."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers.case_steps import BATCH, assert_evaluation, assert_training_steps, case_and_pipe, set_options
from helpers.layered import Layered
from helpers.models import BY_NAME, CASES
from helpers.oracle import assert_same_gradients, train_step
from torch import nn

import fxpipe
import fxpipe.errors
from fxpipe.scheduling import CHECKPOINTS, ActionKind, make_schedule

NAMES = [case.name for case in CASES]
MODES = [(schedule, checkpoint) for schedule in ("1f1b", "gpipe") for checkpoint in CHECKPOINTS]
PLACES = [(1, 1), (2, 1), (3, 1), (2, 2), (1, 3), (3, 2)]  # devices, stages of each


def _matrix():
    """Each pair of a model, devices and a number of micro-batches; three devices also on simulated accelerators."""
    for (k, (devices, per_device)), (i, name) in product(enumerate(PLACES), enumerate(NAMES)):
        marks = [pytest.mark.anywhere] if (devices, per_device) == (3, 1) else []
        yield pytest.param(k + i, name, devices, per_device, marks=marks, id=f"{name}-{devices}-{per_device}")


@pytest.mark.parametrize(("number", "name", "devices", "per_device"), [*_matrix()])
def test_steps_equal_the_plain_model(number, name, devices, per_device):
    """Those of `forward_backward` bit for bit, the drop-in's to a tolerance, with evaluation in between."""
    chunks, stages = (1, 3, 4)[number % 3], devices * per_device
    case, plain, pipe = case_and_pipe(name, devices, chunks, stages_per_device=per_device)
    by_stage = tuple(CHECKPOINTS[(j + number) % 3] for j in range(stages))
    modes = [*MODES[number % 2 :: 2], (("1f1b", "gpipe")[number % 2], by_stage)]
    with pipe:
        assert pipe.plan.placement == tuple(range(devices)) * per_device
        assert_training_steps(case, plain, pipe, modes, chunks)
        recomputed = {r.action.stage for r in pipe.last_step.actions if r.action.kind is ActionKind.RECOMPUTE}
        assert recomputed == {
            j for j, mode in enumerate(by_stage) if mode != "never" and (mode, chunks) != ("except_last", 1)
        }
        assert_evaluation(case, plain, pipe)
        assert_training_steps(case, plain, pipe, [("drop-in", CHECKPOINTS[number % 3]), ("drop-in", by_stage)], chunks)
        assert_evaluation(case, plain, pipe)
        assert len(pipe._fxpipe.graphs) == 2  # one for training and one for evaluation


# With stages on the same devices.
ALIKE = [
    ("zero_bubble", "zero_bubble_2p"),
    ("interleaved_1f1b", "interleaved_zero_bubble"),
    ("zbv", "dualpipev", "v_half", "v_min"),
]
WHOLE = ("interleaved_1f1b",)  # in one piece is the backward of it


def _schedules():
    """Each schedule with each model, and on simulated accelerators with one that draws no random numbers."""
    for schedules, (i, name) in product(ALIKE, enumerate(NAMES)):
        marks = [pytest.mark.anywhere] if name == "unet" else []
        yield pytest.param(i, name, schedules, marks=marks, id=f"{name}-{schedules[0]}")


@pytest.mark.parametrize(("number", "name", "schedules"), [*_schedules()])
def test_every_schedule_equals_the_plain_model(number, name, schedules):
    """Schedules that split backward, and those that are bound to a placement; the others are in every test."""
    case, plain, pipe = case_and_pipe(name, 2, 4, schedule=schedules[0])
    ways = [(4, "never"), (3, "except_last"), (1, "always")]
    with pipe:
        for k, schedule in enumerate(schedules):
            chunks, checkpoint = ways[(number + k) % 3]
            set_options(pipe, chunks=chunks)
            assert_training_steps(case, plain, pipe, [(schedule, checkpoint)], chunks)
            made = make_schedule(schedule, len(pipe.plan.stages), chunks, checkpoint, pipe.plan.placement)
            actions = {r.action for r in pipe.last_step.actions}
            assert actions == {action for row in made.rows for action in row}
            assert (ActionKind.WEIGHT in {action.kind for action in actions}) == (schedule not in WHOLE)


@pytest.mark.parametrize("drop_in", [True, False])
def test_inputs_that_require_grad_get_theirs(drop_in):
    case, plain, pipe = case_and_pipe("two_branch", 2, 3)
    with pipe:
        (x,), kwargs = case.inputs(BATCH)
        target = case.target(BATCH)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        before = ours * 1.0  # no leaf: the gradient goes on into the caller's graph
        case.loss(plain(theirs, **kwargs), target).backward()
        if drop_in:
            case.loss(pipe(before, **kwargs), target).backward()
        else:
            pipe.forward_backward(before, target=target, loss_fn=case.loss, **kwargs)
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_gradients_of_what_is_returned_twice_add_up():
    class Twice(Layered, first=4, last=4):
        def forward(self, x):
            h = self.last(self.first(x).tanh())
            return h, {"again": h}

    torch.manual_seed(1)
    model, x = Twice(), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        for one in (plain, pipe):
            first, again = one(x)
            (first.sum() + 3 * again["again"].square().sum()).backward()
        assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])


def test_a_model_without_random_nodes_leaves_the_generator_alone():
    case, _, pipe = case_and_pipe("unet", 2, 2)
    with pipe:
        args, _ = case.inputs(BATCH)
        before = torch.get_rng_state()
        pipe(*args)
        assert torch.equal(before, torch.get_rng_state())


def test_the_batch_in_another_dimension_may_be_viewed():
    class SequenceFirst(Layered, linear=(6, 4)):
        def forward(self, x):
            return self.linear(x.view(x.shape[0] * x.shape[1], 6)).view(x.shape[0], x.shape[1], 4)

    plain, x = SequenceFirst(), torch.randn(3, BATCH, 6)
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], 4, example_args=(x,), in_dims=1) as pipe:
        torch.testing.assert_close(pipe(x), plain(x))


def test_recomputing_comes_to_the_same_bits_where_no_grad_takes_other_kernels():
    """torch's LSTM on CPU runs another kernel under no_grad, 1e-8 away: a forward to be recomputed runs without it."""

    class Recurrent(Layered, lstm=lambda: nn.LSTM(6, 8, 2, batch_first=True), head=(8, 4)):
        def forward(self, x):
            return self.head(self.lstm(x)[0].mean(1))

    plain, x, target = Recurrent(), torch.randn(BATCH, 5, 6), torch.randn(BATCH, 4)
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], 3, example_args=(x,), balance=["lstm"]) as pipe:
        train_step(plain, (x,), {}, target, F.mse_loss, chunks=3, order="1f1b", seed=0, batch=BATCH)
        for checkpoint in CHECKPOINTS:
            set_options(pipe, checkpoint=checkpoint)
            pipe.zero_grad()
            pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
            assert_same_gradients(pipe, plain)


def test_a_pipe_that_first_evaluates_is_planned_for_training():
    case = BY_NAME["unet"]
    args, _ = case.inputs(BATCH)
    with fxpipe.pipeline(case.make(), ["cpu", "cpu"], 2) as pipe:
        with torch.no_grad():
            pipe(*args)
        assert all(stage.backward_seconds > 0 for stage in pipe.plan.stages)
        pipe.forward_backward(*args, target=case.target(BATCH), loss_fn=case.loss)
        assert len(pipe._fxpipe.graphs) == 2


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_buffers(layout):
    class Mixes(Layered, a=4, b=4, graph=lambda: getattr(torch.eye(4).roll(1, 0), layout)()):
        def forward(self, x):
            return self.b((self.graph @ self.a(x).t()).t())

    model, x = Mixes(), torch.randn(6, 4)
    want = model(x)
    wanted = torch.autograd.grad(want.square().sum(), list(model.parameters()))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 3, example_args=(x,)) as pipe:
        output = pipe(x)
        gradients = torch.autograd.grad(output.square().sum(), list(pipe.parameters()))
    torch.testing.assert_close(output, want)
    torch.testing.assert_close(gradients, wanted)
    assert all(parameter.grad is None for parameter in pipe.parameters())
