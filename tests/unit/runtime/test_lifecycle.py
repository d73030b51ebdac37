"""From the first step to the last reference: nothing is left behind, in threads, tensors or processes."""

import copy
import gc
import io
import pickle
import textwrap
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers.forked_scripts import ForkServer
from helpers.layered import Layered
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import fxpipe
from fxpipe.errors import StateError
from fxpipe.runtime import engine as engine_module


class Watched(torch.autograd.Function):
    """The identity; remembers weakly what went through."""

    seen: list[weakref.ref] | None = None

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)  # so `x` lives as long as its graph
        if Watched.seen is not None:
            Watched.seen.append(weakref.ref(x))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(Layered, first=4, norm=lambda: nn.BatchNorm1d(4), second=4):
    def forward(self, x):
        y = Watched.apply(torch.tanh(self.norm(self.first(x))))
        return Watched.apply(self.second(F.dropout(y, 0.1, self.training))) + x


def _x(batch=8):
    return torch.randn(batch, 4)


def _pipe(model=None, stages=2, **options):
    return fxpipe.pipeline(model or Model(), ["cpu"] * stages, 4, example_args=(_x(),), **options)


def _step(pipe, x=None, t=None):
    x = _x() if x is None else x
    return pipe.forward_backward(x, target=torch.zeros_like(x) if t is None else t, loss_fn=F.mse_loss)


def _workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fxpipe")]


def _wait_for_end(threads):
    for thread in threads:
        thread.join(2)
    return not any(thread.is_alive() for thread in threads)


@pytest.fixture
def watched():
    """What went through the stages; with the garbage collector off, so that a cycle shows."""
    gc.collect()
    gc.disable()
    Watched.seen = []
    yield Watched.seen
    Watched.seen = None
    gc.enable()


def _alive(seen):
    return [ref for ref in seen if ref() is not None]


# -- dropped ---------------------------------------------------------------------------------------------------------


def test_threads_start_with_the_first_step_and_end_with_the_pipe():
    """One for each device, not for each stage."""
    before = _workers()
    with _pipe(stages_per_device=2) as pipe:
        assert _workers() == before
        pipe(_x())
        assert len(pipe.plan.stages) == 4
        assert sorted(thread.name for thread in _workers()) == ["fxpipe-0-cpu", "fxpipe-1-cpu"]
    assert _workers() == before
    pipe.close()  # may be called again


def test_a_pipe_that_is_dropped_takes_all_along():
    model = Model()
    pipe = _pipe(model)
    _step(pipe)
    model.zero_grad()
    loss = pipe(_x()).sum()
    threads = _workers()
    refs = [weakref.ref(thing) for thing in (pipe, pipe._fxpipe, pipe._fxpipe.engine, model, *model.parameters())]
    del pipe
    gc.collect()
    loss.backward()  # it lives until then
    assert all(p.grad is not None for p in model.parameters())
    del model, loss
    gc.collect()
    assert _wait_for_end(threads)
    assert not [ref for ref in refs if ref() is not None]


# -- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "checkpoint"), [("gpipe", "never"), ("1f1b", "except_last"), ("1f1b", "always")])
def test_no_activation_outlives_its_step(watched, schedule, checkpoint):
    with _pipe(schedule=schedule, checkpoint=checkpoint) as pipe:
        for _ in range(3):
            _step(pipe)
            assert watched
            assert not _alive(watched)


def test_no_activation_outlives_a_drop_in_backward(watched):
    with _pipe() as pipe:
        for _ in range(3):
            loss = pipe(_x()).pow(2).sum()
            assert _alive(watched)
            loss.backward()
            assert not _alive(watched)  # though `loss` is still there


def test_outputs_that_die_without_backward_free_their_step(watched):
    with _pipe() as pipe:
        y = pipe(_x())
        loss = y.sum()
        assert _alive(watched)
        del y
        assert _alive(watched)
        del loss
        assert not _alive(watched)


def test_a_forward_without_gradients_keeps_nothing(watched):
    with _pipe() as pipe, torch.no_grad():
        y = pipe(_x())
        assert not _alive(watched)
        assert not y.requires_grad


def test_nothing_grows_over_steps():
    """Neither threads nor tensors, not even those that only the garbage collector would find."""

    def tensors():
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    with _pipe() as pipe:
        for _ in range(3):
            _step(pipe)
            pipe(_x()).sum().backward()
        gc.collect()
        gc.disable()
        try:
            threads, before = threading.active_count(), tensors()
            for _ in range(20):
                _step(pipe)
                pipe(_x()).sum().backward()
                pipe(_x())
            assert threading.active_count() == threads
            assert tensors() == before
        finally:
            gc.enable()


