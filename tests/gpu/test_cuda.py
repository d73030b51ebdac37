"""On GPUs a pipeline equals the plain model as well: two stages on one, on two, and one beside the CPU."""

import contextlib
import contextvars
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers.devices import accelerator, forced_copies, is_simulated, on_accelerators
from helpers.layered import Layered
from helpers.models import BY_NAME, CASES
from helpers.oracle import parts_of
from torch import nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.runtime.mini_batch import MiniBatch

ONE, MIXED, TWO = on_accelerators("0 0", "one"), on_accelerators("cpu 0", "mixed"), on_accelerators("0 1", "two")
BATCH, CHUNKS = 6, 3
MODULE = torch.get_device_module(accelerator())


def _synchronize():
    """Waits for all devices."""
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


@pytest.fixture(autouse=True)
def _in_full_float32():
    """By default convolutions and RNNs of a GPU compute in TF32, which has three digits."""
    backends = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    yield
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision


def _without_dropout(model):
    """Random numbers of a GPU are others than those of the CPU."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def _close(have, want):
    torch.testing.assert_close(have.cpu(), want.cpu(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("devices", [ONE, MIXED, TWO])
@pytest.mark.parametrize(("number", "case"), [*enumerate(CASES)], ids=lambda case: getattr(case, "name", ""))
def test_a_pipeline_on_gpus_equals_the_plain_model(number, case, devices):
    """Also in evaluation, whose graph is recorded when the parameters are on the devices of their stages already."""
    checkpoint = ("never", "always")[(number + len(set(devices))) % 2]
    plain = _without_dropout(case.make())
    args, kwargs = case.inputs(BATCH)
    target = case.target(BATCH)
    pipe = fxpipe.pipeline(
        copy.deepcopy(plain), devices, CHUNKS, example_args=args, example_kwargs=kwargs, checkpoint=checkpoint
    )
    with pipe:
        for drop_in in (False, True):
            for model in (plain, pipe):
                model.zero_grad()
            plain.load_state_dict(pipe.state_dict())
            for (a, k), t in zip(parts_of((args, kwargs), CHUNKS, BATCH), parts_of(target, CHUNKS, BATCH), strict=True):
                (case.loss(plain(*a, **k), t) / CHUNKS).backward()
            if drop_in:
                case.loss(pipe(*args, **kwargs), target.to(devices[-1])).backward()
            else:
                pipe.forward_backward(*args, target=target, loss_fn=case.loss, **kwargs)
            for (name, want), have in zip(plain.named_parameters(), pipe.parameters(), strict=True):
                assert (want.grad is None) == (have.grad is None), name
                if want.grad is not None:
                    assert have.grad.device == have.device, name
                    _close(have.grad, want.grad)
            for want, have in zip(plain.buffers(), pipe.buffers(), strict=True):
                _close(have, want)
        plain.eval()
        pipe.eval()
        with torch.no_grad():
            want, have = plain(*args, **kwargs), pipe(*args, **kwargs)
        for w, h in zip(pytree.tree_leaves(want), pytree.tree_leaves(have), strict=True):
            if isinstance(w, torch.Tensor):
                _close(h, w)
            else:
                assert w == h


@pytest.mark.parametrize("devices", [ONE, MIXED, TWO])
def test_evaluating_between_backward_and_zero_grad_keeps_the_gradients(devices):
    """The graph for evaluation is recorded on the CPU, where torch refuses gradients that are on a GPU."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)), torch.randn(6, 4)
    plain = copy.deepcopy(model).eval()
    with fxpipe.pipeline(model, devices, CHUNKS, example_args=(x,)) as pipe:
        pipe(x).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        with torch.no_grad():
            _close(pipe.eval()(x), plain(x))
        assert all(p.grad is gradients[name] for name, p in model.named_parameters())
        assert all(p.grad.device == p.device for p in model.parameters())


# -- streams and copies ------------------------------------------------------------------------------------------------

CYCLES = 20_000_000  # of a GPU that is kept busy: 10 ms, in which the host is far ahead


@pytest.fixture
def busy(monkeypatch):
    """Each F and B begins late on its device: who does not wait for it, reads what is not there yet."""
    for name in ("forward", "backward"):
        action = getattr(MiniBatch, name)

        def late(self, j, i, action=action):
            if self.devices[j].type != "cpu":
                MODULE._sleep(CYCLES)
            action(self, j, i)

        monkeypatch.setattr(MiniBatch, name, late)


def _unet():
    torch.manual_seed(1)
    case = BY_NAME["unet"]
    args, _ = case.inputs(BATCH)
    return case.make(), args[0], case.target(BATCH)


def _pipe(model, devices, x, **options):
    return fxpipe.pipeline(copy.deepcopy(model), devices, CHUNKS, example_args=(x,), checkpoint="never", **options)


