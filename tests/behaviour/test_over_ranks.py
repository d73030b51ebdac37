"""A pipe over processes trains to the bits of a pipe in one process, whatever its stages hand each other."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.rank_models import (
    DENSE_CUTS,
    MIXED_CUTS,
    Dense,
    Mixed,
    Tied,
    assert_parts,
    matching_loss,
    padded_loss,
    token_loss,
    tokens,
)
from helpers.ranks import square_mesh
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, FxpipeError, LossError, StateError

QUICK = {"progress": False, "check": False, "hardware": "cpu"}
LOOPED = ("interleaved_1f1b", "interleaved_zero_bubble")
FOUR_STAGES = dict.fromkeys((*LOOPED, "zbv"), 4)
OWN_TABLE = "0F0 0F1 0B0 0F2 0R1 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
SOME_BACKWARDS_SPLIT = "0F0 0F1 0B0 0F2 0B1 0W1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W2"
# Two steps with the same packets, then fewer micro-batches, of one sample each; then other lengths, there and back.
MIXED_BATCHES = [(7, 5, 1), (7, 5, 2), (2, 5, 3)]
MORE_LENGTHS = [(7, 9, 4), (7, 5, 5)]


def trained(devices, model, batches, loss_fn, is_over_ranks, optimizer=True, reduction="mean", **options):
    """Losses, gradients and state after some steps, of which the last ones are accumulated."""
    x, _ = batches[0]
    with fxpipe.pipeline(model, devices, example_args=(x,), **QUICK | options) as pipe:
        step = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(5)
        losses = []
        for place, (x, t) in enumerate(batches):
            if is_over_ranks:  # nobody is given what it does not need
                x, t = x if pipe.needs_inputs else None, t if pipe.needs_target else None
            losses.append(pipe.forward_backward(x, target=t, loss_fn=loss_fn, reduction=reduction))
            if optimizer and place < len(batches) - 2:
                step.step()
                step.zero_grad()
        losses.append(torch.rand(()))  # the generator stands where it would
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        return losses, gradients, {key: value.clone() for key, value in pipe.state_dict().items()}


def step_of_stages_on_rank(mesh):
    model = Tied()
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    with fxpipe.pipeline(model, mesh, 3, example_args=(x,), balance=["a"], **QUICK) as pipe:
        groups = [{"params": "b.bias", "weight_decay": 0.0}, {"params": "*"}]  # the first rank has none of the first
        step = fxpipe.optim.StageOptimizer(pipe, torch.optim.AdamW, lr=0.1, param_groups=groups)
        for _ in range(3):
            pipe.forward_backward(x, target=x, loss_fn=F.mse_loss, optimizer=step)
        with pytest.raises(ArgumentError, match="overlap=True over processes"):
            fxpipe.optim.StageOptimizer(pipe, torch.optim.AdamW, overlap=True)
        state = step.state_dict()
        return {key: value.clone() for key, value in pipe.state_dict().items()}, len(state["state"])


def test_each_rank_steps_its_own_parameters_and_a_tied_weight_alike(two_ranks):
    model = Tied()
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    groups = [{"params": [model.b.bias], "weight_decay": 0.0}, {"params": [model.a.weight, model.a.bias]}]
    want = torch.optim.AdamW(groups, lr=0.1)
    for _ in range(3):
        with fxpipe.pipeline(model, ["cpu"] * 2, 3, example_args=(x,), balance=["a"], **QUICK) as pipe:
            pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        want.step()
        want.zero_grad()
    parts = two_ranks.run(step_of_stages_on_rank)
    assert [states for _, states in parts] == [2, 2]
    assert_parts([part for part, _ in parts], model.state_dict())


def model_of(kind, batches):
    torch.manual_seed(0)
    if kind is Mixed:
        return Mixed(), [tokens(*batch) for batch in batches], MIXED_CUTS
    return kind(), [(torch.randn(b, 4), torch.randn(b, 4)) for b, *_ in batches], DENSE_CUTS


def train_on_rank(mesh, kind, batches, loss_fn, stages, options):
    model, data, cuts = model_of(kind, batches)
    return trained(mesh, model, data, loss_fn, True, balance=cuts[stages], **options)


def same_as_in_one_process(ranks, kind, batches, loss_fn, stages, **options):
    model, data, cuts = model_of(kind, batches)
    results = ranks.run(train_on_rank, kind, batches, loss_fn, stages, options)
    one = trained(["cpu"] * ranks.size, model, data, loss_fn, False, balance=cuts[stages], **options)
    assert all(all(map(torch.equal, losses, one[0])) for losses, *_ in results)
    assert_parts([gradients for _, gradients, _ in results], one[1])
    assert_parts([state for *_, state in results], one[2])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", *LOOPED, "zbv"])
def test_schedules_on_two_ranks_have_the_bits_of_one_process(two_ranks, schedule):
    stages = FOUR_STAGES.get(schedule, 2)
    batches = MIXED_BATCHES + (MORE_LENGTHS if schedule in ("1f1b", "zbv") else [])
    same_as_in_one_process(two_ranks, Mixed, batches, token_loss, stages, schedule=schedule, chunks=3)


@pytest.mark.parametrize("table", [OWN_TABLE, SOME_BACKWARDS_SPLIT], ids=["recompute", "some backwards split"])
def test_a_table_on_two_ranks_has_the_bits_of_one_process(two_ranks, table):
    same_as_in_one_process(two_ranks, Mixed, MIXED_BATCHES, token_loss, 2, schedule=table)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_every_skip_on_two_ranks_has_the_bits_of_one_process(two_ranks, schedule):
    batches = [(8, 0, 0), (7, 0, 0), (8, 0, 0)]
    options = {} if schedule in FOUR_STAGES else {"stages_per_device": 2}
    same_as_in_one_process(two_ranks, Dense, batches, F.mse_loss, 4, schedule=schedule, chunks=4, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_values_are_relayed_through_ranks_that_do_not_use_them(four_ranks, schedule):
    same_as_in_one_process(four_ranks, Mixed, MIXED_BATCHES, token_loss, 4, schedule=schedule, chunks=3)
    same_as_in_one_process(four_ranks, Dense, [(8, 0, 0), (6, 0, 0)], F.mse_loss, 4, schedule=schedule, chunks=4)


@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (padded_loss, {}),
        (partial(F.mse_loss, reduction="sum"), {}),
        (token_loss, {"checkpoint": "always"}),
        (token_loss, {"deferred_batch_norm": True}),
    ],
    ids=["weights", "one micro-batch", "recompute", "deferred batch norm"],
)
def test_losses_and_options_mean_what_they_mean_in_one_process(two_ranks, loss_fn, options):
    if isinstance(loss_fn, partial):
        same_as_in_one_process(two_ranks, Dense, [(5, 0, 0)] * 2, loss_fn, 2, chunks=1, **options)
    else:
        same_as_in_one_process(two_ranks, Mixed, MIXED_BATCHES, loss_fn, 2, chunks=3, **options)


class Contrast(Dense):
    """Its output is a loss of all samples: each against each."""

    def forward(self, x):
        rows = F.normalize(super().forward(x), dim=-1)
        return F.cross_entropy(rows @ rows.T * 5, torch.arange(len(rows)))


def taken_loss(out, target):
    return out


@pytest.mark.parametrize(
    ("kind", "loss_fn", "reduction"), [(Contrast, taken_loss, "mean"), (Dense, matching_loss, "batch")]
)
def test_a_loss_of_all_samples_on_two_ranks_has_the_bits_of_one_process(two_ranks, kind, loss_fn, reduction):
    batches = [(7, 0, 0), (8, 0, 0), (7, 0, 0)]
    same_as_in_one_process(two_ranks, kind, batches, loss_fn, 2, chunks=3, reduction=reduction)


def evaluate_contrast(mesh, model, x):
    with fxpipe.pipeline(model, mesh, 3, example_args=(x,), outputs="all", **QUICK) as pipe, torch.no_grad():
        return pipe.eval()(x) if pipe.needs_inputs else pipe.eval()()


def test_what_is_made_of_all_samples_is_evaluated_on_two_ranks(two_ranks):
    model, x = Contrast(), torch.randn(7, 4)
    for output in two_ranks.run(evaluate_contrast, copy.deepcopy(model), x):
        torch.testing.assert_close(output, model(x).detach())


# -- Evaluation, outputs, state --------------------------------------------------------------------------------------


def evaluate(mesh, outputs):
    torch.manual_seed(mesh.get_rank())  # each rank draws its own parameters: only those of its stages count
    model = Mixed()
    pipe = fxpipe.pipeline(
        model, mesh, 3, example_args=(tokens(7, 5, 1)[0],), balance=MIXED_CUTS[2], outputs=outputs, **QUICK
    )
    start = pipe.state_dict()["emb.weight"].clone()
    x, t = tokens(7, 5, 2)
    _, trained_outputs = pipe.forward_backward(x, target=t, loss_fn=token_loss, return_outputs=True)
    torch.optim.SGD(pipe.parameters(), 0.5).step()
    pipe.eval()
    with torch.no_grad():
        evaluated = pipe(x) if pipe.needs_inputs else pipe()
    return trained_outputs, evaluated, pipe.state_dict(), start


@pytest.mark.parametrize("outputs", ["last", "all"])
def test_evaluation_is_that_of_the_plain_model_with_the_state_of_all_ranks(two_ranks, outputs):
    results = two_ranks.run(evaluate, outputs)
    torch.manual_seed(0)
    model = Mixed().eval()
    assert all(torch.equal(start, model.emb.weight) for *_, start in results)  # the values of the first rank
    tied = {state["emb.weight"] for _, _, state, _ in results}
    model.load_state_dict(results[0][2] | results[1][2])
    assert len(tied) == 2
    assert torch.equal(*tied)
    expected = model(tokens(7, 5, 2)[0])
    for rank, (trained_outputs, evaluated, *_) in enumerate(results):
        if outputs == "all" or rank == 1:
            torch.testing.assert_close(evaluated, expected)
            assert trained_outputs.shape == expected.shape
        else:
            assert evaluated is None
            assert trained_outputs is None


def load_parts(mesh, state):
    x, t = tokens(7, 5, 2)
    pipe = fxpipe.pipeline(Mixed(), mesh, 3, example_args=(x,), balance=MIXED_CUTS[2], **QUICK)
    keys = pipe.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"unexpected keys \['nobody'\]"):
        pipe.load_state_dict(state | {"nobody": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="missing keys"):
        pipe.load_state_dict({})
    assert not keys.missing_keys
    assert pipe.model.training
    pipe.eval()
    return pipe.forward_backward(x, target=t, loss_fn=token_loss).item()


def test_the_state_of_a_model_is_loaded_into_all_ranks(two_ranks):
    model = Mixed().eval()
    x, t = tokens(7, 5, 2)
    losses = two_ranks.run(load_parts, model.state_dict())
    assert losses == pytest.approx([token_loss(model(x), t).item()] * 2)


class Branches(Layered, first=4, second=4, steps=lambda: torch.zeros(())):
    """Writes to its input, keeps a value in a buffer, and takes its own loss."""

    def forward(self, x, scale=None):
        self.steps += 1
        y = self.first(x)
        y = y if scale is None else y * scale
        return {"loss": self.second(torch.tanh(y)).square().mean(), "y": y}


def model_losses(mesh, x):
    torch.manual_seed(0)
    pipe = fxpipe.pipeline(Branches(), mesh, 2, example_args=(x,), balance=["first"], **QUICK)
    x = x.clone().requires_grad_()
    losses = []
    for scale in (None, 2.0, None):
        arguments = {"scale": scale} if pipe.needs_inputs else {}
        loss = pipe.forward_backward(x if pipe.needs_inputs else None, loss_fn=lambda out: out["loss"], **arguments)
        losses.append(loss.item())
    return losses, x.grad, pipe.state_dict()


def test_inputs_get_gradients_and_the_model_may_take_the_loss(two_ranks):
    x = torch.randn(6, 4)
    torch.manual_seed(0)
    model = Branches()
    results = two_ranks.run(model_losses, x)
    plain = x.clone().requires_grad_()
    expected = []
    for scale in (None, 2.0, None):
        loss = model(plain, scale)["loss"]
        loss.backward()
        expected.append(loss.item())
    assert [losses for losses, *_ in results] == [pytest.approx(expected)] * 2
    torch.testing.assert_close(results[0][1], plain.grad)
    assert results[1][1] is None
    assert results[0][2]["steps"].item() == 6.0


# -- Refusals --------------------------------------------------------------------------------------------------------


def refused(mesh, loss_fn):
    x, t = tokens(8, 5, 2)
    t[:4, 1:] = 0
    pipe = fxpipe.pipeline(Mixed(), mesh, 2, example_args=(x,), balance=MIXED_CUTS[2], **QUICK)
    with pytest.raises((LossError, RuntimeError)) as caught:
        pipe.forward_backward(x, target=t, loss_fn=loss_fn)
    gradients = [p.grad for p in pipe.parameters()]
    with pytest.raises(StateError) as drop_in:
        pipe(x)
    with pytest.raises(StateError, match="state_dict"):
        copy.deepcopy(pipe)
    loss = pipe.forward_backward(x, target=t, loss_fn=padded_loss)
    return str(caught.value), gradients, str(drop_in.value), loss.item()


def mean_of_tokens(out, target):
    return F.cross_entropy(out.transpose(1, 2), target, ignore_index=0)


def test_a_loss_that_does_not_add_up_is_refused_on_all_ranks(two_ranks):
    results = two_ranks.run(refused, mean_of_tokens)
    for text, gradients, drop_in, _ in results:
        assert "count" in text
        assert gradients == [None] * len(gradients)
        assert "loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn)" in drop_in
        assert "with torch.no_grad(): y = pipe(x)" in drop_in
    assert results[0][3] == results[1][3]


# -- The record of a step --------------------------------------------------------------------------------------------


def recorded(mesh):
    torch.manual_seed(0)
    x, t = torch.randn(8, 4), torch.randn(8, 4)
    pipe = fxpipe.pipeline(Dense(), mesh, 4, example_args=(x,), balance=DENSE_CUTS[2], **QUICK)
    pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
    return pipe.last_step, pipe.gather_last_step()


def test_each_rank_has_the_record_of_its_row_and_all_together_that_of_the_step(two_ranks):
    results = two_ranks.run(recorded)
    for rank, (own, gathered) in enumerate(results):
        assert {one.device for one in own.actions} == {rank}
        assert len(gathered.actions) == 16
        assert gathered.devices[0].sent == gathered.devices[1].received > 0
        assert gathered.devices[1].sent == gathered.devices[0].received > 0
        assert "device 1" in str(gathered)


# -- Graphs beside the first one -------------------------------------------------------------------------------------


class Winding(Layered, first=4, second=4, third=4, drop=lambda: nn.Dropout(0.3), seen=lambda: torch.zeros(4)):
    """Takes other ways than those it was planned for: they use a weight, or change a buffer, in another stage."""

    def forward(self, x, way=0):
        if way == 1:
            self.seen += x.detach().sum(0)
        x = torch.tanh(self.first(x))
        x = self.drop(torch.tanh(self.second(x)))
        x = torch.tanh(self.third(x))
        if way == 0:
            self.seen += x.detach().sum(0)
        if way == 2:
            x = torch.tanh(self.first(x)) + self.seen
        return x


def wind(devices, ways, is_over_ranks, is_meta=False):
    torch.manual_seed(0)
    model, x = Winding(), torch.randn(6, 4)
    state = copy.deepcopy(model.state_dict())
    model.to("meta" if is_meta else "cpu")
    with fxpipe.pipeline(model, devices, 3, example_args=(x,), balance=["first"], progress=False) as pipe:
        pipe.load_state_dict(state)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.5)
        losses = []
        for way in ways:
            own = ((x, way) if pipe.needs_inputs else ()) if is_over_ranks else (x, way)
            losses.append(pipe.forward_backward(*own, target=x, loss_fn=F.mse_loss).item())
            optimizer.step()
        pipe.eval()
        with torch.no_grad():
            losses.append(pipe(*own))
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        return losses, gradients, {key: value.clone() for key, value in pipe.state_dict().items()}


def wind_on_rank(mesh, ways, is_meta):
    return wind(mesh, ways, True, is_meta)


@pytest.mark.parametrize("is_meta", [False, True])
def test_a_graph_that_uses_weights_and_buffers_of_another_rank_borrows_them(two_ranks, is_meta):
    ways = (0, 2, 1, 2, 0, 2)
    results = two_ranks.run(wind_on_rank, ways, is_meta)
    losses, gradients, state = wind(["cpu"] * 2, ways, False)
    assert all(own[:-1] == losses[:-1] for own, *_ in results)
    assert torch.equal(results[1][0][-1], losses[-1])
    assert_parts([own for _, own, _ in results], gradients)
    assert_parts([own for *_, own in results], state)


# -- Plans -----------------------------------------------------------------------------------------------------------


def planned(mesh, plan):
    torch.manual_seed(0)
    x, t = torch.randn(8, 4), torch.randn(8, 4)
    if plan is None:
        pipe = fxpipe.pipeline(Dense(), mesh, schedule="auto", example_args=(x,), **QUICK)
    else:
        pipe = fxpipe.pipeline(Dense(), mesh, schedule="auto", example_args=(x,), plan=plan, progress=False)
    loss = pipe.forward_backward(x, target=t, loss_fn=F.mse_loss).item()
    return pipe.plan, loss


def test_what_is_left_to_planning_is_decided_by_one_rank_for_all(two_ranks):
    (ours, loss), (theirs, other) = two_ranks.run(planned, None)
    assert ours == theirs
    assert loss == other
    again = two_ranks.run(planned, ours)
    assert [plan.placement for plan, _ in again] == [ours.placement] * 2
    assert [one for _, one in again] == pytest.approx([loss] * 2)


class Calibrated(Layered, a=4, b=4, center=lambda: torch.zeros(4)):
    """Changes a buffer in evaluation as well."""

    def forward(self, x):
        x = torch.tanh(self.a(x))
        self.center.lerp_(x.detach().mean(0), 0.1)
        return self.b(x - self.center)


@torch.no_grad()
def evaluate_calibrated(mesh):
    model, x = Calibrated().eval(), torch.linspace(-1, 1, 24).reshape(6, 4)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Calibrated changes the buffer 'center' in evaluation")
        pipe = fxpipe.pipeline(model, mesh, 3, example_args=(x,), balance=["a"], outputs="all", **QUICK)
    for one in (x, x + 1):
        torch.testing.assert_close(pipe(one), plain(one))
    for name, buffer in pipe.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name))
    return len([*pipe.buffers()])


def test_an_evaluation_that_changes_a_buffer_runs_the_mini_batch_whole(two_ranks):
    assert two_ranks.run(evaluate_calibrated) in ([1, 0], [0, 1])


class Scaled(Layered, a=(4, 8), b=(4, 8)):
    """Scales its inputs by what all samples share, computed once for the mini-batch."""

    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x / x.abs().mean(0))[:, :4] * y.std()), self.a(y))


def step_of_all_samples(mesh, model, given):
    pipe = fxpipe.pipeline(model, mesh, 2, example_args=given, **QUICK)
    loss = pipe.forward_backward(*given)
    return loss, {name: p.grad for name, p in pipe.named_parameters()}


def test_what_all_samples_share_is_computed_for_all_of_them(two_ranks):
    model, given = Scaled(), (torch.randn(8, 4), torch.randn(8, 4))
    (own, gradients), (other, more) = two_ranks.run(step_of_all_samples, copy.deepcopy(model), given)
    loss = model(*given)
    loss.backward()
    torch.testing.assert_close(own, loss.detach())
    assert other == own
    assert {*gradients, *more} == {name for name, _ in model.named_parameters()}
    for name, gradient in (gradients | more).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


# -- Micro-batches that are handed over: their number and sizes may be others in each step ---------------------------

# By step, the (samples, length, seed) of micro-batches.
PARTS = [
    [(3, 5, 1), (2, 5, 2)],
    [(1, 5, 3), (4, 5, 4), (2, 5, 5)],
    [(3, 7, 6), (2, 5, 7)],
    [(2, 9, 8), (3, 6, 9), (2, 7, 10)],
    [(4, 5, 11)],
    [(3, 5, 12), (2, 5, 13)],
]


class Meeting(Layered, first=4, last=4):
    """Takes the mean of all samples."""

    def forward(self, x):
        y = torch.tanh(self.first(x))
        return self.last(y - y.mean(0))


def trained_on_parts(pipe, steps, loss_fn, is_over_ranks=True):
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(5)
    losses, outputs = [], []
    for step in steps:
        optimizer.zero_grad()
        if is_over_ranks:  # nobody is given what it does not need
            step = [(x if pipe.needs_inputs else (), t if pipe.needs_target else None) for x, t in step]
        step = step if not is_over_ranks or pipe.needs_inputs or pipe.needs_target else ()
        loss, out = pipe.forward_backward(micro_batches=iter(step), loss_fn=loss_fn, return_outputs=True)
        losses.append(loss)
        outputs.append(out)
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
        optimizer.step()
    return losses, outputs, gradients, {key: value.clone() for key, value in pipe.state_dict().items()}


def work(kind):
    torch.manual_seed(0)
    if kind == "mixed":
        return Mixed(), [[tokens(*batch) for batch in step] for step in PARTS], {"balance": MIXED_CUTS[2]}
    if kind == "meeting":
        steps = [[(torch.randn(b, 4), torch.randn(b, 4)) for b in sizes] for sizes in ((3, 2), (4, 3, 1))]
        return Meeting(), steps, {"chunks": 1}
    steps = [[(0, 3), (2, 2)], [(2, 1), (0, 4), (2, 2)], [(0, 2), (0, 3)]]
    batches = [[((torch.randn(b, 4), way), torch.randn(b, 4)) for way, b in step] for step in steps]
    return Winding(), batches, {"balance": ["second"]}


def pipe_of(kind, devices, options):
    model, steps, own = work(kind)
    x, _ = steps[0][0]
    example = x if isinstance(x, tuple) else (x,)
    return fxpipe.pipeline(model, devices, example_args=example, **QUICK | own | options), steps


def train_on_parts(mesh, kind, loss_fn, options):
    return trained_on_parts(*pipe_of(kind, mesh, options), loss_fn)


@pytest.mark.parametrize(
    ("kind", "loss_fn", "options"),
    [
        ("mixed", token_loss, {}),
        ("mixed", padded_loss, {"schedule": "zero_bubble"}),
        ("winding", F.mse_loss, {}),
        ("meeting", F.mse_loss, {}),
    ],
)
def test_micro_batches_have_the_bits_of_one_process(two_ranks, kind, loss_fn, options):
    results = two_ranks.run(train_on_parts, kind, loss_fn, options)
    losses, outputs, gradients, state = trained_on_parts(
        *pipe_of(kind, ["cpu"] * 2, options), loss_fn, is_over_ranks=False
    )
    assert all(all(map(torch.equal, own, losses)) for own, *_ in results)
    assert_parts([own for _, _, own, _ in results], gradients)
    assert_parts([own for *_, own in results], state)
    (_, ours, *_), (_, theirs, *_) = results
    assert ours[0] is None
    for own, expected in zip(theirs, outputs, strict=True):
        assert all(map(torch.equal, own, expected))


def train_replica(mesh, loss_fn):
    mesh = square_mesh()
    replica = mesh["data"].get_local_rank()
    torch.manual_seed(0)
    pipe = fxpipe.pipeline(
        Mixed(0.0), mesh["pipe"], 2, data_parallel=mesh["data"], balance=MIXED_CUTS[2],
        example_args=(tokens(4, 5, 0)[0],), **QUICK,
    )  # fmt: skip
    results = []
    for step in range(2):
        parts = [tokens(*batch) for batch in PARTS[2 * step + replica]]
        pipe.zero_grad()
        loss = pipe.forward_backward(micro_batches=parts, loss_fn=loss_fn)
        results.append((loss, {name: p.grad.clone() for name, p in pipe.named_parameters()}))
    return results


@pytest.mark.parametrize("loss_fn", [token_loss, padded_loss])
def test_micro_batches_of_replicas_count_by_their_samples_or_weights(four_ranks, loss_fn):
    results = four_ranks.run(train_replica, loss_fn)
    torch.manual_seed(0)
    model = Mixed(0.0)
    for step in range(2):
        model.zero_grad()
        pairs = []
        for x, t in (tokens(*batch) for replica in range(2) for batch in PARTS[2 * step + replica]):
            value = loss_fn(model(x), t)
            pairs.append(value if isinstance(value, tuple) else (value * len(x), len(x)))
        loss = sum(total for total, _ in pairs) / sum(weight for _, weight in pairs)
        loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        for of_rank in results:
            own, gradients = of_rank[step]
            torch.testing.assert_close(own, loss.detach())
            torch.testing.assert_close(gradients, {name: expected[name] for name in gradients})


def plan_late(mesh):
    torch.manual_seed(0)
    pipe = fxpipe.pipeline(Mixed(), mesh, 2, balance=MIXED_CUTS[2], **QUICK)
    rank = mesh.get_rank()
    parts = [tokens(*batch) for batch in PARTS[3]]
    loss = pipe.forward_backward(micro_batches=parts, loss_fn=token_loss).item()

    def text_of(**arguments):
        with pytest.raises(FxpipeError) as caught:
            pipe.forward_backward(**{"loss_fn": token_loss} | arguments)
        return str(caught.value)

    texts = [
        text_of(micro_batches=()),
        text_of(micro_batches=parts[: 2 + rank]),
        text_of(micro_batches=parts, target=parts[0][1]),
        text_of(micro_batches=3),
    ]
    if rank:
        with pytest.raises(FxpipeError) as caught:
            pipe.forward_backward(target=parts[0][1], loss_fn=token_loss)
        texts.append(str(caught.value))
    else:
        texts.append(text_of(micro_batches=parts))
    assert pipe.forward_backward(micro_batches=parts, loss_fn=token_loss) > 0
    return loss, texts


def test_the_first_micro_batches_make_the_plan_and_misuse_is_an_error_on_all_ranks(two_ranks):
    results = two_ranks.run(plan_late)
    assert results[0][0] == results[1][0]
    words = [
        "has the first stage and needs the micro_batches",
        "was given 3 micro_batches, and rank 0, of the first stage, 2",
        "micro_batches and inputs or a target beside them",
        "micro_batches is an int",
        "with micro_batches",
    ]
    for _, texts in results:
        for text, word in zip(texts, words, strict=True):
            assert word in text
