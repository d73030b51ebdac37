"""Compiled stages with sizes that change: the steps of plain ones, and no compilation for each new size."""

import copy
import math
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import accumulate_gradients, assert_same_gradients
from torch import nn

import fxpipe

D = 8
LENGTHS = (7, 12, 5, 16, 9, 33, 8)

# torch hides these warnings while it compiles, by a way that does not heed what pytest makes of warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Attention(nn.Module):
    """Its mask and positions go by the length; a size is sent from stage to stage."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.positions, self.dropout = nn.Embedding(64, D), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        h = self.first(x) + self.positions(torch.arange(length))
        mask = torch.full((length, length), -math.inf).triu(1)
        h = (h @ h.transpose(1, 2) / D**0.5 + mask).softmax(-1) @ h
        return self.last(torch.relu(self.second(F.dropout(h, self.dropout))))


class Compilations(list[Any]):
    """A backend that runs what it is given as it is, and counts."""

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.append(graph)
        return graph.forward


def train(pipe: Any, plain: nn.Module, lengths: Sequence[int], compilations: Compilations | None = None) -> list[int]:
    """Steps of these lengths are those of the plain model. Returns how much was compiled after each."""
    counts = []
    for length in lengths:
        x, target = torch.randn(4, length, D), torch.randn(4, length, D)
        for one in (pipe, plain):
            one.zero_grad()
        have = pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
        want = F.mse_loss(plain(x), target)
        want.backward()
        torch.testing.assert_close(have, want.detach())
        assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
        counts.append(len(compilations or ()))
    return counts


@pytest.mark.parametrize("options", [{"schedule": "gpipe", "checkpoint": "always"}, {"schedule": "zbv"}], ids=str)
def test_nothing_is_compiled_from_the_third_size_on(options: dict[str, Any]) -> None:
    model, compilations = Attention(), Compilations()
    plain = copy.deepcopy(model)
    x = torch.randn(4, LENGTHS[0], D)
    with fxpipe.pipeline(
        model, ["cpu", "cpu"], chunks=2, example_args=(x,), compile={"backend": compilations}, **options
    ) as pipe:
        _, second, third, *others = train(pipe, plain, LENGTHS, compilations)
        assert {*others} == {third}
        # A size as a number is one that torch sees with a second value first: in those stages that are sent one.
        assert third - second < len(pipe.plan.stages)


def test_dynamic_shapes_compile_once_for_all_sizes() -> None:
    class Rows(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.second(self.first(x))))

    model, compilations = Rows(), Compilations()
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(
        model,
        ["cpu", "cpu"],
        chunks=2,
        example_args=(torch.randn(4, 7, D),),
        dynamic_shapes={"x": {1: "length"}},
        compile={"backend": compilations},
        schedule="zero_bubble",
    ) as pipe:
        assert {*train(pipe, plain, LENGTHS, compilations)} == {2}  # one for each stage


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_backward_is_compiled_for_any_size(schedule: str) -> None:
    model = Attention()
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(
        model,
        ["cpu", "cpu"],
        chunks=2,
        example_args=(torch.randn(4, 7, D),),
        compile={"backend": "aot_eager"},
        schedule=schedule,
    ) as pipe:
        train(pipe, plain, LENGTHS[:4])


def test_random_numbers_are_those_of_stages_that_are_not_compiled() -> None:
    plain, ours = Attention(0.5), Attention(0.5)
    options: dict[str, Any] = {"chunks": 2, "example_args": (torch.randn(4, 7, D),), "checkpoint": "always"}
    with (
        fxpipe.pipeline(plain, ["cpu", "cpu"], **options) as eager,
        fxpipe.pipeline(ours, ["cpu", "cpu"], compile={"backend": "aot_eager"}, **options) as compiled,
    ):
        for length in LENGTHS[:4]:
            x = torch.randn(4, length, D)
            for pipe in (eager, compiled):
                torch.manual_seed(length)
                pipe.forward_backward(x, loss_fn=lambda y: y.square().mean())
        assert_same_gradients(ours, plain, loose=[name for name, _ in plain.named_parameters()])


def test_micro_batches_of_their_own_lengths_run_compiled() -> None:
    model, compilations = Attention(), Compilations()
    plain = copy.deepcopy(model)
    counts = []
    with fxpipe.pipeline(model, ["cpu", "cpu"], schedule="zero_bubble", compile={"backend": compilations}) as pipe:
        for lengths in ((7, 12, 5), (16, 9), (33, 8, 7, 12, 4), (5,)):
            micro_batches = [(torch.randn(2, length, D), torch.randn(2, length, D)) for length in lengths]
            for one in (pipe, plain):
                one.zero_grad()
            pipe.forward_backward(micro_batches=micro_batches, loss_fn=F.mse_loss)
            accumulate_gradients(plain, micro_batches, F.mse_loss)
            assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
            counts.append(len(compilations))
    assert len({*counts}) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler for CPUs calls g++, which is not there")
def test_the_compiler_of_torch_itself_takes_any_size() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(
        model, ["cpu", "cpu"], chunks=2, example_args=(torch.randn(4, 7, D),), schedule="zero_bubble", compile=True
    ) as pipe:
        train(pipe, plain, (9, 12, 5))
