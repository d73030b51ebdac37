"""Executors drive the rows of a step, end with it, and pass its failure on; one CPU worker is the caller's thread."""

import contextlib
import contextvars
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import closing
from helpers.tried_orders import InterleavedExecutor
from torch import nn

import fxpipe
from fxpipe.errors import InternalError
from fxpipe.runtime.executors import InlineExecutor, ThreadedExecutor, executor_for, run_row
from fxpipe.runtime.run import Fences, Run
from fxpipe.scheduling import dependencies, make_schedule
from fxpipe.scheduling.actions import Action, ActionKind

STAGES, CHUNKS, BATCH = 3, 4, 7  # micro-batches of 2, 2, 2, 1
CPUS = [torch.device("cpu")] * STAGES


def _assert_equal(have, want, what):
    assert list(have) == list(want)
    for name, value in want.items():
        assert torch.equal(have[name], value), f"{what}: {name} differs by {(have[name] - value).abs().max()}"


class Thrice(Layered, linear=16):
    """One weight, used several times in one stage: autocast may cast it once or each time, which moves the last bit."""

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.linear(x))
        return x


def test_autocast_under_every_executor():
    """Autocast's cache belongs to the process: what one worker clears must not move the bits of another."""
    x = torch.randn(32, 16)
    pipe = fxpipe.pipeline(
        nn.Sequential(*(Thrice() for _ in CPUS)), ["cpu"] * STAGES, 8, balance=["0", "1"], example_args=(x,)
    )

    def run(executor):
        pipe._fxpipe.engine.executor = executor
        pipe.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.forward_backward(x, target=torch.zeros_like(x), loss_fn=F.mse_loss)
        return {"loss": loss} | {name: p.grad for name, p in pipe.named_parameters()}

    want = run(InterleavedExecutor(0))
    for seed in range(1, 6):
        _assert_equal(run(InterleavedExecutor(seed)), want, f"Interleaved({seed})")
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with closing(ThreadedExecutor(CPUS)) as executor:
            for k in range(10):
                _assert_equal(run(executor), want, f"Workers, run {k}")
    finally:
        sys.setswitchinterval(usual)


# -- with a run that only counts ------------------------------------------------------------------------------------


class Counted:
    """As much of a run, and of its link, as an executor sees."""

    raise_failure = Run.raise_failure

    def __init__(self, schedule, slow=0.0, fail_at=None):
        self.failure, self.done, self.slow, self.fail_at = None, [], slow, fail_at
        actions = [a for row in schedule.rows for a in row]
        self.needs = {a: [b for b in dependencies(a, schedule.stages) if b in actions] for a in actions}
        self.fences, self.link = Fences(), self

    def wait(self, run, action):
        for needed in self.needs[action]:
            self.fences.wait_behind(needed)

    def fail(self, error):
        self.failure = self.failure or error
        self.fences.open_all()

    def in_row(self):
        return contextlib.nullcontext()

    def perform(self, action):
        time.sleep(self.slow)
        if action == self.fail_at:
            self.fail(RuntimeError(str(action)))
            return
        self.done.append(action)
        self.fences.passed(self, action)


def _counted(**options):
    schedule = make_schedule("1f1b", STAGES, CHUNKS, "never")
    return Counted(schedule, **options), schedule.rows


def assert_runs(workers):
    step, rows = _counted()
    workers.run(step, rows)
    assert len(step.done) == sum(map(len, rows))


def test_a_failure_outside_of_an_action_opens_the_fences_too():
    step, rows = _counted()
    wait, step.wait = step.wait, lambda run, action: 1 / 0
    run_row(step, rows[0][:1])
    assert isinstance(step.failure, ZeroDivisionError)
    step.wait = wait
    run_row(step, rows[2])  # returns: nothing is left to wait for
    assert not step.done


class Interrupted(ThreadedExecutor):
    """Ctrl-C strikes while the caller waits, `times` times."""

    times = 1

    def _wait_until_idle(self, queues, threads):
        if self.times:
            self.times -= 1
            raise KeyboardInterrupt
        super()._wait_until_idle(queues, threads)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_of_the_caller(times):
    """The first one makes the step fail and waits for the rows, the second one does not wait; the next step runs."""
    with closing(Interrupted(CPUS)) as workers:
        workers.times = times
        step, rows = _counted(slow=0.01)
        with pytest.raises(KeyboardInterrupt):
            workers.run(step, rows)
        if times == 1:
            count = len(step.done)
            time.sleep(0.03)
            assert len(step.done) == count < sum(map(len, rows))
        assert_runs(workers)


