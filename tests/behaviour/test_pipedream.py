"""`train_stream` comes, bit for bit, to the weights of a plain loop with delayed updates, and ends well in any case."""

import contextlib
import copy
import itertools
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.contrastive import contrast
from helpers.delayed_updates import RULES, train_delayed
from helpers.layered import Layered
from helpers.paths import ROOT, module_at
from helpers.residual_blocks import WIDTH, Faulty, Stumbling, assert_same, batches, blocks, momentum, sgd, train
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, LossError, StateError
from fxpipe.optim import StageOptimizer
from fxpipe.scheduling import ActionKind

QUICK = {"progress": False, "check": False, "hardware": "cpu"}


def piped(model, stages, schedule="pipedream", **options):
    """A block of the model for each stage."""
    options = {"balance": [str(j) for j in range(stages - 1)]} | options if stages > 1 else options
    example = options.pop("example", (torch.ones(6, WIDTH),))
    pipe = fxpipe.pipeline(model, ["cpu"] * stages, schedule=schedule, example_args=example, **QUICK | options)
    return oracle.closing(pipe)


SHARED = [
    *((n, "pipedream", "auto") for n in (1, 2, 3, 4)),
    *((n, "pipedream_2bw", m) for n, m in ((1, 3), (2, 3), (3, 3), (4, 6), (4, 2))),
]


@pytest.fixture(scope="module")
def shared():
    """Pipes of plain blocks, made once: (stages, schedule, chunks) -> one with the weights of `blocks`."""
    with contextlib.ExitStack() as stack:
        made = {}
        for stages, schedule, chunks in SHARED:
            pipe = stack.enter_context(piped(blocks(stages), stages, schedule, chunks=chunks))
            pipe(torch.ones(6, WIDTH))
            made[stages, schedule, chunks] = pipe

        @contextlib.contextmanager
        def pipe_of(stages, schedule="pipedream", chunks="auto"):
            pipe = made[stages, schedule, chunks]
            pipe.load_state_dict(blocks(stages).state_dict())
            pipe.zero_grad()
            yield pipe

        yield pipe_of


