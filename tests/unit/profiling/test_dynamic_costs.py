"""Costs in the batch and in dynamic sizes: the formulas are what a run at other sizes really saves, makes and sends."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from helpers.models import GPT, UNet
from helpers.run_stages import Stages, sample, saved_by
from helpers.saved_bytes import Of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.profiling import Profile, profile
from fxpipe.profiling.formulas import fit_growth, other_lengths, resize_inputs, size_polynomial
from fxpipe.tracing import Traced, trace
from fxpipe.tracing.node_info import bytes_at
from fxpipe.tracing.tensors import bytes_in
from fxpipe.utils.polynomial import Polynomial, SizePoint


def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A mask that no sample is in, and products that grow with the square of the length."""
    mask = torch.ones(x.shape[1], x.shape[1]).tril()
    return ((m.linear(x) @ x.transpose(1, 2)) * mask).softmax(-1).exp() @ x


Case = tuple[Callable[[], nn.Module], torch.Tensor, dict[str, Any], list[dict[str, int]]]

CASES: dict[str, Case] = {
    "gpt": (
        lambda: GPT(layers=2, dropout=0.0),
        torch.randint(17, (3, 8)),
        {"ids": {1: "s"}},
        [{"s": 8}, {"s": 5}, {"s": 24}, {"s": 31}],
    ),
    "unet": (
        lambda: UNet(depth=2),
        torch.randn(3, 3, 16, 24),
        {"x": {2: "height", 3: "width"}},
        [{"height": 16, "width": 24}, {"height": 32, "width": 8}, {"height": 8, "width": 40}],
    ),
    "attention": (lambda: Of(attend), torch.randn(3, 6, 4), {"x": {1: "s"}}, [{"s": 6}, {"s": 2}, {"s": 19}]),
}


@functools.cache
def profiled(name: str) -> tuple[Traced, Profile, torch.Tensor]:
    torch.manual_seed(0)
    make, x, shapes, _ = CASES[name]
    traced = trace(make(), (x,), dynamic_shapes=shapes)
    return traced, profile(traced, (x,), budget=0.0, repeats=1), x


def value(formula: sympy.Expr, samples: int, sizes: dict[str, int]) -> int:
    known = {"b": samples, **sizes}
    number = formula.subs({symbol: known[symbol.name] for symbol in formula.free_symbols})
    assert number.is_integer
    return int(number)


def inputs_at(name: str, samples: int, sizes: dict[str, int]) -> tuple[Traced, list[Any]]:
    traced, _, x = profiled(name)
    lengths = tuple((symbol, sizes[symbol.name]) for symbol in traced.dynamic.symbols)
    return traced, resize_inputs(traced, [x], samples, lengths)


ALL = [(name, 1 + 3 * (k % 2), sizes) for name, (*_, rows) in CASES.items() for k, sizes in enumerate(rows)]


