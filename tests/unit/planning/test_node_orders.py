"""The order of nodes that planning chooses: never a slower one, and whatever it is, the plain model bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plan_hardware import SLOW, Causal, estimated, hardware, ids
from helpers.plan_models import BATCH, CHUNKS, Deep, assert_trains_like, rows
from torch import nn

import fxpipe
from fxpipe.partitioning import Link
from fxpipe.planning.plans.figures import plan_figures


class Translation(nn.Module):
    """Both embeddings first, as people write it. The decoder's is needed behind the encoder only."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.source, self.target = nn.Embedding(11, width), nn.Embedding(11, width)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, y = self.source(source), self.target(target)
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        x = x.mean(1, keepdim=True)
        for layer in self.decoder:
            y = torch.tanh(layer(y)) + x
        return y


class Towers(nn.Module):
    """Two towers in turns, which meet in the end."""

    def __init__(self, width: int = 32, depth: int = 4):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            x, y = torch.tanh(left(x)), torch.tanh(right(y))
        return self.head(torch.cat([x, y], -1))


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (BATCH, 12)), torch.randint(11, (BATCH, 12))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 32), torch.randn(BATCH, 32)


ORDERED: list[tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = [
    (Translation, sentences),
    (Towers, vectors),
]


def order_of(plan: fxpipe.Plan) -> list[str]:
    return [name for stage in plan.stages for name in stage.nodes]


def as_traced(model: nn.Module, args: tuple[torch.Tensor, ...]) -> list[str]:
    return [node.name for node in fxpipe.trace(model, args, chunks=CHUNKS).nodes]


@pytest.mark.parametrize(("model", "inputs"), ORDERED)
def test_side_branches_run_next_to_their_use_where_links_are_slow(model: Any, inputs: Any) -> None:
    plan = estimated(model(), 3, *inputs(), hardware=hardware(SLOW))
    assert order_of(plan) != as_traced(model(), inputs())
    assert sorted(order_of(plan)) == sorted(as_traced(model(), inputs()))


@pytest.mark.parametrize(("model", "inputs"), [(Deep, lambda: (rows(),)), (Causal, lambda: (ids(),))])
def test_a_graph_in_a_good_order_stays(model: Any, inputs: Any) -> None:
    plan = estimated(model(), 1, *inputs(), hardware=hardware(SLOW))
    assert order_of(plan) == as_traced(model(), inputs())


@pytest.mark.parametrize(
    ("link", "model", "inputs"),
    [
        (None, *ORDERED[0]),
        (Link(1e9, 1e-6), *ORDERED[1]),
        *((SLOW, *case) for case in (*ORDERED, (Causal, lambda: (ids(),)))),
    ],
)
def test_never_slower_than_the_traced_order(
    monkeypatch: pytest.MonkeyPatch, model: Any, inputs: Any, link: Link | None
) -> None:
    """By the simulator's word."""
    options = {"hardware": hardware(link)}
    plan = estimated(model(), 3, *inputs(), **options)
    monkeypatch.setattr("fxpipe.planning.passes.reorder_nodes", lambda traced: traced)
    plain = estimated(model(), 3, *inputs(), **options)
    assert order_of(plain) == as_traced(model(), inputs())
    assert plan_figures(plan).step_seconds <= plan_figures(plain).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(("model", "inputs"), ORDERED)
def test_another_order_trains_and_evaluates_like_the_plain_model(model: Any, inputs: Any) -> None:
    plain = model()
    options: dict[str, Any] = {"example_args": inputs(), "hardware": hardware(SLOW)}
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 3, CHUNKS, **options) as pipe:
        assert order_of(pipe.plan) != as_traced(plain, inputs())
        assert_trains_like(plain, pipe, inputs)
        args = inputs()
        plain.eval()
        pipe.eval()
        with torch.no_grad():  # another graph beside the first
            want = torch.cat([plain(*part) for part in zip(*(a.tensor_split(CHUNKS) for a in args), strict=True)])
            assert torch.equal(pipe(*args), want)
        plain.train()
        pipe.train()
        assert_trains_like(plain, pipe, inputs, steps=1)


def test_a_plan_in_another_order_is_used_again(tmp_path: Any) -> None:
    plain, args = Translation(), sentences()
    plan = estimated(plain, 3, *args, hardware=hardware(SLOW))
    plan.save(tmp_path / "plan.json")
    loaded = fxpipe.Plan.load(tmp_path / "plan.json")
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"] * 3, plan=loaded, example_args=args) as pipe:
        assert order_of(pipe.plan) == order_of(plan) != as_traced(plain, args)
        assert [stage.copies for stage in pipe.plan.stages] == [stage.copies for stage in plan.stages]
        assert_trains_like(plain, pipe, sentences)


@pytest.mark.parametrize("options", [{"balance": ["encoder.5"]}, {"pin": {"decoder": 1}}, {"balance": [20, 20]}])
def test_what_is_cut_by_hand_keeps_the_order_of_forward(options: dict[str, Any]) -> None:
    args, model = sentences(), Translation()
    traced = as_traced(model, args)
    if "balance" in options and isinstance(options["balance"][0], int):
        options = {"balance": [20, len(traced) - 20]}
    assert order_of(estimated(model, 2, *args, hardware=hardware(SLOW), **options)) == traced