def delayed(plain, data):
    return train_delayed([*plain], data, F.mse_loss, momentum, RULES["stashing"])[0]


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("vertical_sync", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_stream_comes_to_the_weights_of_delayed_updates(shared, stages, vertical_sync, optimizer):
    kind, options = OPTIMIZERS[optimizer]
    plain, data = blocks(stages), batches(9, fewer_in_last=2)
    with shared(stages) as pipe:
        own = StageOptimizer(pipe, kind, **options)
        stream, losses = train(pipe, data, own, vertical_sync=vertical_sync)
        rule = RULES["vertical sync" if vertical_sync else "stashing"]
        want, optimizers = train_delayed([*plain], data, F.mse_loss, lambda p: kind(p, **options), rule)
        assert torch.equal(torch.stack(losses), torch.stack(want))
        assert_same(pipe, plain)
        states = [state for one in optimizers for state in one.state_dict()["state"].values()]
        for have, state in zip(own.state_dict()["state"].values(), states, strict=True):
            assert all(torch.equal(have[key], value) for key, value in state.items())
        assert stream.applied == (9,) * stages
        assert stream.versions_held == ((stages,) * stages if vertical_sync else tuple(range(stages, 0, -1)))


@pytest.mark.parametrize(("stages", "chunks"), [(1, 3), (2, 3), (3, 3), (4, 6), (4, 2)])
def test_double_buffering_comes_to_the_weights_of_one_update_ago(shared, stages, chunks):
    """Also with fewer micro-batches than stages, of which some then wait for a version. One stage trains plainly."""
    plain, data = blocks(stages), batches(7, fewer_in_last=1)
    with shared(stages, "pipedream_2bw", chunks) as pipe:
        stream, losses = train(pipe, data)
        rule = RULES["2bw" if stages > 1 else "plain"]
        want, _ = train_delayed([*plain], data, F.mse_loss, momentum, rule, chunks)
        assert torch.equal(torch.stack(losses), torch.stack(want))
        assert_same(pipe, plain)
        assert stream.versions_held == (min(stages, 2),) * stages


class Contrast(nn.Module):
    """A tail of a model, in which samples meet."""

    def forward(self, y):
        return contrast(y, y)


JOINT = [  # stages, micro-batches, rule of versions, options of the pipe, the model computes the loss
    (2, 2, "stashing", {"checkpoint": "except_last"}, False),
    (2, 4, "vertical sync", {}, True),
    (3, 2, "vertical sync", {"checkpoint": "always"}, False),
    (3, 4, "stashing", {}, True),
    (1, 4, "plain", {}, True),
    (3, 4, "2bw", {"schedule": "pipedream_2bw"}, False),
]


@pytest.mark.parametrize(("stages", "chunks", "rule", "options", "is_inside"), JOINT)
def test_a_loss_of_all_samples_has_the_versions_of_mini_batches_that_are_not_cut(
    stages, chunks, rule, options, is_inside
):
    plain, data = blocks(stages), batches(8, size=8, fewer_in_last=3)
    model, tail = copy.deepcopy(plain), [Contrast()] if is_inside else []
    of_stream = {"loss_fn": None} if is_inside else {"loss_fn": contrast, "reduction": "batch"}
    of_stream |= {"vertical_sync": True} if rule == "vertical sync" else {}
    with piped(nn.Sequential(*model, *tail), stages, chunks=chunks, example=(data[0][0],), **options) as pipe:
        stream, losses = train(pipe, [x for x, _ in data] if is_inside else data, **of_stream)
        loss_fn = (lambda y, t: contrast(y, y)) if is_inside else contrast
        want, _ = train_delayed([*plain], data, loss_fn, momentum, RULES[rule], chunks, joint=True)
        torch.testing.assert_close(torch.stack(losses), torch.stack(want))  # sums of gathered rows round differently
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
        versions = {"stashing": range(stages, 0, -1), "vertical sync": [stages] * stages, "2bw": [2] * stages}
        assert stream.versions_held == tuple(versions.get(rule, [1]))


def test_batch_norm_sees_the_mini_batches_in_order():
    plain, data = blocks(3, lambda: nn.BatchNorm1d(WIDTH)), batches(6)
    with piped(copy.deepcopy(plain), 3) as pipe:
        train(pipe, data)
        delayed(plain, data)
        assert_same(pipe, plain)


def test_recomputation_has_the_weights_of_its_forward_and_the_same_random_numbers():
    """Dropout draws other numbers for each mini-batch, and the same ones again."""
    results = []
    for checkpoint in ("never", "always", "never"):
        with piped(blocks(3, lambda: nn.Dropout(0.4)), 3, checkpoint=checkpoint) as pipe:
            torch.manual_seed(5)
            optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.0)
            _, losses = train(pipe, batches(1) * 5, optimizer)
            assert len({float(loss) for loss in losses}) == 5
            torch.manual_seed(6)
            _, more = train(pipe, batches(4))
            results.append((losses, more, pipe.state_dict()))
    for losses, more, state in results[1:]:
        assert [*losses, *more] == [*results[0][0], *results[0][1]]
        assert all(torch.equal(have, want) for have, want in zip(state.values(), results[0][2].values(), strict=True))


# -- Ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "with", "break"])
def test_a_stream_that_is_left_early_applies_what_it_has_read(shared, how):
    plain, data, read = blocks(2), batches(20), []
    with shared(2) as pipe:
        optimizer = sgd(pipe)
        source = (read.append(one) or one for one in data)
        if how == "with":
            with pipe.train_stream(source, loss_fn=F.mse_loss, optimizer=optimizer) as stream:
                next(stream)
        elif how == "close":
            stream = pipe.train_stream(source, loss_fn=F.mse_loss, optimizer=optimizer)
            next(stream)
            stream.close()
            stream.close()
            assert list(stream) == []
        else:
            for _ in pipe.train_stream(source, loss_fn=F.mse_loss, optimizer=optimizer):
                break  # nobody holds the stream any more
        assert len(read) == 4  # as many as the stages hold, and two ahead
        delayed(plain, read)
        assert_same(pipe, plain)
        assert pipe(data[0][0]).shape == (6, WIDTH)


