"""What is recomputed is what was computed, and code can ask which it is."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state
from torch import nn

import fxpipe
from fxpipe._torch.saved_tensor_hooks import NoSavedTensors, with_saved_tensors

CHECKPOINTS = ("never", "except_last", "always")
CHUNKS, SIZE = 3, 6
RECOMPUTED = {"never": 0, "except_last": CHUNKS - 1, "always": CHUNKS}


class Watch:
    """A leaf at the end of each stage: what reaches it in forward reaches it again when that is recomputed."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        self.calls: Counter[tuple[str, bool]] = Counter()
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return self

    def clear(self) -> None:
        self.seen.clear()
        self.calls.clear()

    def __call__(self, name: str, value: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return _watched(self, name, value, number)


@fxpipe.leaf
def _watched(watch: Watch, name: str, value: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    again, key = fxpipe.is_recomputing(), (name, int(number[0]))
    with watch.lock:
        watch.calls[name, again] += 1
        if again:
            first = watch.seen[key]
            assert first.dtype == value.dtype
            assert torch.equal(first, value), f"{name} of micro-batch {key[1]} came out otherwise"
        else:
            watch.seen[key] = value.detach().clone()
    return value * 1


class Watched(nn.Module):
    """Two halves of `make()`, with a watch behind each."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.watch = make(), make(), Watch()

    def forward(self, x, number):
        h = self.watch("first", self.first(x), number)
        return self.watch("second", self.second(h.float()), number)


class Averaging(Layered, linear=5, average=lambda: torch.zeros(5)):
    """Reads and changes a buffer: what is recomputed must find what forward found."""

    def forward(self, x):
        h = self.linear(x)
        self.average.mul_(0.5).add_(h.detach().mean(0), alpha=0.5)
        return torch.tanh(h - self.average)


class Casting(Layered, linear=5, other=5):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.linear(x)
        return self.other(h.float())


class Rolling(Layered, linear=5):
    """Rolls the dice of Python, of torch, and of torch within Python that runs as it is."""

    def forward(self, x):
        h = self.linear(x) * (1 + random.random()) + torch.rand_like(x)
        return F.dropout(h, 0.2)


class Slopes(Layered, linear=5):
    """Gradients of a function inside, by `torch.func`."""

    def forward(self, x):
        h = self.linear(x)
        slopes = torch.func.grad(lambda v: (torch.sin(v) ** 2).sum())(h)
        rows = torch.func.vmap(torch.func.jacrev(lambda v: torch.tanh(v) * v))(h)
        return h + slopes + rows.sum(-1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 5), nn.AlphaDropout(0.2)),
    "noise": Rolling,
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.TransformerEncoderLayer(5, 1, 8, dropout=0.2, batch_first=True), nn.Flatten(1)
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True)),
    "changed buffer": Averaging,
    "autocast inside": Casting,
    "torch.func": Slopes,
}


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(CHUNKS * SIZE, 5), torch.arange(CHUNKS).repeat_interleave(SIZE)


def _train(model: Watched, pipe: Any, checkpoint: str, one_pass: bool) -> list[Counter[Any]]:
    """Two steps of a pipe from the same numbers; what each has called."""
    inside = pipe._fxpipe
    inside.settings = dataclasses.replace(inside.settings, checkpoint=checkpoint)  # none of its graphs depends on that
    torch.manual_seed(3)
    calls = []
    for _ in range(2):
        x, number = _inputs()
        model.watch.clear()
        if one_pass:
            pipe.forward_backward(x, number, target=torch.zeros_like(x), loss_fn=F.mse_loss)
        else:
            F.mse_loss(pipe(x, number), torch.zeros_like(x)).backward()
        calls.append(Counter(model.watch.calls))
    return calls


def _compare_modes(start: Watched, one_pass: bool) -> None:
    """Every mode of recomputation against none: calls, values, gradients and buffers."""
    state, kept, model = copy.deepcopy(start.state_dict()), copy.deepcopy(start), copy.deepcopy(start)
    with fxpipe.pipeline(model, ["cpu"] * 2, CHUNKS, example_args=_inputs()) as pipe:
        for checkpoint in CHECKPOINTS:
            model.load_state_dict(state)
            model.zero_grad()
            for calls in _train(model, pipe, checkpoint, one_pass):
                for half in ("first", "second"):
                    assert (calls[half, False], calls[half, True]) == (CHUNKS, RECOMPUTED[checkpoint])
            if checkpoint == "never":
                kept.load_state_dict(model.state_dict())
                for mine, theirs in zip(kept.parameters(), model.parameters(), strict=True):
                    mine.grad = None if theirs.grad is None else theirs.grad.clone()
            assert_same_gradients(model, kept)
            assert_same_state(model, kept)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_recomputed_is_what_was_computed(name):
    _compare_modes(Watched(MODELS[name]), one_pass=True)


def test_what_the_drop_in_recomputes_is_what_it_computed():
    """It has written the buffers when it comes to recompute."""
    parts = [MODELS[name]() for name in ("dropout", "changed buffer", "batch norm", "autocast inside")]
    _compare_modes(Watched(lambda: copy.deepcopy(nn.Sequential(*parts))), one_pass=False)


def test_what_is_forgotten_is_gone_and_what_is_kept_is_there():
    x = torch.randn(4, requires_grad=True)
    with NoSavedTensors():
        kept = with_saved_tensors(lambda a: torch.sin(a))(x)
        lost = torch.cos(x)
        with pytest.raises(ZeroDivisionError):
            with_saved_tensors(lambda: 1 // 0)()
        lost_as_well = torch.exp(x)
    torch.testing.assert_close(torch.autograd.grad(kept.sum(), x)[0], torch.cos(x))
    for each in (lost, lost_as_well):
        with pytest.raises(fxpipe.errors.StateError, match="without its graph"):
            torch.autograd.grad(each.sum(), x)
    torch.autograd.grad(torch.exp(x).sum(), x)


class Telling(torch.autograd.Function):
    """Notes what it is told in forward and in backward."""

    told: ClassVar[list[tuple[str, bool]]] = []

    @staticmethod
    def forward(ctx, x):
        Telling.told.append(("forward", fxpipe.is_recomputing()))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Telling.told.append(("backward", fxpipe.is_recomputing()))
        return gradient * 2


class Tells(nn.Module):
    def forward(self, x):
        return Telling.apply(x)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_hooks_and_functions_are_told(checkpoint):
    told: list[tuple[str, bool]] = []
    model = nn.Sequential(nn.Linear(5, 5), Tells(), nn.Linear(5, 5), nn.ReLU())
    model[2].register_forward_hook(lambda *_: told.append(("hook", fxpipe.is_recomputing())))
    model[2].register_forward_pre_hook(lambda *_: told.append(("hook before", fxpipe.is_recomputing())))
    model.register_forward_hook(lambda *_: told.append(("hook on the model", fxpipe.is_recomputing())))
    x, _ = _inputs()
    with fxpipe.pipeline(model, ["cpu"] * 2, CHUNKS, checkpoint=checkpoint, example_args=(x,)) as pipe:
        told.clear()
        Telling.told.clear()
        pipe(x).sum().backward()
    again = RECOMPUTED[checkpoint]
    plain = {"hook": CHUNKS, "hook before": CHUNKS, "hook on the model": 1, "forward": CHUNKS, "backward": CHUNKS}
    once_more = {key: again for key in ("hook", "hook before", "forward") if again}
    want = {(key, False): count for key, count in plain.items()} | {(k, True): n for k, n in once_more.items()}
    assert Counter(told) + Counter(Telling.told) == Counter(want)


class Calling(Layered, linear=5):
    def forward(self, x):
        return self.function(self.linear(x))


def test_only_the_thread_that_recomputes_is_told():
    told = []

    @fxpipe.leaf
    def ask(x):
        if fxpipe.is_recomputing():
            other = threading.Thread(target=lambda: told.append(fxpipe.is_recomputing()))
            other.start()
            other.join()
        return x * 1

    x, _ = _inputs()
    with fxpipe.pipeline(Calling(function=ask), ["cpu"], CHUNKS, checkpoint="always") as pipe:
        pipe(x).sum().backward()
    assert told == [False] * CHUNKS
    assert not fxpipe.is_recomputing()


def test_after_a_recompute_that_failed_nothing_recomputes():
    told = []

    @fxpipe.leaf
    def fail(x):
        told.append(fxpipe.is_recomputing())
        if failing and told[-1]:
            raise RuntimeError("at will")
        return x * 1

    failing = True
    x, _ = _inputs()
    with fxpipe.pipeline(Calling(function=fail), ["cpu"], CHUNKS, checkpoint="always", example_args=(x,)) as pipe:
        with pytest.raises(RuntimeError, match="at will"):
            pipe(x).sum().backward()
        told.clear()
        failing = False
        pipe(x).sum().backward()
    assert told == [False] * CHUNKS + [True] * CHUNKS