def _step(model, x, t, drop_in=True):
    """Loss, gradients, and that of the input."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    if drop_in:
        loss = F.mse_loss(model(x), t)
        loss.backward()
    else:
        loss = model.forward_backward(x, target=t, loss_fn=F.mse_loss)
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


def _assert_close(have, want):
    for h, w in zip(have, want, strict=True):
        _close(h, w)


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize("devices", [ONE, MIXED, TWO])
def test_copies_are_waited_for(devices, drop_in, busy):
    model, x, t = _unet()
    want = _step(model, x, t)
    with forced_copies(), _pipe(model, devices, x) as pipe:
        for _ in range(3):
            _assert_close(_step(pipe, x, t.to(devices[-1]), drop_in), want)


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize("devices", [ONE, TWO])
def test_a_step_comes_between_what_the_caller_queues_before_and_after(devices, drop_in, busy):
    """The caller's current streams are not the default ones, and its inputs are made late."""
    model, x, t = _unet()
    want = _step(model, x, t)
    given, target = x.to(devices[0]), t.to(devices[-1])
    with forced_copies(), _pipe(model, devices, x) as pipe:
        _step(pipe, given, target, drop_in)
        _synchronize()
        sides = [torch.Stream(device) for device in dict.fromkeys(devices)]
        with contextlib.ExitStack() as stack:
            for side in reversed(sides):
                stack.enter_context(side)
            late, late_target = torch.zeros_like(given), torch.zeros_like(target)
            MODULE._sleep(5 * CYCLES)
            late.copy_(given)
            late_target.copy_(target)
            have = [value.clone() for value in _step(pipe, late, late_target, drop_in)]
            late.zero_()  # behind the step, which has read it
            late_target.zero_()
        _synchronize()
        _assert_close(have, want)


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize("devices", [ONE, TWO])
def test_the_host_waits_for_nothing(devices, drop_in):
    model, x, t = _unet()
    with forced_copies(), _pipe(model, devices, x) as pipe:
        pinned, on_gpu, target = x.pin_memory(), x.to(devices[0]), t.to(devices[-1])
        for given in (x, pinned, on_gpu):
            for mode in ("default", "error", "error"):  # first a graph is recorded, the loss verified, memory taken
                pipe.zero_grad()
                MODULE.set_sync_debug_mode(mode)
                try:
                    if drop_in:
                        F.mse_loss(pipe(given), target).backward()
                    else:
                        pipe.forward_backward(given, target=target, loss_fn=F.mse_loss)
                finally:
                    MODULE.set_sync_debug_mode("default")


@pytest.mark.parametrize("devices", [ONE, MIXED, TWO])
def test_pinned_inputs_and_targets_may_be_written_to_behind_the_call(devices, busy):
    model, x, t = _unet()
    want = _step(model, x, t)[2:]
    with _pipe(model, devices, x) as pipe:
        for _ in range(3):
            pipe.zero_grad()
            given, target = x.pin_memory(), t.pin_memory()
            pipe.forward_backward(given, target=target, loss_fn=F.mse_loss)
            given.zero_()
            target.zero_()
            _assert_close([p.grad for p in pipe.parameters()], want)


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_a_gpu_holds_less_with_1f1b_and_nothing_behind_a_step(devices):
    x = torch.randn(1024, 256, device=devices[0])  # activations are more than the gradients of weights
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(8)))
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        with fxpipe.pipeline(
            copy.deepcopy(model), devices, 16, balance=["3"], example_args=(x,), schedule=schedule, checkpoint="never"
        ) as pipe:
            for _ in range(2):  # the loss is verified in the first
                pipe.zero_grad()
                pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
            pipe.zero_grad()
            _synchronize()
            before = MODULE.memory_allocated(devices[0])
            MODULE.reset_peak_memory_stats(devices[0])
            pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
            pipe.zero_grad()
            peaks[schedule] = MODULE.max_memory_allocated(devices[0]) - before
            _synchronize()
            assert MODULE.memory_allocated(devices[0]) <= before
    assert peaks["1f1b"] < peaks["gpipe"]


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_backward_may_be_called_on_other_streams_than_forward(devices, busy):
    model, x, t = _unet()
    want = _step(model, x, t)
    with forced_copies(), _pipe(model, devices, x) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            _synchronize()
            given = x.to(devices[0], copy=True).requires_grad_()
            target = t.to(devices[-1])
            sides = [torch.Stream(device) for device in dict.fromkeys(devices)]
            for side in sides:
                side.wait_stream(torch.accelerator.current_stream(side.device))
            with contextlib.ExitStack() as stack:
                for side in reversed(sides):
                    stack.enter_context(side)
                loss = F.mse_loss(pipe(given), target)
            loss.backward()
            found = [loss.detach(), given.grad, *(p.grad for p in pipe.parameters())]
            have = [value.clone() for value in found]  # on the streams that are current now, which the engine has wait
            _synchronize()
            _assert_close(have, want)
            del loss, found, given  # with them nodes of the side streams