def test_losses_before_a_mini_batch_that_cannot_be_read_come_first(shared):
    def source():
        yield from batches(3)
        raise OSError("the disk is gone")

    plain = blocks(2)
    with shared(2) as pipe:
        stream = pipe.train_stream(source(), loss_fn=F.mse_loss, optimizer=sgd(pipe))
        assert all(next(stream).dim() == 0 for _ in range(3))
        with pytest.raises(OSError, match="disk is gone") as caught:
            next(stream)
        assert "raised for mini-batch 3 of the stream; the 3 before it have been applied" in caught.value.__notes__[0]
        delayed(plain, batches(3))
        assert_same(pipe, plain)


def failing(y, t):
    if y.abs().max() > 1e3:
        raise ArithmeticError("too large")
    return contrast(y, t)


MSE, ALL = {"loss_fn": F.mse_loss}, {"loss_fn": contrast, "reduction": "batch"}
FAULTS = {  # options of the stream, micro-batches, and the action that fails
    "forward": (MSE, 1, "micro-batch 0, forward"),
    "backward": (MSE, 1, "micro-batch 0, backward"),
    "backward of all": (ALL, 3, "micro-batch 0, backward"),
    "loss of all": ({**ALL, "loss_fn": failing}, 3, "micro-batch 2, forward"),
}


@pytest.mark.parametrize("where", FAULTS)
def test_an_exception_in_a_stage_drops_the_stream_and_leaves_a_pipe_that_trains(where):
    of_stream, chunks, action = FAULTS[where]
    model = nn.Sequential(blocks(1)[0], nn.Sequential(Faulty(where=where.removesuffix(" of all")), blocks(1)[0]))
    with piped(model, 2, chunks=chunks) as pipe:
        optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        data = batches(9)
        data[4] = data[4][0] * 1e6, data[4][1]
        with pytest.raises(ArithmeticError) as caught:
            list(pipe.train_stream(data, optimizer=optimizer, **of_stream))
        notes = "\n".join(caught.value.__notes__)
        assert "of mini-batch 4 of the stream" in notes
        assert f"stage 1 of 2 on cpu, {action}" in notes
        assert "the stream was dropped" in notes
        assert "stage 1 those of 4" in notes
        forwards = [one for one in pipe.last_step.actions if one.action[:2] == (ActionKind.FORWARD, 1)]
        assert len(pipe.last_step.losses) == len(forwards), "a mini-batch that was dropped is not in the record"
        plain = copy.deepcopy(fxpipe.unwrap(pipe))
        for parameter in plain.parameters():
            parameter.grad = None
        train(pipe, batches(5), optimizer, **of_stream)
        arguments = of_stream["loss_fn"], lambda p: torch.optim.SGD(p, lr=0.1), RULES["stashing"], chunks
        train_delayed([*plain], batches(5), *arguments, joint=chunks > 1)
        assert_same(pipe, plain)
        pipe.forward_backward(data[0][0], target=data[0][1], loss_fn=F.mse_loss, optimizer=optimizer)


def test_training_goes_on_from_a_checkpoint_between_two_streams(shared):
    first, second = batches(5), batches(6, seed=2)
    with shared(3) as pipe, piped(blocks(3), 3) as other:
        optimizer = sgd(pipe)
        train(pipe, first, optimizer)
        with torch.no_grad():
            pipe(first[0][0])
        saved = copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))
        train(pipe, second, optimizer)
        resumed = sgd(other)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(other, second, resumed)
        assert_same(other, pipe)


def test_steps_with_a_flush_run_between_streams_and_evaluation_does_not_change_them(shared):
    plain, (x, t) = blocks(2), batches(1)[0]
    with shared(2) as pipe:
        pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
        F.mse_loss(plain(x), t).backward()
        for have, want in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(have.grad, want.grad, atol=1e-6)
        assert pipe.last_step.schedule == "pipedream"
        pipe.zero_grad()
        train(pipe, batches(40))
        record = pipe.last_step
        assert len(record.actions) == 32 * 2 * 3  # of the last 32
        assert [a.action.kind.value for a in record.actions if a.action.stage == 1][:6] == [*"FBUFBU"]
        assert "pipedream" in str(record)


