"""FLOPs, bytes taken for a moment, and formulas of all that is counted; the model stays as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.models import DictOut, ResNet, UNet
from helpers.run_stages import Stages, leaves_of, sample, saved_by
from helpers.saved_bytes import Of, Pictures, counted, number, of_stages
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.profiling.formulas import output_bytes
from fxpipe.profiling.memory import GraphCounts
from fxpipe.profiling.probe import OperationCounter
from fxpipe.profiling.profile_data import NodeCost
from fxpipe.tracing import Traced, trace
from fxpipe.tracing.node_info import info

b = sympy.Symbol("b", integer=True, positive=True)


def count_of(model: nn.Module, *args: Any, samples: int = 3, **options: Any) -> tuple[Traced, GraphCounts]:
    traced = trace(model, args, **options)
    return traced, counted(traced, leaves_of(args), samples)


def by_name(counts: GraphCounts) -> dict[str, NodeCost]:
    return {node.name: found for node, found in counts.nodes.items()}


def total(counts: GraphCounts, field: str) -> sympy.Expr:
    return sympy.Add(*(getattr(found, field) for found in counts.nodes.values()))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_flops_of_a_linear_layer_forward_and_back() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    nodes = by_name(count_of(model, torch.randn(3, 4))[1])
    b = next(iter(nodes["_0"].flops.free_symbols))
    assert (nodes["_0"].flops, nodes["_0"].backward_flops) == (48 * b, 48 * b)  # no gradient of the data
    assert (nodes["_1"].flops, nodes["_1"].backward_flops) == (0, 0)
    assert (nodes["_2"].flops, nodes["_2"].backward_flops) == (60 * b, 120 * b)


def test_the_batch_against_itself_grows_with_its_square() -> None:
    def contrast(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.linear(x)
        return (h @ h.t()).softmax(-1).mean()

    traced, counts = count_of(Of(contrast), torch.randn(5, 4), out_dims="mean")
    nodes = by_name(counts)
    b = traced.batch
    assert nodes["matmul"].flops == 8 * b**2
    assert nodes["matmul"].backward_flops == 16 * b**2
    assert nodes["softmax"].saved_bytes == 4 * b**2


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "unet": (UNet, lambda n: (torch.randn(n, 3, 16, 16),)),
    "resnet": (ResNet, lambda n: (torch.randn(n, 3, 8, 8),)),
    "pictures": (Pictures, lambda n: (torch.randn(n, 3, 8, 8),)),
    "dict": (DictOut, lambda n: ({"x": torch.randn(n, 6), "extras": [torch.randn(n, 2), None, 3]},)),
}


@pytest.mark.parametrize(("samples", "name"), each_once([1, 3, 8], MODELS))
def test_flops_are_those_that_torch_counts(name: str, samples: int) -> None:
    make, inputs = MODELS[name]
    model = make()
    traced, counts = count_of(model, *inputs(4))
    with FlopCounterMode(display=False) as forward:
        outputs = model(*inputs(samples))
    leaves = [x for x in leaves_of((outputs,)) if isinstance(x, torch.Tensor) and x.requires_grad]
    with FlopCounterMode(display=False) as backward:
        sum(x.sum() for x in leaves).backward()
    assert number(total(counts, "flops"), traced, samples) == forward.get_total_flops() > 0
    assert number(total(counts, "backward_flops"), traced, samples) == backward.get_total_flops()


def test_recurrent_layers_and_attention_count() -> None:
    nodes = by_name(count_of(nn.LSTM(6, 5, batch_first=True), torch.randn(3, 7, 6))[1])
    b = next(iter(nodes["lstm"].flops.free_symbols))
    assert nodes["lstm"].flops == 2 * 7 * (20 * 6 + 20 * 5) * b
    assert nodes["lstm"].backward_flops == 2 * nodes["lstm"].flops

    def attends(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = m.linear(x)[:, None]  # [b, 1, 8, 4]
        return F.scaled_dot_product_attention(q, q, q)

    nodes = by_name(count_of(Of(attends), torch.randn(3, 8, 4))[1])
    assert nodes["scaled_dot_product_attention"].flops == 2 * (2 * 8 * 8 * 4) * b
    assert nodes["scaled_dot_product_attention"].backward_flops == 5 * (2 * 8 * 8 * 4) * b


def test_another_kernel_for_another_size_is_right_for_the_micro_batch() -> None:
    class Uneven(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            times = {2: 5, 4: 2, 5: 7}.get(len(x), 1)
            ctx.save_for_backward(x.new_zeros(100 * times), w)
            for _ in range(times):
                y = x @ w
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad @ ctx.saved_tensors[1].t(), None

    traced = trace(Of(lambda m, x: Uneven.apply(x, m.linear.weight) * m.weight), (torch.randn(5, 4),))
    for samples, times in ((4, 2), (5, 7)):
        nodes = by_name(counted(traced, [torch.randn(5, 4)], samples))
        assert number(nodes["Uneven"].flops, traced, samples) == times * 2 * 16 * samples
        assert number(nodes["Uneven"].saved_bytes, traced, samples) == 400 * times


def test_temporaries_are_what_is_gone_when_a_node_has_run() -> None:
    class Steps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, times: int) -> torch.Tensor:
            many = torch.cat([x] * times, 1)  # [b, 4 * times]
            ctx.save_for_backward(x.exp())
            return many.sum(1, keepdim=True) * x  # the sum, [b, 1], is beside it for a moment

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.cat([grad] * 3, 1)[:, :4].exp(), None

    def steps(times: int) -> tuple[sympy.Symbol, NodeCost]:
        traced, counts = count_of(Of(lambda m, x: Steps.apply(m.linear(x), times)), torch.randn(3, 4))
        return traced.batch, by_name(counts)["Steps"]

    # At most 40 + 4 (saved) + 1 + 4 (returned) floats at one time for each sample, and the 4 that it reads.
    b, node = steps(10)
    assert node.saved_bytes == 16 * b
    assert node.working_bytes == (40 + 1 + 4 + 4) * 4 * b
    b, node = steps(2)
    # Back: 12 floats beside the 4 of the gradient that it returns, and gradients of 4 for input and output.
    assert node.working_bytes == (12 + 4 + 4) * 4 * b


# -- what is saved, by hand --------------------------------------------------------------------------------------------


def test_a_storage_counts_once_and_as_a_whole() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.linear(x)  # its storage is kept by `exp`'s view, `mul` and `sigmoid`
        small = h[:, :1]
        y = small * small
        return y * h.sigmoid() * (h * h)

    traced, counts = count_of(Of(function), torch.randn(3, 4))
    b, place = traced.batch, {n.name: p for p, n in enumerate(traced.nodes)}
    saved = {s.maker: (s.bytes, s.savers) for s in counts.saved}
    assert saved[-1] == (16 * b, (place["linear"],))
    assert saved[place["linear"]] == (16 * b, (place["mul"], place["mul_2"]))
    assert saved[place["sigmoid"]] == (16 * b, (place["sigmoid"], place["mul_1"]))
    assert saved[place["mul"]] == (4 * b, (place["mul_1"],))
    nodes = by_name(counts)
    assert [nodes[n].saved_bytes for n in ("linear", "mul", "sigmoid", "mul_2")] == [0, 16 * b, 16 * b, 0]


def test_attributes_of_a_context_count_too() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.own, ctx.parts = x.exp(), (x, [x.new_ones(5)], "text")
            ctx.weight = w
            return x * 3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad * ctx.own, None

    traced, counts = count_of(Of(lambda m, x: Keeps.apply(m.linear(x), m.weight)), torch.randn(3, 4))
    assert by_name(counts)["Keeps"].saved_bytes == 32 * traced.batch + 20


def test_an_input_that_is_written_to_is_the_stages_own() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return m.linear(x)

    counts = count_of(Of(function), torch.randn(3, 4))[1]
    assert [(s.maker, s.savers) for s in counts.saved] == [(0, (1,))]


def test_a_value_whose_size_depends_on_values_grows_from_what_was_seen_rounded_up() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0].sum() + x.sum()

    traced = trace(Chosen(), (torch.randn(3, 4),), out_dims="sum")
    chosen = next(node for node in traced.nodes if info(node).shapes[0].bytes.free_symbols - {traced.batch})
    found = output_bytes(traced, traced.effects, dict.fromkeys(traced.nodes, 20), 3)
    assert found[chosen] == 7 * traced.batch


def test_what_a_node_writes_and_keeps_is_made_by_it() -> None:
    """Where a stage begins with it, it writes to a clone: that is what it keeps, and not what it has received."""
    counts = count_of(Of(lambda m, x: m.linear(x).relu_()), torch.randn(3, 4))[1]
    assert [(s.maker, s.savers) for s in counts.saved] == [(-1, (0,)), (1, (1,))]


def test_functions_that_allow_no_hooks_say_themselves_what_they_keep() -> None:
    class Slope(Layered, weight=lambda: nn.Parameter(torch.randn(4, 4))):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.vmap(torch.func.grad(lambda row: ((self.weight @ row) ** 2).sum()))(x)

    model = nn.Sequential(nn.Linear(4, 4), Slope(), nn.Linear(4, 4))
    traced, counts = count_of(model, torch.randn(3, 4))
    whole = next(p for p, n in enumerate(traced.nodes) if info(n).opaque is not None)
    kept = {s.maker: s.bytes for s in counts.saved if whole in s.savers}
    assert kept[0] == 16 * traced.batch  # what it reads, and more of its own
    assert whole in kept


def test_a_graph_for_some_sizes_is_looked_at_with_these() -> None:
    x = torch.randn(4, 4)
    traced = trace(Of(lambda m, x: (m.linear(x) + torch.zeros(int(f"{len(x)}"), 4)).exp()), (x,), chunks=2)
    assert traced.recorded_sizes
    for samples in traced.recorded_sizes:
        counts = counted(traced, [x], samples)
        want = Stages(traced, (0,)).run(sample(traced, [x], samples), saved_by)
        assert of_stages(counts, traced, (0,), samples) == want
        assert number(total(counts, "flops"), traced, samples) == 32 * samples


def test_models_without_values_are_counted_alike() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), *(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GELU()) for _ in range(4)))

    x = torch.randn(4, 3, 8, 8)
    real = count_of(make(), x)[1]
    with torch.device("meta"):
        model = make()
    fake = count_of(model, x.to("meta"))[1]
    assert [*fake.nodes.values()] == [*real.nodes.values()]
    assert fake.saved == real.saved


def test_activations_are_not_held() -> None:
    """At no time more than a few of the thirty layers' activations are alive."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(30)))
    traced, x = trace(model, (torch.randn(256, 64),)), torch.randn(256, 64)
    with (counter := OperationCounter()):
        counter.begin([x, *model.parameters()])
        counted(traced, [x], 256)
    assert counter.most <= 8 * x.nbytes
    assert total(counted(traced, [x], 256), "saved_bytes").subs(traced.batch, 256) == 30 * x.nbytes