# -- closing ---------------------------------------------------------------------------------------------------------


def test_a_closed_pipe_says_so_and_keeps_its_model():
    model = Model()
    with pytest.raises(KeyError), _pipe(model) as pipe:  # noqa: PT012
        _step(pipe)
        assert pipe.last_step is not None
        raise KeyError
    for call in (lambda: pipe(_x()), lambda: _step(pipe)):
        with pytest.raises(StateError, match=r"closed; make a new one with fxpipe\.pipeline"):
            call()
    assert pipe.plan.stages
    assert pipe.model is model
    assert list(pipe.state_dict()) == list(model.state_dict())
    model(_x())
    with _pipe(pipe.model) as again:
        _step(again)


def test_backward_after_close_says_so():
    pipe = _pipe()
    loss = pipe(_x()).sum()
    pipe.close()
    with pytest.raises(StateError, match="closed"):
        loss.backward()
    assert not _workers() or _wait_for_end(_workers())


def test_close_inside_a_step_is_refused():
    with _pipe() as pipe:

        def loss_fn(y, t):
            pipe.close()
            return F.mse_loss(y, t)

        with pytest.raises(StateError, match="inside a step"):
            pipe.forward_backward(_x(), target=_x(), loss_fn=loss_fn)
        _step(pipe)


def test_close_while_another_thread_steps():
    pipe, errors, is_running = _pipe(), [], threading.Event()

    def loss_fn(y, t):
        is_running.set()
        return F.mse_loss(y, t)

    def run():
        try:
            while True:
                pipe.forward_backward(_x(), target=_x(), loss_fn=loss_fn)
        except StateError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_running.wait(30)
    pipe.close()
    thread.join(30)
    assert not thread.is_alive()
    assert "closed" in str(errors[0])


# -- copies ----------------------------------------------------------------------------------------------------------


def _assert_independent_equals(copied, pipe):
    """Another model and other workers, and the same numbers."""
    assert copied.model is not pipe.model
    assert copied.model.second.weight is copied.model.first.weight
    assert copied.training == pipe.training
    assert type(copied) is type(pipe)
    ours, theirs = dict(pipe.named_parameters()), dict(copied.named_parameters())
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not {id(p) for p in ours.values()} & {id(p) for p in theirs.values()}
    x = _x()
    losses = []
    for one in (pipe, copied):
        one.zero_grad()
        torch.manual_seed(3)
        losses.append(_step(one, x))
    assert torch.equal(*losses)
    for name, p in ours.items():
        torch.testing.assert_close(theirs[name].grad, p.grad)
    with torch.no_grad():
        copied.model.first.weight.add_(1)
    assert not torch.equal(copied.model.first.weight, pipe.model.first.weight)


