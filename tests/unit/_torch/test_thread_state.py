"""What the caller has around its code holds in the workers, where plain torch has it, and nowhere else."""

import contextvars
import copy
import importlib.util
import threading
import time
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.layered import Layered
from helpers.tried_orders import InterleavedExecutor
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe._torch.thread_state import ThreadState, set_thread_state
from fxpipe.errors import StateError

WORD = contextvars.ContextVar("WORD", default="unset")
seen: list[tuple[str, object]] = []  # by `Looks`: (thread, what it found)


class Looks(nn.Module):
    """Kept whole, so that its Python runs in the worker."""

    look = staticmethod(lambda: None)

    def forward(self, x):
        seen.append((threading.current_thread().name, Looks.look()))
        return x * 1


class Net(Layered, first=6, looks=Looks, second=6, last=(6, 2)):
    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.looks(torch.sigmoid(self.second(x)))
        return self.last(x)


class NoAutocastInside(Net):
    """What is saved in the block is float32, so that backward does other things where autocast is on."""

    def forward(self, x):
        x = torch.tanh(self.first(x))
        with torch.autocast("cpu", enabled=False):
            x = torch.sigmoid(self.second(x.float()))
        return self.last(x)


def _net(kind=Net):
    torch.manual_seed(0)
    return kind()


def _x():
    return torch.linspace(-1, 1, 24).reshape(4, 6)


def _pipe_of(model, chunks=1, **options):
    looks = [Looks] if any(isinstance(module, Looks) for module in model.modules()) else []
    options = {"example_args": (_x(),), "checkpoint": "never", "leaf_modules": looks} | options
    return oracle.closing(fxpipe.pipeline(model, ["cpu", "cpu"], chunks, **options))


@pytest.fixture
def look(monkeypatch):
    """What `Looks` looks at; what it has seen in workers since."""

    def at(question):
        monkeypatch.setattr(Looks, "look", staticmethod(question))
        seen.clear()
        return lambda: [found for thread, found in seen if thread.startswith("fxpipe")]

    return at