# -- Gradients, which nobody sees -------------------------------------------------------------------------------------


READERS = {
    "clip_grad_norm_": lambda pipe: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0),
    "clip_grad_norm_ of the model": lambda pipe: nn.utils.clip_grad_norm_(fxpipe.unwrap(pipe).parameters(), 1.0),
    "get_total_norm": lambda pipe: nn.utils.get_total_norm([p.grad for p in pipe.parameters() if p.grad is not None]),
    "another optimizer": lambda pipe: torch.optim.AdamW(pipe.parameters()).step(),
    "a logger": lambda pipe: [p.grad.norm() for p in pipe.parameters() if p.grad is not None],
}


@pytest.mark.parametrize("reader", READERS)
def test_what_looks_for_gradients_in_the_middle_of_a_stream_is_told_that_there_are_none(shared, reader):
    """It would find all of them None, and do nothing without a word. (At once, unless all stages just update.)"""
    with shared(2) as pipe:
        stream = pipe.train_stream(batches(60), loss_fn=F.mse_loss, optimizer=sgd(pipe))
        text = r"(?s)in the middle of a stream.*no time at which .* all stages .* needs forward_backward"
        with pytest.raises(StateError, match=text):  # noqa: PT012
            for _ in stream:
                READERS[reader](pipe)
        stream.close()
        pipe.zero_grad()
        READERS[reader](pipe)


def test_weights_and_state_can_be_looked_at_in_the_middle_of_a_stream(shared):
    with shared(2) as pipe:
        optimizer = sgd(pipe)
        for _ in pipe.train_stream(batches(9), loss_fn=F.mse_loss, optimizer=optimizer):
            assert sum(p.numel() for p in pipe.parameters()) == 2 * (WIDTH * WIDTH + 3 * WIDTH)
            copies = copy.deepcopy(pipe.state_dict()), copy.deepcopy(fxpipe.unwrap(pipe))
            assert all(p.grad is None for p in copies[1].parameters())


def test_zero_grad_in_the_middle_of_a_stream_loses_no_gradient(shared):
    """Stages are between their backward and their update while the loop runs."""
    plain, data = blocks(3), batches(30)
    with shared(3) as pipe:
        optimizer = sgd(pipe)
        for _ in pipe.train_stream(data, loss_fn=F.mse_loss, optimizer=optimizer):
            for _ in range(20):
                optimizer.zero_grad()
        delayed(plain, data)
        assert_same(pipe, plain)


class Forgetting(torch.optim.SGD):
    """Takes away gradients while it steps, as another thread may."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def test_gradients_that_are_taken_away_in_the_middle_of_an_update_are_noticed(shared):
    with shared(2) as pipe, pytest.raises(StateError, match="gradients of a stage were taken away while it updates"):
        train(pipe, batches(3), StageOptimizer(pipe, Forgetting, lr=0.1))


def test_gradients_of_a_mini_batch_that_was_dropped_do_not_count_in_the_next_stream(shared, monkeypatch):
    monkeypatch.setattr(Stumbling, "steps", 0)
    with shared(2) as pipe:
        optimizer = StageOptimizer(pipe, Stumbling, lr=0.1)
        with pytest.raises(OSError, match="stumbled"):
            train(pipe, batches(9), optimizer)
        plain = copy.deepcopy(fxpipe.unwrap(pipe))
        train(pipe, batches(3), optimizer)
        train_delayed([*plain], batches(3), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), RULES["stashing"])
        assert_same(pipe, plain)


class Waiting(torch.optim.SGD):
    """Begins its second step of the last block when the first loss has been collected."""

    def __init__(self, params, last=None, collected=None, **options):
        super().__init__(params, **options)
        self.last, self.collected, self.steps = last, collected, []

    def step(self, closure=None):
        if any(parameter is self.last for group in self.param_groups for parameter in group["params"]):
            self.steps.append(1)
            assert len(self.steps) != 2 or self.collected.wait(20)
        super().step()


def test_a_stage_that_steps_while_a_loss_is_collected_is_no_other_optimizer(shared):
    """The step of torch's class runs the hooks for all optimizers, which look for others on the same parameters."""
    torch.optim.SGD([torch.ones(1)])  # from the first instance on, the class has hooks
    with shared(2) as pipe, warnings.catch_warnings(action="error"):
        collected = threading.Event()
        optimizer = StageOptimizer(pipe, Waiting, last=pipe.get_parameter("1.linear.bias"), collected=collected, lr=0.1)
        for _ in pipe.train_stream(batches(4), loss_fn=F.mse_loss, optimizer=optimizer):
            collected.set()
        assert len(optimizer.steps) == 4
        train(pipe, batches(2), optimizer)


