"""Graphs run on the micro-batches for which they hold, whatever forward concludes or computes from the batch size."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.devices import on_cpu, workers
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, FxpipeError, TraceError

SCALES = {8: 2.0, 7: 3.0, 4: 5.0}


class Model(Layered, a=8, b=8):
    def forward(self, x):
        return self.b(self.middle(self.a(x)))


FORWARDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda y: y * max(*y.shape),
    "min": lambda y: y * min(*y.shape),
    "comparison": lambda y: y * 2 if y.shape[0] > 5 else y + 1,
    "bool": lambda y: y + 1 if y.shape[0] - 4 else y,
    "remainder": lambda y: y * 2 if y.shape[0] % 2 else y,
    "key that is there": lambda y: y * SCALES.get(y.shape[0], 1.0),
    "key in a set": lambda y: y * 2 if y.shape[0] in {8, 16} else y,
}
ON_DEVICES = ("comparison", "key in a set")
# Mini-batches (samples, length); after (8, 12), with which all begin.
OTHERS = ((8, 7), (7, 12), (9, 5), (16, 12), (8, 7), (5, 3), (8, 3), (8, 12))


def _step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    y = on_cpu(model(x))
    y.square().sum().backward()
    gradients = {name: on_cpu(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    return y.detach(), gradients


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.anywhere if n in ON_DEVICES else ()) for n in FORWARDS]
)
def test_any_mini_batch_is_the_models_or_refused_for_its_size(name: str) -> None:
    chunks = (2, 4)[[*FORWARDS].index(name) % 2]
    torch.manual_seed(0)
    model = Model(middle=FORWARDS[name])
    plain, right, refusals = copy.deepcopy(model), 0, list[str]()
    with fxpipe.pipeline(model, workers(2), chunks, profile_budget=0.0) as pipe:
        for samples, length in ((8, 12), *OTHERS):
            x = torch.randn(samples, length, 8)
            try:
                have = _step(pipe, x)
            except (TraceError, ArgumentError) as error:
                refusals.append(str(error))
                continue
            torch.testing.assert_close(have, _step(plain, x), rtol=1e-4, atol=1e-4)
            right += 1
    assert right
    assert all("batch size" in refusal or "put together" in refusal for refusal in refusals)


@pytest.mark.anywhere
def test_a_later_graph_is_held_against_its_micro_batches() -> None:
    """Of (8, 7, 8) the largest is the batch, of a micro-batch of four samples it is not: another graph runs them."""
    plain = copy.deepcopy(model := Model(middle=FORWARDS["max"]))
    with fxpipe.pipeline(model, workers(2), 2, example_args=(torch.randn(8, 12, 8),), profile_budget=0.0) as pipe:
        x = torch.randn(8, 7, 8)
        for _ in range(2):
            torch.testing.assert_close(on_cpu(pipe(x)), plain(x))
        assert len(pipe._fxpipe.graphs) == 2  # it is known the second time
        with pytest.raises(TraceError, match=r"b >= 12 .* mini-batch of 16, not for micro-batches of 8.*use chunks=1"):
            pipe(torch.randn(16, 12, 8))


@pytest.mark.anywhere
def test_a_size_of_the_last_micro_batch_is_asked_as_well() -> None:
    """Seven samples in four micro-batches are 2, 2, 2 and 1."""
    plain = copy.deepcopy(model := Model(middle=lambda y: y * 2 if y.shape[0] == 1 else y))
    with fxpipe.pipeline(model, workers(2), 4, example_args=(torch.randn(8, 3, 8),), profile_budget=0.0) as pipe:
        for samples in (7, 8, 1, 5):
            x = torch.randn(samples, 3, 8)
            torch.testing.assert_close(on_cpu(pipe(x)), plain(x))


NUMBERS: dict[str, Any] = {
    "// 2 * 2": lambda x: x.shape[0] // 2 * 2,
    "minus the rest": lambda x: x.size(0) - x.shape[0] % 4,
    "& ~1": lambda x: x.shape[0] & ~1,
    ">> <<": lambda x: x.shape[0] >> 1 << 1,
    "min": lambda x: min(x.shape[0], 4),
    "bit_length": lambda x: 1 << (x.shape[0].bit_length() - 1),
    "ceil": lambda x: math.ceil(x.shape[0] / 2) * 2,
    "text": lambda x: int(f"{x.shape[0]}") // 2 * 2,
    "range": lambda x: len(range(x.shape[0])) // 2 * 2,
    "list": lambda x: len([0] * x.shape[0]) & ~1,
    "len range": lambda x: len(range(0, len(x), 2)) * 2,
    "len log2": lambda x: 2 ** int(math.log2(len(x))),
    "len branch": lambda x: 4 if len(x) > 3 else len(x),
}


class Cutting(Layered, before=6, after=6):
    """Treats the first samples in another way than the rest."""

    def forward(self, x):
        h, n = torch.tanh(self.before(x)), self.number(x)
        return self.after(torch.cat([h[:n] * 2, h[n:] * 3]))


@pytest.mark.parametrize("name", NUMBERS)
def test_first_samples_are_right_or_refused_at_other_batch_sizes(name):
    model = Cutting(number=NUMBERS[name])
    try:
        pipe = fxpipe.pipeline(
            copy.deepcopy(model),
            devices=["cpu", "cpu"],
            chunks=2,
            example_args=(torch.randn(8, 6),),
            profile_budget=0.0,
            progress=False,
        )
    except FxpipeError:
        return
    with pipe:
        for size in (8, 7, 3):
            x = torch.randn(size, 6)
            try:
                have = pipe(x)
            except FxpipeError:
                continue
            torch.testing.assert_close(have, model(x))
