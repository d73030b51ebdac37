"""Deferred batch norm: the running statistics are those of the mini-batch.

The oracle: plain torch runs the model on the micro-batches, each input of each batch norm is kept, and plain batch norm
then sees those of a mini-batch put together, in the order of its calls. The gradients are those of the plain model on
micro-batches.
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, closing, parts_of, train_step
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, StateError

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def track(model: nn.Module, x: torch.Tensor, chunks: int) -> None:
    """Gives the batch norms of a plain model the statistics of a mini-batch, one module after the other."""
    seen: dict[nn.Module, list[list[torch.Tensor]]] = defaultdict(list)
    # A copy sees the micro-batches: with the parameters, and with the buffers as the step finds them.
    copied = copy.deepcopy(model)
    handles = [
        twin.register_forward_pre_hook(lambda _, args, norm=norm: seen[norm][-1].append(args[0].detach()))
        for twin, norm in zip(copied.modules(), model.modules(), strict=True)
        if isinstance(norm, NORMS)
    ]
    for part in parts_of(x, min(chunks, len(x)), len(x)):
        for norm in model.modules():
            seen[norm].append([])
        copied(part)
    for handle in handles:
        handle.remove()
    for norm, parts in seen.items():
        if isinstance(norm, NORMS) and norm.training:
            for call in zip(*parts, strict=True):
                norm(torch.cat(call))


def assert_tracks(pipe: Any, plain: nn.Module, tolerance: float = 1e-6) -> None:
    """The buffers are the plain model's, to a relative tolerance."""
    want, have = plain.state_dict(), pipe.state_dict()
    assert list(have) == list(want)
    for name, _ in plain.named_buffers():
        assert have[name].dtype == want[name].dtype
        torch.testing.assert_close(
            have[name], want[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def steps(
    model: nn.Module,
    batches: list[torch.Tensor],
    chunks: int = 4,
    tolerance: float = 1e-6,
    one_pass: bool = True,
    schedule: str = "1f1b",
    **options: Any,
) -> None:
    """Trains a pipe and the plain model side by side, compares buffers and gradients after each step."""
    plain = copy.deepcopy(model)
    pipe = fxpipe.pipeline(model, ["cpu"] * 2, chunks, schedule=schedule, deferred_batch_norm=True, **options)
    with closing(pipe):
        for x in batches:
            tracked = copy.deepcopy(plain)
            track(tracked, x, chunks)
            with torch.no_grad():
                target = torch.ones_like(plain.eval()(x))
            plain.train()
            for module, frozen in zip(plain.modules(), model.modules(), strict=True):
                module.training = frozen.training
            for each in (plain, model):
                each.zero_grad()
            order = schedule if one_pass else "gpipe"
            train_step(plain, (x,), {}, target, F.mse_loss, chunks=chunks, order=order, seed=0, batch=len(x))
            plain.load_state_dict(tracked.state_dict())
            if one_pass:
                pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
            else:
                F.mse_loss(pipe(x), target).backward()
            assert_tracks(pipe, plain, tolerance)
            # The drop-in takes the loss of all outputs at once.
            loose = [] if one_pass else [name for name, _ in plain.named_parameters()]
            assert_same_gradients(pipe, plain, loose)


def around(norm: nn.Module) -> nn.Module:
    """A batch norm of 4 features between two layers."""
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, momentum=0.3)
    )