# -- threads -----------------------------------------------------------------------------------------------------------

CALLER = contextvars.ContextVar("CALLER", default="nobody")


class Watched(torch.autograd.Function):
    seen: list[tuple[str, str]] = []  # noqa: RUF012 - of the class: who runs backward, and in whose context

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Watched.seen.append((threading.current_thread().name, CALLER.get()))
        return gradient * 2


class Watching(Layered, one=4, two=4):
    def forward(self, x):
        return self.two(Watched.apply(self.one(x)))


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize("devices", [ONE, MIXED, TWO])
def test_backward_runs_in_the_workers_and_in_the_context_of_the_caller(devices, drop_in):
    """Autograd has a thread for each GPU; it runs no node of a stage, and waits for none."""
    x = torch.randn(6, 4)
    with fxpipe.pipeline(Watching(), devices, CHUNKS, example_args=(x,), checkpoint="never") as pipe:
        Watched.seen.clear()
        token = CALLER.set("me")
        try:
            if drop_in:
                pipe(x).sum().backward()
            else:
                pipe.forward_backward(x, loss_fn=torch.sum, reduction="sum")
        finally:
            CALLER.reset(token)
    assert len(Watched.seen) == CHUNKS
    assert all(thread.startswith("fxpipe") and caller == "me" for thread, caller in Watched.seen)


# -- what only GPUs have -----------------------------------------------------------------------------------------------


class Greedy(Layered, one=4, two=4):
    """Asks for more than there is, when told."""

    def forward(self, x):
        return self.two(_taking(self.one(x)))


WANTED = {"numbers": 1}


@fxpipe.leaf
def _taking(x):
    return x + torch.empty(WANTED["numbers"], device=x.device).fill_(0)[:1]


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_a_stage_that_runs_out_of_memory_says_so_and_leaves_none_behind(devices, monkeypatch):
    x = torch.randn(6, 4)
    with fxpipe.pipeline(Greedy(), devices, CHUNKS, example_args=(x,), checkpoint="never") as pipe:
        for _ in range(2):
            pipe.forward_backward(x, loss_fn=torch.sum, reduction="sum")
        pipe.zero_grad()
        _synchronize()
        before = [MODULE.memory_allocated(device) for device in devices]
        monkeypatch.setitem(WANTED, "numbers", 2**45)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            pipe.forward_backward(x, loss_fn=torch.sum, reduction="sum")
        assert "micro-batch 0, forward" in caught.value.__notes__[-1]
        assert all(p.grad is None for p in pipe.parameters())
        del caught  # its frames hold what the stage had
        _synchronize()
        assert [MODULE.memory_allocated(device) for device in devices] <= before
        monkeypatch.setitem(WANTED, "numbers", 1)
        pipe.forward_backward(x, loss_fn=torch.sum, reduction="sum")
        assert all(p.grad is not None for p in pipe.parameters())


class Recurrent(Layered, rnn=lambda: nn.LSTM(6, 8, 2, batch_first=True), head=(8, 2)):
    def forward(self, x):
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("devices", [ONE, MIXED, TWO])
def test_the_weights_of_an_rnn_lie_side_by_side(devices):
    """Or cuDNN warns, here an error, in planning, in training and in evaluation, and gathers them at each call."""
    plain, x = Recurrent(), torch.randn(6, 5, 6)
    with fxpipe.pipeline(copy.deepcopy(plain), devices, CHUNKS, example_args=(x,)) as pipe:
        pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
        plain(x).square().mean().backward()
        _assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])
        pipe.eval()
        with torch.no_grad():
            _close(pipe(x), plain(x))


@pytest.mark.skipif(is_simulated(), reason="torch compiles nothing for simulated devices")
@pytest.mark.filterwarnings("default")  # the compiler of torch warns of what it would have otherwise
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("devices", [ONE, TWO])
def test_compiled_stages_on_gpus_equal_the_plain_model(devices, schedule):
    case = BY_NAME["gpt"]
    plain = _without_dropout(case.make())
    args, _ = case.inputs(BATCH)
    target = case.target(BATCH)
    case.loss(plain(*args), target).backward()
    options = {"example_args": args, "schedule": schedule, "compile": True}
    with fxpipe.pipeline(copy.deepcopy(plain), devices, CHUNKS, **options) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            pipe.forward_backward(*args, target=target, loss_fn=case.loss)
            _assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])
