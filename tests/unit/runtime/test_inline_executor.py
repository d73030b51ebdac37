"""A pipe with one worker, on the CPU, runs in the thread that calls."""

import contextvars
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import closing
from helpers.tried_orders import InterleavedExecutor
from torch import nn

import fxpipe
from fxpipe.runtime import InlineExecutor, ThreadedExecutor, executor_for

CPU = torch.device("cpu")
NAMES = ("loss", "outputs", "drop-in")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, 3))

    def forward(self, x):
        return self.inner(x)


def _data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(7, 4, generator=generator), torch.randint(0, 3, (7,), generator=generator)


def _pipe(executor=None, checkpoint="never", **options):
    torch.manual_seed(1)
    x, _ = _data()
    pipe = fxpipe.pipeline(Model(), ["cpu"], 3, example_args=(x,), checkpoint=checkpoint, **options)
    if executor is not None:
        pipe._fxpipe.engine.executor = executor
    return pipe


def _steps(pipe):
    """Everything that two steps make, one of each kind."""
    x, t = _data()
    torch.manual_seed(3)
    loss, outputs = pipe.forward_backward(x, target=t, loss_fn=F.cross_entropy, return_outputs=True)
    again = F.cross_entropy(pipe(x), t)
    again.backward()
    made = dict(zip(NAMES, (loss, outputs, again.detach()), strict=True))
    return made | {n: p.grad for n, p in pipe.named_parameters()} | copy.deepcopy(pipe.state_dict())


def test_who_drives():
    assert isinstance(executor_for([CPU]), InlineExecutor)
    assert isinstance(executor_for([CPU, CPU]), ThreadedExecutor)
    assert isinstance(executor_for([torch.device("cuda:0")]), ThreadedExecutor)


@pytest.mark.parametrize(("checkpoint", "stages"), [("never", 1), ("always", 2)])
def test_the_same_bits_as_workers(checkpoint, stages):
    with (
        _pipe(checkpoint=checkpoint, stages_per_device=stages) as alone,
        closing(ThreadedExecutor([CPU])) as workers,
        _pipe(workers, checkpoint, stages_per_device=stages) as other,
    ):
        have, want = _steps(alone), _steps(other)
    assert have.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(have[name], value), name


def test_it_starts_no_thread_and_stages_run_in_this_one():
    found = []

    def loss_fn(y, t):
        found.append(threading.get_ident())
        return F.cross_entropy(y, t)

    before = threading.active_count()
    with _pipe() as pipe:
        x, t = _data()
        pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        assert threading.active_count() == before
    assert set(found) == {threading.get_ident()}


def test_what_a_stage_sets_stays_in_its_row():
    variable = contextvars.ContextVar("variable", default=0)
    found = []

    def loss_fn(y, t):
        found.append(variable.get())
        variable.set(variable.get() + 1)
        return F.cross_entropy(y, t)

    x, t = _data()
    variable.set(4)  # another value would be another loss, which is verified
    with _pipe() as pipe:
        pipe.forward_backward(x, target=t, loss_fn=loss_fn)  # verifies the loss, in the caller's context
        found.clear()
        variable.set(4)
        pipe.forward_backward(x, target=t, loss_fn=loss_fn)
    assert found == [4, 5, 6]
    assert variable.get() == 4


def _state():
    kinds = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch._C._is_multithreading_enabled(),
        *map(torch.is_autocast_enabled, kinds),
        *map(torch.get_autocast_dtype, kinds),
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_a_stage_leaves_nothing_set(error):
    def loss_fn(y, t):
        if y.shape[0] == 2:  # the second micro-batch
            torch.set_grad_enabled(False)
            torch.set_autocast_enabled("cpu", True)
            raise error("away")
        return F.cross_entropy(y, t)

    before = _state()
    with _pipe() as pipe:
        x, t = _data()
        with pytest.raises(error, match="away"):
            pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        assert _state() == before
        assert all(p.grad is None for p in pipe.parameters())
        pipe.forward_backward(x, target=t, loss_fn=F.cross_entropy)
        assert all(p.grad is not None for p in pipe.parameters())


@pytest.mark.parametrize("executor", [None, InterleavedExecutor(0)])
def test_what_loss_fn_leaves_set_does_not_outlast_it(executor):
    def loss_fn(y, t):
        loss = F.cross_entropy(y, t)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        return loss

    found = []
    for leaves_it in (False, True):
        with _pipe(executor) as pipe:
            x, t = _data()
            torch.manual_seed(2)
            before = _state()
            pipe.forward_backward(x, target=t, loss_fn=loss_fn if leaves_it else F.cross_entropy)
            assert _state() == before
            found.append([p.grad for p in pipe.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_under_autocast_backward_has_none():
    """Forward and loss have the caller's; what the stage's backward runs in has not."""
    found = {}

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.setdefault("forward", torch.is_autocast_enabled("cpu"))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            found["backward"] = torch.is_autocast_enabled("cpu")
            return gradient

    class Inside(Model):
        def forward(self, x):
            return Asking.apply(self.inner(x))

    x, t = _data()
    with fxpipe.pipeline(Inside(), ["cpu"], 3, example_args=(x,)) as pipe, torch.autocast("cpu", torch.bfloat16):
        pipe(x)  # recorded and checked, with backwards of their own
        found.clear()
        pipe.forward_backward(x, target=t, loss_fn=lambda y, t: F.cross_entropy(y.float(), t))
    assert found == {"forward": True, "backward": False}


def test_closing_while_another_thread_runs_a_step():
    x, t = _data()
    pipe = _pipe()
    at_work, closed, errors = threading.Event(), threading.Event(), []

    def loss_fn(y, t):
        at_work.set()
        assert closed.wait(10)
        return F.cross_entropy(y, t)

    def run():
        try:
            pipe.forward_backward(x, target=t, loss_fn=loss_fn)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert at_work.wait(10)
    pipe._fxpipe.engine.executor.close()
    closed.set()
    thread.join(10)
    assert not thread.is_alive()
    (error,) = errors
    assert "closed while this step ran" in str(error)
    pipe.close()


def test_a_backward_within_a_backward():
    """The drop-in's backward runs the rows in the thread of the caller's backward, and that goes on."""
    x, t = _data()
    with _pipe() as pipe:
        plain = nn.Linear(4, 4)
        leaf = x.clone().requires_grad_()
        loss = F.cross_entropy(pipe(plain(leaf)), t)
        loss.backward()
        assert leaf.grad is not None
        assert plain.weight.grad is not None
        assert all(p.grad is not None for p in pipe.parameters())