@pytest.mark.parametrize(("how", "planned"), [("pickle", False), ("deepcopy", True), ("torch.save", True)])
def test_copies(how, planned):
    model = Model()
    model.second.weight = model.first.weight
    pipe = _pipe(model) if planned else fxpipe.pipeline(model, ["cpu", "cpu"], 4)
    _step(pipe)
    pipe.train(how != "deepcopy")
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(pipe))
    elif how == "deepcopy":
        copied = copy.deepcopy(pipe)
    else:
        file = io.BytesIO()
        torch.save(pipe, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    with pipe, copied:
        _assert_independent_equals(copied, pipe)


def test_a_copy_of_a_model_that_holds_a_pipe():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.pipe, self.model = None, Model()
            self.pipe = fxpipe.pipeline(self.model, ["cpu", "cpu"], 4)

        def forward(self, x):
            return self.pipe(x)

    copied = copy.deepcopy(Holder())
    assert copied.pipe.model is copied.model
    copied(_x())
    copied.pipe.close()


# -- several threads -------------------------------------------------------------------------------------------------


def test_two_pipes_in_two_threads():
    """Each gives what it gives alone."""
    models = [Model(), Model()]
    pipes = [_pipe(copy.deepcopy(model)) for model in models]
    inputs = [_x() for _ in pipes]
    found = [[], []]

    def run(k):
        pipe = pipes[k].eval()  # the generator is one for all threads: no dropout
        for _ in range(10):
            pipe.zero_grad()
            loss = _step(pipe, inputs[k])
            found[k].append([loss, *(p.grad for p in pipe.parameters())])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for k in range(2):
        assert len(found[k]) == 10
        with _pipe(copy.deepcopy(models[k])) as alone:
            alone.eval()
            want = [_step(alone, inputs[k]), *(p.grad for p in alone.parameters())]
        for have in found[k]:
            assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
        pipes[k].close()
    assert not is_in_torch_dispatch_mode(), "a flag of the process by which torch.compile stands aside"


def test_concurrent_calls_of_one_pipe():
    with _pipe() as pipe:
        started, go_on, errors = threading.Event(), threading.Event(), []

        def loss_fn(y, t):
            started.set()
            assert go_on.wait(30)
            return F.mse_loss(y, t)

        thread = threading.Thread(target=lambda: pipe.forward_backward(_x(), target=_x(), loss_fn=loss_fn))
        thread.start()
        assert started.wait(30)
        for call in (lambda: pipe(_x()), lambda: _step(pipe)):
            with pytest.raises(StateError, match="already running a step, in another thread") as caught:
                call()
            errors.append(caught.value)
        go_on.set()
        thread.join(30)
        assert not thread.is_alive()
        assert len(errors) == 2
        _step(pipe)


def test_a_call_inside_a_step():
    with _pipe() as pipe:
        with pytest.raises(StateError, match=r"already running a step.*around this call"):
            pipe.forward_backward(_x(), target=_x(), loss_fn=lambda y, t: F.mse_loss(pipe(t), y))
        handle = pipe.model.first.weight.register_hook(lambda gradient: pipe(_x()).sum() * gradient)
        with pytest.raises(StateError, match="already running a step"):
            _step(pipe)
        handle.remove()
        _step(pipe)


# -- several forwards in flight --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "checkpoint"), [((0, 1, 2), "always"), ((2, 1, 0), "never"), ((1, 2, 0), "always")])
def test_several_forwards_and_then_their_backwards(order, checkpoint):
    """In any order, with a step of another kind in between; the gradients are those of each alone."""
    model = Model()
    model.norm.eval()  # which refuses micro-batches of 1 sample
    inputs = [_x(), _x(6), _x(2)]
    alone = []
    start = copy.deepcopy(model.state_dict())
    with _pipe(model, checkpoint=checkpoint) as pipe:

        def forward(k):
            torch.manual_seed(k)
            return pipe(inputs[k]).pow(2).sum()

        losses = [forward(k) for k in range(3)]
        for loss in losses:
            pipe.zero_grad()
            loss.backward()
            alone.append([p.grad for p in pipe.parameters()])
        model.load_state_dict(start)
        losses = [forward(k) for k in range(3)]
        for k in order:
            pipe.zero_grad()
            losses[k].backward()
            assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), alone[k], strict=True))
            _step(pipe)


def test_a_forward_into_a_forward():
    """The output of one call is the input of the next: one backward goes through both."""
    plain = copy.deepcopy(model := Model().eval())
    x = _x().requires_grad_()
    with _pipe(model) as pipe:
        pipe(pipe(x)).pow(2).sum().backward()
    ours, x.grad = x.grad, None
    plain(plain(x)).pow(2).sum().backward()
    torch.testing.assert_close(ours, x.grad)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# -- processes -------------------------------------------------------------------------------------------------------

BEGIN = """
    import os, sys, threading, time
    import torch
    import torch.nn.functional as F
    from torch import nn
    import fxpipe

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    x = torch.randn(32, 16)
    pipe = fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(x,), hardware="cpu")

    def step():
        return pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)

    step()
"""


@pytest.fixture(scope="module")
def run_script():
    """Runs a script behind `BEGIN`, in a process of its own."""
    with ForkServer() as server:
        yield lambda script: server.run(textwrap.dedent(BEGIN) + textwrap.dedent(script))


AT_WORK = {
    "a long step": "while True: pipe.forward_backward(x, loss_fn=lambda y: time.sleep(0.05) or y.mean())",
    "planning": "while True: fxpipe.pipeline(model, ['cpu', 'cpu'], 4, example_args=(x,))",
    "profiling, which takes long": "fxpipe.profile(fxpipe.trace(model, (x,)), (x,), budget=60, repeats=10**6)",
}


@pytest.mark.slow
@pytest.mark.parametrize("work", AT_WORK)
def test_the_interpreter_ends_while_another_thread_is_at_work(run_script, work):
    ran = run_script(
        f"""
        def run():
            {AT_WORK[work]}

        threading.Thread(target=run, daemon=True).start()
        time.sleep(0.3)
        """
    )
    assert ran.returncode == 0, ran.stderr
    assert "terminate" not in ran.stderr
    assert "Fatal" not in ran.stderr