# -- Refused -----------------------------------------------------------------------------------------------------------


def test_a_group_is_added_between_streams_and_not_in_one(shared):
    plain, data = blocks(2), batches(9)

    def delayed_sgd(rate):
        def make_optimizer(p):
            return torch.optim.SGD(p, lr=0.1 if p[0] is plain[0].linear.weight else rate)

        train_delayed([*plain], data, F.mse_loss, make_optimizer, RULES["stashing"])

    with shared(2) as pipe:
        optimizer = StageOptimizer(
            pipe, torch.optim.SGD, lr=0.1, param_groups=[{"params": [*pipe.model[0].parameters()]}]
        )
        for _ in pipe.train_stream(data, loss_fn=F.mse_loss, optimizer=optimizer):
            with pytest.raises(StateError, match=r"add_param_group in the middle of a stream.*stream\.close"):
                optimizer.add_param_group({"params": "1.*"})
            StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        delayed_sgd(rate=0.0)
        pipe.zero_grad()
        optimizer.add_param_group({"params": "1.*", "lr": 0.2})
        train(pipe, data, optimizer)
        delayed_sgd(rate=0.2)
        assert_same(pipe, plain)


def test_the_pipe_cannot_be_called_in_the_middle_of_a_stream(shared):
    with shared(2) as pipe:
        optimizer = sgd(pipe)
        with pipe.train_stream(batches(9), loss_fn=F.mse_loss, optimizer=optimizer) as stream:
            next(stream)
            for call in (lambda: pipe(torch.ones(6, WIDTH)), optimizer.step, lambda: train(pipe, batches(1))):
                with pytest.raises(StateError, match=r"in the middle of a stream .*stream\.close"):
                    call()
            next(stream)
        pipe(torch.ones(6, WIDTH))


def test_weights_that_somebody_writes_to_in_the_middle_are_noticed(shared):
    with shared(2) as pipe:
        stream = pipe.train_stream(batches(30), loss_fn=F.mse_loss, optimizer=sgd(pipe))
        with pytest.raises(StateError, match=r"'0\.linear\.weight' was written to in the middle of a stream"):  # noqa: PT012
            for _ in stream:
                with torch.no_grad():
                    pipe.get_parameter("0.linear.weight").add_(1.0)
        train(pipe, batches(3))


def test_a_weight_of_two_stages_is_refused_by_name():
    model = blocks(3)
    model[2].linear.weight = model[0].linear.weight
    with piped(model, 3) as pipe:
        with pytest.raises(StateError, match=r"linear\.weight' is used by stages 0 and 2, .*forward_backward"):
            train(pipe, batches(3))
        train(pipe, batches(3), sgd(pipe, param_groups=lambda name, p: {} if ".norm." in name else None))


def test_attributes_that_forward_leaves_are_refused():
    class Leaves(Layered, linear=WIDTH, seen=lambda: None):
        def forward(self, x):
            self.seen = self.linear(x)
            return self.seen

    with (
        piped(nn.Sequential(Leaves(), Leaves()), 2) as pipe,
        pytest.raises(StateError, match=r"forward sets the attribute '0\.seen'"),
    ):
        train(pipe, batches(2))


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