class Twice(nn.Module):
    """One batch norm for two values, as in a siamese network."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 3)

    def forward(self, x):
        h = self.norm(self.first(x))
        return self.last(self.norm(h * 3 + 1).relu() + h)


def batches(*shape: int, sizes: tuple[int, ...] = (8, 7, 12)) -> list[torch.Tensor]:
    return [torch.randn(size, *shape) * 3 + k for k, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3)), (5,)),
        (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 3, 1)), (2, 7)),
        (convolutions, (3, 8, 8)),
        (lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.BatchNorm3d(3), nn.Conv3d(3, 2, 1)), (1, 3, 4, 3)),
        (lambda: around(nn.SyncBatchNorm(4)), (5,)),
        (lambda: around(nn.BatchNorm1d(4, affine=False)), (5,)),
        (lambda: around(nn.BatchNorm1d(4, track_running_stats=False)), (5,)),
        (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)), (5,)),  # nothing before it
        (Twice, (5,)),
    ],
    ids=["1d of 2-D", "1d of 3-D", "2d", "3d", "sync", "not affine", "tracks nothing", "first", "twice"],
)
def test_the_running_statistics_are_those_of_the_mini_batch(model, shape):
    steps(model(), batches(*shape), chunks=3)


def test_a_traced_model_and_a_module_kept_whole():
    steps(torch.fx.symbolic_trace(around(nn.BatchNorm1d(4))), batches(5), 3)
    whole = nn.Sequential(nn.BatchNorm1d(5, momentum=None), Twice(0.2))
    model = nn.Sequential(nn.Linear(5, 5), whole, nn.Linear(3, 3))
    steps(model, batches(5), 3, leaf_modules=["1"], checkpoint="except_last")


@pytest.mark.parametrize("momentum", [None, 0.0, 1.0])
def test_every_momentum(momentum):
    steps(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, momentum=momentum), Twice(momentum)), batches(5), chunks=3)


@pytest.mark.parametrize(("one_pass", "checkpoint"), each_once([True, False], ["except_last", "always"]))
def test_what_is_recomputed_counts_once(checkpoint, one_pass):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5), Twice(None))
    steps(model, batches(5), chunks=3, one_pass=one_pass, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("size", "chunks"), [(7, 3), (4, 16), (6, 1), (5, 2)], ids=["uneven", "fewer", "one", "of 3 and 2"]
)
def test_any_number_of_micro_batches(size, chunks):
    steps(convolutions(), batches(3, 6, 6, sizes=(size, size)), chunks, schedule="gpipe")


def test_digits_are_lost_as_by_the_rounding_of_the_input_only():
    """Each mean is rounded by 6e-8 of 1000, to which the spread is 1/1e4: sums of squares would leave nothing."""
    x = torch.randn(64, 4) * 0.1 + 1000
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=1.0), nn.Linear(4, 2))
    with fxpipe.pipeline(model, ["cpu"] * 2, 5, deferred_batch_norm=True, check=False) as pipe:
        pipe(x)
    torch.testing.assert_close(model[0].running_var.double(), x.double().var(0), rtol=1e-3, atol=0)
    torch.testing.assert_close(model[0].running_mean.double(), x.double().mean(0), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    xs = [x.to(dtype) for x in batches(5)]
    model = around(nn.BatchNorm1d(4)).to(dtype)
    steps(model, xs, 3, tolerance=1e-12 if dtype is torch.float64 else 2e-2)


def test_autocast():
    """The statistics are those of bfloat16 values, in float32."""
    plain = around(nn.BatchNorm1d(4))
    x = torch.randn(9, 5)
    model = copy.deepcopy(plain)
    pipe = fxpipe.pipeline(model, ["cpu"] * 2, 3, deferred_batch_norm=True, checkpoint="always")
    with closing(pipe), torch.autocast("cpu", torch.bfloat16):
        pipe(x).float().sum().backward()
        plain(x)
    assert model[1].running_var.dtype == torch.float32
    assert_tracks(pipe, plain, 1e-5)


def test_the_keys_types_and_values_of_the_state_are_the_models():
    model = copy.deepcopy(plain := convolutions())
    types = [type(m) for m in model.modules()]
    buffers = dict(model.named_buffers())
    pipe = fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True, example_args=(torch.randn(8, 3, 8, 8),))
    with closing(pipe):
        assert_tracks(pipe, plain, 0)  # planning has tracked nothing
        pipe(torch.randn(8, 3, 8, 8))
        assert list(pipe.state_dict()) == list(plain.state_dict())
        assert [type(m) for m in model.modules()] == types
        assert all(buffers[name] is b for name, b in model.named_buffers())
        plain.load_state_dict(pipe.state_dict())
        assert "untracked_batch_norm(" in pipe.plan.stages[0].code + pipe.plan.stages[1].code


def test_evaluation_takes_the_running_statistics_and_leaves_them():
    model = convolutions()
    pipe = fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True)
    with closing(pipe):
        pipe(torch.randn(8, 3, 8, 8))
        before = copy.deepcopy(model.state_dict())
        x = torch.randn(8, 3, 8, 8)
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), model(x))
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        pipe.train()
        pipe(x)
        assert int(model[1].num_batches_tracked) == 2


def test_training_under_no_grad_tracks_as_well():
    plain = convolutions()
    model, x = copy.deepcopy(plain), torch.randn(8, 3, 8, 8)
    pipe = fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True)
    with closing(pipe), torch.no_grad():
        pipe(x)
        track(plain, x, 4)
    assert_tracks(pipe, plain)


def test_frozen_batch_norm_in_a_model_in_training():
    model = convolutions()
    model[1].eval()
    before = copy.deepcopy(model[1].state_dict())
    steps(model, batches(3, 8, 8), chunks=3)
    assert all(torch.equal(before[k], v) for k, v in model[1].state_dict().items() if "weight" not in k)
    assert int(model[4].num_batches_tracked) == 3


class ByHand(nn.Module):
    """Batch norm by its function, with buffers under other names, and counters that are written to or set."""

    def __init__(self, norm: Callable[..., torch.Tensor], sets: bool = False):
        super().__init__()
        self.linear, self.norm, self.sets = nn.Linear(5, 4), norm, sets
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("samples", torch.tensor(0))

    def forward(self, x):
        if self.sets:
            self.steps = self.steps + 1
        else:
            self.steps.add_(1)
        self.samples.add_((x > -1e9).all(1).sum())
        return self.norm(self.linear(x), self.average, self.spread)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, mean, var: F.batch_norm(x, mean, var, training=True, momentum=0.5),
        lambda x, mean, var: F.batch_norm(x, mean, var, None, None, True),
        lambda x, mean, var: torch.batch_norm(x, None, None, mean, var, True, 0.2, 1e-5, False),
    ],
    ids=["keywords", "places", "torch"],
)
@pytest.mark.parametrize("sets", [False, True])
def test_functions_with_running_statistics(norm, sets):
    plain = ByHand(norm, sets)
    model, x = copy.deepcopy(plain), torch.randn(9, 5)
    pipe = fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True, checkpoint="always")
    with closing(pipe):
        for _ in range(2):
            pipe(x).sum().backward()
            plain(x)
            # What counts samples still counts each micro-batch, and so all of them.
            assert_tracks(pipe, plain)


def test_batch_norm_with_hooks_that_run():
    calls = []
    model = around(nn.BatchNorm1d(4))
    model[1].register_full_backward_hook(lambda *_: calls.append(1))
    steps(model, batches(5), 3)
    assert calls


class Odd(nn.Module):
    def __init__(self, forward: Callable[..., torch.Tensor]):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("var", torch.ones(5))
        self.register_buffer("both", torch.ones(2, 5))
        self.last, self.odd = nn.Linear(5, 2), forward

    def forward(self, x):
        return self.last(self.odd(self, x))


def _reads(m, x):
    return F.batch_norm(x, m.mean, m.var, training=True) + m.mean


def _writes(m, x):
    y = F.batch_norm(x, m.mean, m.var, training=True)
    m.mean.mul_(0.5)
    return y


def _in_part(m, x):
    return F.batch_norm(x, m.both[0], m.both[1], training=True)


@pytest.mark.parametrize(
    ("forward", "what"), [(_reads, "then reads"), (_writes, "also changes"), (_in_part, "in a part of a buffer")]
)
def test_what_cannot_be_deferred_is_refused(forward, what):
    with pytest.raises(ArgumentError, match=f"deferred_batch_norm=True, .*{what}.*deferred_batch_norm=False"):
        fxpipe.pipeline(Odd(forward), ["cpu"] * 2, 4, example_args=(torch.randn(8, 5),), deferred_batch_norm=True)


def test_a_part_of_a_buffer_in_a_module_kept_whole_is_refused():
    model, x = nn.Sequential(Odd(_in_part), nn.Linear(2, 2)), torch.randn(8, 5)
    with (
        fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True, leaf_modules=[Odd]) as pipe,
        pytest.raises(StateError, match=r"in a part of the buffer '0\.both'"),
    ):
        pipe(x)


class Fickle(Layered, norm=lambda: nn.BatchNorm1d(5), last=(5, 2)):
    """Batch norm once or twice, as the values have it."""

    def forward(self, x):
        h = self.norm(x)
        return self.last(self.norm(h) if x[0, 0] > 0 else h)


def test_calls_that_differ_between_micro_batches_are_refused_and_leave_nothing():
    model, x = nn.Sequential(Fickle(), nn.Linear(2, 2)), torch.randn(8, 5).abs()
    pipe = fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True, leaf_modules=[Fickle], check=False)
    with closing(pipe):
        pipe(x)
        assert int(model[0].norm.num_batches_tracked) == 2
        before = copy.deepcopy(model.state_dict())
        x[4] *= -1
        with pytest.raises(StateError, match="runs otherwise for some micro-batches than for others"):
            pipe.forward_backward(x, target=torch.zeros(8, 2), loss_fn=F.mse_loss)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_is_read_before_is_that_of_the_step_before():
    model = Odd(lambda m, x: F.batch_norm(x - m.mean, m.mean, m.var, training=True))
    x = torch.randn(8, 5)
    with fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True) as pipe:
        pipe(x)
    torch.testing.assert_close(model.mean, 0.1 * x.mean(0))


def test_a_step_that_fails_leaves_nothing_and_the_next_one_counts_alone():
    failing = []

    @fxpipe.leaf
    def fail(x):
        if failing and failing.pop(0):
            raise RuntimeError("at will")
        return x

    class Model(Layered, norm=lambda: nn.BatchNorm1d(5), last=(5, 2)):
        def forward(self, x):
            return self.last(fail(self.norm(x)))

    plain = Model()
    model, x = copy.deepcopy(plain), torch.randn(12, 5)
    with fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True, example_args=(x,)) as pipe:
        before = copy.deepcopy(model.state_dict())
        failing[:] = [False, False, True]
        with pytest.raises(RuntimeError, match="at will"):
            pipe.forward_backward(x * 100, target=torch.zeros(12, 2), loss_fn=F.mse_loss)
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        failing.clear()
        pipe.forward_backward(x, target=torch.zeros(12, 2), loss_fn=F.mse_loss)
        plain(x)
        assert_tracks(pipe, plain)


def test_two_forwards_in_flight_do_not_mix():
    plain = convolutions()
    model, (x, y) = copy.deepcopy(plain), torch.randn(2, 8, 3, 8, 8)
    with fxpipe.pipeline(model, ["cpu"] * 2, 4, deferred_batch_norm=True, checkpoint="always") as pipe:
        first, second = pipe(x), pipe(y * 5)
        (first.sum() + second.sum()).backward()
        track(plain, x, 4)
        track(plain, y * 5, 4)
        assert_tracks(pipe, plain)