@pytest.mark.parametrize(("name", "samples", "sizes"), ALL)
def test_saved_bytes_are_those_of_a_run_at_these_sizes(name: str, samples: int, sizes: dict[str, int]) -> None:
    traced, leaves = inputs_at(name, samples, sizes)
    costs = profiled(name)[1]
    starts = (0, len(traced.nodes) // 2)
    seen = Stages(traced, starts).run(sample(traced, leaves, samples), saved_by)
    ends = (*starts[1:], len(traced.nodes))
    told = [
        sum(value(s.bytes, samples, sizes) for s in costs.saved if any(start <= p < end for p in s.savers))
        for start, end in zip(starts, ends, strict=True)
    ]
    assert told == seen
    assert min(seen) > 0


@pytest.mark.parametrize(("name", "samples", "sizes"), [case for case in ALL if case[0] != "gpt"])  # fused attention
def test_flops_are_those_that_torch_counts_at_these_sizes(name: str, samples: int, sizes: dict[str, int]) -> None:
    traced, leaves = inputs_at(name, samples, sizes)
    with FlopCounterMode(display=False) as forward:
        output = traced.model(*leaves)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    flops = sympy.Add(*(cost.flops for cost in profiled(name)[1].nodes))
    assert value(flops, samples, sizes) == forward.get_total_flops() > 0
    back = sympy.Add(*(cost.backward_flops for cost in profiled(name)[1].nodes))
    assert value(back, samples, sizes) == backward.get_total_flops() > 0


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_outputs_are_those_of_the_values_at_these_sizes(name: str) -> None:
    _, costs, _ = profiled(name)
    told = {cost.name: cost.output_bytes for cost in costs.nodes}
    for sizes in CASES[name][3]:
        traced, leaves = inputs_at(name, 2, sizes)
        made: dict[str, int] = {}

        class Watching(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node, made: dict[str, int] = made) -> Any:
                made[n.name] = bytes_in(result := super().run_node(n))
                return result

        holder = torch.fx.GraphModule(traced.model, traced.graph)
        Watching(holder).run(*leaves)
        for node, formula in told.items():
            assert formula == 0 or value(formula, 2, sizes) == made[node], node


def test_formulas_have_the_names_of_the_sizes() -> None:
    assert str(profiled("attention")[1].nodes[-1].flops) == "8*b*s**2"
    names = {symbol.name for symbol in profiled("unet")[1].saved_bytes.free_symbols}
    assert names == {"b", "height", "width"}


def test_a_size_without_a_name_has_that_of_its_input() -> None:
    traced = trace(Of(attend), (torch.randn(2, 6, 4),), dynamic_shapes={"x": {1: torch.export.Dim.AUTO}})
    assert [symbol.name for symbol in traced.dynamic.symbols] == ["x_dim1"]


@pytest.mark.parametrize(
    ("asked", "name"), [("b", "b_"), ("in", "in_"), ("chunks", "chunks_"), ("my length", "my_length")]
)
def test_a_name_that_means_something_else_is_another(asked: str, name: str) -> None:
    traced = trace(nn.Linear(4, 4), (torch.randn(2, 6, 4),), dynamic_shapes={"input": {1: asked}})
    assert [symbol.name for symbol in traced.dynamic.symbols] == [name]


def test_a_graph_without_dynamic_sizes_has_formulas_in_the_batch_alone() -> None:
    x = torch.randn(2, 6, 4)
    costs = profile(trace(Of(attend), (x,)), (x,), budget=0.0, repeats=1)
    assert costs.sizes == ()
    assert costs.saved_bytes.free_symbols == {costs.batch}
    assert all(cost.forward.growing == Polynomial() for cost in costs.nodes)


def test_other_sizes_are_rounded_as_the_one_of_the_example() -> None:
    """A U-Net halves its sizes: looked at are those that leave the same remainder."""
    traced, _, _ = profiled("unet")
    (height, _) = traced.dynamic.symbols
    looked_at = [dict(lengths)[height] for lengths in other_lengths(traced, height, 2, traced.dynamic.example)]
    assert looked_at
    assert all(size % 4 == 0 for size in looked_at)


def test_seconds_grow_with_the_work_on_the_line_that_was_seen() -> None:
    here = SizePoint(4, (("s", 10),))
    work = Polynomial.of({(("b", 1), ("s", 2)): 6})
    seen = {here: 5.0, SizePoint(2, (("s", 10),)): 3.0, SizePoint(4, (("s", 5),)): 2.0}
    assert fit_growth(seen, here, work).value(here.values) == pytest.approx(4.0)  # and 1 is fixed
    assert fit_growth(seen, here, work).value({"b": 8, "s": 10}) == pytest.approx(8.0)
    assert fit_growth({here: 5.0}, here, work).value(here.values) == pytest.approx(5.0)
    assert not fit_growth(seen | {SizePoint(2, (("s", 10),)): 9.0, SizePoint(4, (("s", 5),)): 9.0}, here, work)


def test_a_profile_with_sizes_is_read_as_it_was_written(tmp_path: Path) -> None:
    _, costs, _ = profiled("attention")
    costs.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == costs
    assert dict(costs.sizes) == {"s": 6}


def test_bytes_with_sizes_that_depend_on_values_are_never_negative():
    b, of_values = sympy.symbols("b u", integer=True)
    assert bytes_at(4 * b * (of_values - 40), b, 3) == 0
    assert bytes_at(4 * b * (of_values + 40), b, 3) == 480
    assert size_polynomial(4 * b * (of_values - 40), b, 3).at(3) == 0