def test_optimizers_that_a_stream_cannot_step_are_refused(shared):
    with shared(2) as pipe:
        data = batches(2)
        with pytest.raises(ArgumentTypeError, match=r"optimizer is a SGD; expected a fxpipe\.optim\.StageOptimizer"):
            pipe.train_stream(data, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1), loss_fn=F.mse_loss)
        with pytest.raises(ArgumentError, match="LBFGS"):
            StageOptimizer(pipe, torch.optim.LBFGS)
        with pytest.raises(ArgumentError, match="a scaler looks at the gradients of all stages"):
            pipe.train_stream(data, optimizer=sgd(pipe), grad_scaler=torch.amp.GradScaler("cpu"))
        with piped(blocks(2), 2) as other, pytest.raises(ArgumentError, match="of another pipe"):
            pipe.train_stream(data, optimizer=sgd(other))
        for hook in ("register_step_pre_hook", "register_step_post_hook"):
            optimizer = sgd(pipe)
            getattr(optimizer, hook)(lambda *args: None)
            with pytest.raises(StateError, match=hook):
                pipe.train_stream(data, optimizer=optimizer)
        with pytest.raises(StateError, match="writes 'count' while it steps"):
            train(pipe, data, StageOptimizer(pipe, Counting, lr=0.1))


@pytest.mark.parametrize(
    ("schedule", "options", "data", "error", "text"),
    [
        ("pipedream_2bw", {"vertical_sync": True}, [], ArgumentError, "the same version of the weights anyway"),
        ("pipedream", {}, torch.ones(3), ArgumentTypeError, "batches is a Tensor; expected an iterable"),
        ("pipedream", {}, [object()], ArgumentTypeError, "mini-batch 0 is an object"),
        ("pipedream", {"loss_fn": None}, batches(1), ArgumentError, "target without loss_fn"),
        ("pipedream", {}, [*batches(1), torch.ones(6, WIDTH)], ArgumentError, "give all one, or none"),
        ("pipedream", {"loss_fn": lambda y, t: y.detach().mean()}, batches(1), LossError, "does not require grad"),
        ("pipedream", {"loss_fn": lambda y, t: y}, batches(1), LossError, "loss_fn returned a tensor of shape"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_stream_is_refused(shared, schedule, options, data, error, text):
    with shared(2, schedule, 3 if schedule == "pipedream_2bw" else "auto") as pipe:
        optimizer = sgd(pipe)
        with pytest.raises(error, match=text):
            list(pipe.train_stream(data, **{"loss_fn": F.mse_loss, "optimizer": optimizer} | options))
        if schedule == "pipedream":
            train(pipe, batches(2), optimizer)


def test_a_pipe_of_another_schedule_runs_no_stream():
    with (
        piped(blocks(2), 2, "1f1b") as pipe,
        pytest.raises(ArgumentError, match="needs a pipe with schedule='pipedream'"),
    ):
        pipe.train_stream([], loss_fn=F.mse_loss, optimizer=sgd(pipe))


def test_a_stream_without_gradients_and_one_of_a_closed_pipe_are_refused():
    with piped(blocks(2), 2) as pipe:
        optimizer = sgd(pipe)
        with torch.no_grad(), pytest.raises(StateError, match="train_stream needs gradients"):
            pipe.train_stream([], optimizer=optimizer)
        stream = pipe.train_stream(batches(9), loss_fn=F.mse_loss, optimizer=optimizer)
        next(stream)
        pipe.close()
        with pytest.raises(StateError, match="closed"):
            list(stream)
        with pytest.raises(StateError, match="the pipe is closed"):
            pipe.train_stream([], optimizer=optimizer)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_it_learns_as_synchronous_training_does(schedule, monkeypatch, capsys):
    path = ROOT / "examples" / "pipedream.py"
    example = module_at(path, "pipedream_example")
    monkeypatch.setattr(sys, "argv", [str(path), "--devices", "cpu,cpu", "--schedule", schedule, "--steps", "60"])
    example.main()
    printed = capsys.readouterr().out
    assert f"versions of the weights, by stage: [2, {1 if schedule == 'pipedream' else 2}]" in printed
    table = printed.split("on unseen text")[0].splitlines()
    rows = [line.split() for line in table if line.strip()[:1].isdigit()]
    losses = [(float(streamed), float(synchronous)) for _, streamed, synchronous in rows]
    assert len(losses) == 3
    assert all(later[0] < earlier[0] for earlier, later in itertools.pairwise(losses))
    assert losses[-1][0] < losses[0][1]
    assert f"\n{schedule}: " in printed  # the record of its last mini-batches