class _Asked:
    """A lock that notes when a thread begins to wait for it."""

    def __init__(self, lock):
        self.lock, self.begun = lock, threading.Event()

    def acquire(self, **how):
        if "timeout" in how:
            self.begun.set()
        return self.lock.acquire(**how)

    def release(self):
        self.lock.release()


def test_the_end_waits_for_a_step_of_another_thread(monkeypatch):
    monkeypatch.setattr(engine_module, "LAST_STEP_SECONDS", 30)
    engine = engine_module.Engine(Model(), None)
    engine._busy = asked = _Asked(engine._busy)
    order, is_running = [], threading.Event()

    def step():
        with engine.running():
            is_running.set()
            assert asked.begun.wait(20)
            order.append("step")

    def end():
        engine._end()
        order.append("end")

    threads = [threading.Thread(target=step), threading.Thread(target=end)]
    threads[0].start()
    assert is_running.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert order == ["step", "end"]
    with pytest.raises(StateError, match="already running a step"), engine.running():  # none begins any more
        pass


def test_the_end_inside_a_step_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(engine_module, "LAST_STEP_SECONDS", 30)
    engine = engine_module.Engine(Model(), None)
    engine._busy = asked = _Asked(engine._busy)
    with engine.running():
        engine._end()
    assert not asked.begun.is_set()


def test_the_end_waits_for_all_engines_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(engine_module, "LAST_STEP_SECONDS", 0.01)
    engines = [engine_module.Engine(Model(), None) for _ in range(2)]
    monkeypatch.setattr(engine_module, "_engines", engines)
    monkeypatch.setattr(engine_module, "close_all_executors", lambda: None)
    monkeypatch.setattr(engine_module, "stop_planning_threads", lambda: None)  # this thread ends no interpreter
    is_running, go = threading.Event(), threading.Event()

    def step():
        with engines[0].running():
            is_running.set()
            go.wait(20)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        assert is_running.wait(20)
        engine_module._stop_at_exit()
        assert engines[0]._busy.locked()  # by the step that goes on
        assert engines[1]._busy.locked()  # for good
    finally:
        go.set()
        thread.join(20)
    assert not engines[0]._busy.locked()


needs_forks = pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch with CUDA has no autograd in a fork of what has used it"
)


@pytest.mark.slow
@needs_forks
@pytest.mark.parametrize(
    "place", ["in a loss", "in a module kept whole", "in a random node", "while planning", "at rest"]
)
def test_a_fork_after_use_or_while_another_thread_is_at_work(run_script, place):
    """The child starts workers of its own, and waits for no thread that it has not, nor for the step of one."""
    ran = run_script(
        f"""
        place = {place!r}
        started, go_on = threading.Event(), threading.Event()

        def wait(here):
            if place == here and threading.current_thread() is not threading.main_thread() and not started.is_set():
                started.set()
                go_on.wait(20)

        class Whole(nn.Module):
            def forward(self, x):
                wait("in a module kept whole")
                return x * 2

        class Random(nn.Module):
            def forward(self, x):
                wait("in a random node")
                return nn.functional.dropout(x, 0.5, self.training)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.whole, self.random, self.last = nn.Linear(16, 16), Whole(), Random(), nn.Linear(16, 16)

            def forward(self, x):
                wait("while planning")
                return self.last(self.random(self.whole(self.first(x))))

        def loss(y, t):
            wait("in a loss")
            return F.mse_loss(y, t)

        def make():
            return fxpipe.pipeline(
                Model(), ["cpu", "cpu"], 4, example_args=(x,), leaf_modules=["whole", "random"], profile_budget=0.1
            )

        pipe = make()
        step = lambda: pipe.forward_backward(x, target=x, loss_fn=loss)
        thread = threading.Thread(target=make if place == "while planning" else step)
        thread.start()
        thread.join() if place == "at rest" else started.wait(20)
        assert started.is_set() == (place != "at rest")
        child = os.fork()
        if child == 0:
            import faulthandler
            faulthandler.dump_traceback_later(20, exit=True)
            torch.set_num_threads(1)  # OpenMP hangs in a child that has not its threads
            step()
            assert len([t for t in threading.enumerate() if t.name.startswith("fxpipe")]) == 2
            torch.testing.assert_close(pipe.eval()(x), pipe.model(x))
            make()
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        go_on.set()
        thread.join()
        assert os.waitstatus_to_exitcode(status) == 7, status
        step()
        """
    )
    assert ran.returncode == 0, ran.stderr