# -- what functions see ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3])
def test_inference_mode_holds_in_the_workers(look, chunks):
    with _pipe_of(_net(), chunks) as pipe:
        found = look(lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        with torch.inference_mode():
            y = pipe(_x())
        assert y.is_inference()
        assert found() == [(True, False)] * chunks
        found = look(lambda: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        assert not pipe(_x()).is_inference()
        assert found() == [(False, True)] * chunks, "the next step is not in inference mode"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_autocast_of_forward_and_of_backward_are_told_apart(inside, checkpoint):
    plain, model = _net(NoAutocastInside), _net(NoAutocastInside)
    with _pipe_of(model, checkpoint=checkpoint) as pipe:
        for run in (plain, pipe):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(_x()).float().square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        oracle.assert_same_gradients(model, plain)


def test_backward_of_forward_backward_has_no_autocast():
    plain, model = _net(NoAutocastInside), _net(NoAutocastInside)
    with _pipe_of(model) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(plain(_x()), torch.ones(4, 2))
            pipe.forward_backward(_x(), target=torch.ones(4, 2), loss_fn=F.mse_loss)
        loss.backward()
        oracle.assert_same_gradients(model, plain)


def test_context_variables_are_the_callers(look):
    with _pipe_of(_net(), 2) as pipe:
        for word in ("one", "two"):
            found = look(WORD.get)
            token = WORD.set(word)
            pipe(_x())
            WORD.reset(token)
            assert found() == [word, word]


def _packed(run):
    """The shapes that were packed and unpacked in a step whose backward is outside the block."""
    packed, unpacked = Counter(), Counter()

    def pack(tensor):
        packed[tuple(tensor.shape)] += 1
        return tensor

    def unpack(tensor):
        unpacked[tuple(tensor.shape)] += 1
        return tensor

    with saved_tensors_hooks(pack, unpack):
        loss = run(_x()).sum()
    before = Counter(packed)
    loss.backward()
    return before, packed, unpacked


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("fresh", [True, False])
def test_hooks_for_saved_tensors_see_what_those_of_the_plain_model_see(checkpoint, fresh):
    want_before, want, want_unpacked = _packed(_net())
    planned = {"example_args": ()} if fresh else {}
    with _pipe_of(_net(), checkpoint=checkpoint, **planned) as pipe:
        before, packed, unpacked = _packed(pipe)
    assert packed == want
    assert unpacked == want_unpacked
    assert before == (want_before if checkpoint == "never" else Counter()), "what is recomputed is saved in R only"


# -- modes -----------------------------------------------------------------------------------------------------------

SHAPE_ONLY = {"aten.t", "aten.detach", "aten.view", "aten.expand", "aten.clone", "aten.mul", "aten.ones_like"}


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).rsplit(".", 1)[0]
        if name not in SHAPE_ONLY:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("linear", "tanh", "sigmoid"):
            self.found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("executor", ["workers", "one thread"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_dispatch_mode_sees_the_operations_of_forward_and_backward(executor, fresh):
    plain = _net()
    with Operations() as want_forward:
        loss = plain(_x()).sum()
    with Operations() as want_backward:
        loss.backward()
    with _pipe_of(_net(), **({"example_args": ()} if fresh else {})) as pipe:
        usual = pipe._fxpipe.engine.executor
        pipe._fxpipe.engine.executor = InterleavedExecutor(0) if executor == "one thread" else usual
        with Operations() as forward:
            loss = pipe(_x()).sum()
        with Operations() as backward:
            loss.backward()
        usual.close()
    assert forward.found == want_forward.found
    assert backward.found == want_backward.found
    assert backward.found["aten.mm"] > 0


def test_a_mode_is_gone_after_its_block_also_where_a_stage_fails():
    with _pipe_of(_net(), 2) as pipe:
        with Operations(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            pipe(_x()[:, :5])
        with Operations() as mode:
            pipe(_x())
        before = Counter(mode.found)
        pipe(_x()).sum().backward()
        assert mode.found == before
        assert before["aten.addmm"] == 6


def test_a_function_mode_sees_the_functions_of_each_micro_batch():
    with _pipe_of(_net(), 2) as pipe, Functions() as mode:
        pipe.forward_backward(_x(), target=torch.ones(4, 2), loss_fn=F.mse_loss)
    assert mode.found == {"linear": 6, "tanh": 2, "sigmoid": 2}


class Alone(TorchDispatchMode):
    """Takes its time, and sees whether another thread comes in between."""

    def __init__(self):
        super().__init__()
        self.free, self.intruded, self.threads = threading.Lock(), False, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.threads.add(threading.current_thread().name)
        alone = self.free.acquire(blocking=False)
        self.intruded |= not alone
        time.sleep(1e-3)
        if alone:
            self.free.release()
        return func(*args, **(kwargs or {}))


def test_where_there_is_a_mode_one_action_runs_at_a_time():
    with _pipe_of(_net(), 4) as pipe, Alone() as mode:
        pipe.forward_backward(_x(), target=torch.ones(4, 2), loss_fn=F.mse_loss)
    assert mode.threads >= {"fxpipe-0-cpu", "fxpipe-1-cpu"}
    assert not mode.intruded


def _in_fake_tensors(pipe):
    with FakeTensorMode(allow_non_fake_inputs=True):
        pipe(_x())


def _with_tangents(pipe):
    with forward_ad.dual_level():
        pipe(forward_ad.make_dual(_x(), torch.ones(4, 6)))


REFUSED = {
    "fake tensors": (_in_fake_tensors, r"inside FakeTensorMode .*use fxpipe\.plan"),
    "make_fx": (lambda pipe: make_fx(lambda x: pipe(x))(_x()), "inside ProxyTorchDispatchMode"),
    "torch.jit.trace": (lambda pipe: torch.jit.trace(pipe, (_x(),)), r"trace the model: fxpipe\.unwrap\(pipe\)"),
    "torch.func.vmap": (lambda pipe: torch.func.vmap(pipe)(_x()[None]), "inside a transform of torch.func"),
    "forward-mode AD": (_with_tangents, "tangents would stop"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_where_a_pipe_cannot_run_it_says_so(name):
    call, message = REFUSED[name]
    with _pipe_of(_net(), 2) as pipe:
        with pytest.raises(StateError, match=message):
            call(pipe)
        pipe(_x())


# -- anomaly mode and the profiler -----------------------------------------------------------------------------------


class BadRoot(Layered, first=6, second=6):
    def forward(self, x):
        y = torch.sqrt(self.first(x) * 0)  # infinite slope, times zero
        return self.second(y)


@pytest.mark.parametrize("one_pass", [True, False])
def test_anomaly_mode_names_the_stage_and_shows_its_code(one_pass):
    def run(pipe):
        if one_pass:
            pipe.forward_backward(_x(), loss_fn=torch.sum, reduction="sum")
        else:
            pipe(_x()).sum().backward()

    with _pipe_of(BadRoot(), 2, check=False) as pipe:
        with warnings.catch_warnings(record=True) as warned, torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("always")
            with pytest.raises(RuntimeError, match=r"MulBackward0.*nan") as caught:
                run(pipe)
        assert any("fxpipe: stage" in note and "backward" in note for note in caught.value.__notes__)
        texts = [str(one.message) for one in warned]
        assert any("Traceback of forward call" in text and "mul = " in text for text in texts), texts
        pipe(_x())


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")  # of torch 2.11, of no use here
def test_each_action_is_a_range_of_a_profiler_that_sees_all_threads():
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with _pipe_of(_net(), 2) as pipe:
        pipe(_x())  # threads start
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as found:
            pipe(_x()).sum().backward()
        names = Counter(event.name for event in found.events())
    wanted = [f"fxpipe {kind} stage {j} micro-batch {i}" for kind in "FB" for j in range(2) for i in range(2)]
    assert {name: names[name] for name in wanted} == dict.fromkeys(wanted, 1)
    assert names["aten::linear"] == 6, "operations of stages are seen too"


def test_a_profiler_that_does_not_see_the_workers_is_warned_of():
    with _pipe_of(_net(), 2) as pipe:
        with profile(activities=[ProfilerActivity.CPU]), pytest.warns(UserWarning, match="profile_all_threads=True"):
            pipe(_x())
        pipe._fxpipe.engine.executor.close()
        pipe._fxpipe.engine.executor = InterleavedExecutor(0)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            pipe(_x())  # in this thread, which it sees
    assert "fxpipe F stage 1 micro-batch 1" in {event.name for event in found.events()}


def test_the_default_device_of_an_import_is_nobodys_device():
    """The token of each graph was on a GPU for good, where a script sets the default device first."""
    spec = importlib.util.find_spec("fxpipe.runtime.stage_instance")
    module = importlib.util.module_from_spec(spec)
    with torch.device("meta"):
        spec.loader.exec_module(module)
    assert module._entry_token.device.type == "cpu"


class MakesLeaves(Layered, a=4, b=4):
    def forward(self, x):
        zeros = torch.zeros(x.shape[0], 4).requires_grad_()
        h = self.a(x) * 2
        again = h.detach().requires_grad_()
        return self.b(h) + again * 3 + zeros


@pytest.mark.parametrize("cut", range(1, 11, 3))
def test_a_leaf_that_forward_makes_is_sent_on_in_every_mode(cut):
    """In inference mode torch had no node for it, for those cuts that send it."""
    plain, x = MakesLeaves(), torch.randn(6, 4)
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 2, 2, example_args=(x,), balance=[cut, 11 - cut]) as pipe:
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(pipe(x), plain(x))
        oracle.assert_step(pipe, plain, x)
        oracle.assert_step(pipe, plain, x, one_pass=True)


@pytest.mark.cuda
def test_the_default_device_in_a_worker_is_the_stages(look):
    model = _net().cuda()
    x = _x().cuda()
    with fxpipe.pipeline(
        model, ["cuda:0", "cuda:0"], 2, leaf_modules=[Looks], example_args=(x,), checkpoint="never"
    ) as pipe:
        found = look(lambda: torch.zeros(1).device.type)
        with torch.device("cuda"):
            pipe(x)
        assert found() == ["cuda", "cuda"]
        found = look(lambda: torch.zeros(1).device.type)
        pipe(x)
        assert found() == ["cpu", "cpu"]


def test_nothing_in_inference_mode_records_gradients():
    with torch.inference_mode(), torch.enable_grad():
        assert torch.is_grad_enabled()
        assert not ThreadState.now().grad
    assert ThreadState.now().grad


def test_the_cache_of_casts_is_off_where_autocast_is_set_for_a_thread():
    """It belongs to the process: a worker that leaves its block would empty it under another one."""
    with torch.autocast("cpu", torch.bfloat16):
        state = ThreadState.now()
        assert torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")
    with set_thread_state(state):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