def test_an_interrupt_is_not_lost_behind_a_failure():
    with closing(Interrupted(CPUS)) as workers:
        step, rows = _counted(fail_at=Action(ActionKind.FORWARD, 0, 0))
        with pytest.raises(KeyboardInterrupt):
            workers.run(step, rows)


def test_a_worker_that_has_died_is_replaced():
    with closing(ThreadedExecutor(CPUS)) as workers:
        assert_runs(workers)
        workers._queues[1].put(None)
        workers._threads[1].join(2)
        old = workers._threads
        assert_runs(workers)
        assert workers._threads is not old
        for thread in old:
            thread.join(1)
        assert not any(thread.is_alive() for thread in old)


def test_what_has_ended_a_worker_is_said(monkeypatch):
    """Outside of an action, where an exception is the step's."""
    monkeypatch.setattr("fxpipe.runtime.executors.POLL_SECONDS", 0.02)
    cause = MemoryError("no room for a queue")

    def fail(step, row):
        if row[0].stage == 1:
            raise cause
        run_row(step, row)

    with closing(ThreadedExecutor(CPUS)) as workers:
        step, rows = _counted()
        with monkeypatch.context() as patch:
            patch.setattr("fxpipe.runtime.executors.run_row", fail)
            with pytest.raises(InternalError, match=r"fxpipe-1-cpu has ended .*MemoryError: no room") as caught:
                workers.run(step, rows)
        assert caught.value.__cause__ is cause
        assert_runs(workers)


def test_a_worker_that_other_code_has_ended_is_said_to_be(monkeypatch):
    """No exception ended it, so none is named."""
    monkeypatch.setattr("fxpipe.runtime.executors.POLL_SECONDS", 0.02)
    with closing(ThreadedExecutor(CPUS)) as workers:
        step, rows = _counted()
        workers.start(step, [()] * len(rows))
        workers._queues[1].put(None)
        with pytest.raises(InternalError, match=r"fxpipe-1-cpu has ended .*\(it was told to end, by no code of fxpipe"):
            workers.finish(step, rows)
        assert_runs(workers)


def test_threads_that_cannot_start(monkeypatch):
    """As where the process may have no more threads: the error arrives, and those that did start end."""
    started = []
    start = threading.Thread.start

    def refuse_third(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with closing(ThreadedExecutor(CPUS)) as workers:
        step, rows = _counted()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_third)
            with pytest.raises(RuntimeError, match="can't start"):
                workers.run(step, rows)
        for thread in started:
            thread.join(1)
        assert not any(thread.is_alive() for thread in started)
        assert_runs(workers)


def test_each_worker_has_its_share_of_the_cores():
    """And a thread that is made later starts with the caller's number, not with a worker's."""
    found = {}

    class Asking(Counted):
        def perform(self, action):
            found[action.stage] = torch.get_num_threads()
            super().perform(action)

    torch.set_num_threads(6)
    try:
        with closing(ThreadedExecutor(CPUS)) as workers:
            schedule = make_schedule("gpipe", STAGES, CHUNKS, "never")
            workers.run(Asking(schedule), schedule.rows)
            assert found == dict.fromkeys(range(STAGES), 2)
            assert torch.get_num_threads() == 6
            later = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert later == [6]
    finally:
        torch.set_num_threads(1)


CPU = torch.device("cpu")


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, 3))


def _data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(7, 4, generator=generator), torch.randint(0, 3, (7,), generator=generator)


def _pipe(executor=None):
    torch.manual_seed(1)
    x, _ = _data()
    pipe = fxpipe.pipeline(model(), ["cpu"], 3, example_args=(x,), checkpoint="never")
    if executor is not None:
        pipe._fxpipe.engine.executor = executor
    return pipe


def test_who_drives():
    assert isinstance(executor_for([CPU]), InlineExecutor)
    assert isinstance(executor_for([CPU, CPU]), ThreadedExecutor)
    assert isinstance(executor_for([torch.device("cuda:0")]), ThreadedExecutor)


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

    class Inside(Layered, inner=model):
        def forward(self, x):
            return Asking.apply(self.inner(x))

    x, t = _data()
    with fxpipe.pipeline(Inside(), ["cpu"], 3, example_args=(x,)) as pipe, torch.autocast("cpu", torch.bfloat16):
        pipe(x)  # recorded and checked, with backwards of their own
        found.clear()
        pipe.forward_backward(x, target=t, loss_fn=lambda y, t: F.cross_entropy(y.float(), t))
    assert found == {"forward": True, "backward": False}


def test_closing_while_another_thread_runs_an_inline_step():
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
