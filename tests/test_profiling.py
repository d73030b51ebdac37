"""What the nodes of a graph cost: bytes exactly, seconds as far as they can be told; the model stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.profiling import NodeCost, Profile, Seconds, profile
from fxpipe.tracing import trace


class Block(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: [b, length, width]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A small language model whose head is tied to its embedding."""

    def __init__(self, blocks: int = 3):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        out: torch.Tensor = self.head(self.blocks(self.tokens(ids) + self.places(places)))
        return out


class Function(nn.Module):
    """`function(module, x)` with a parameter and a buffer to use."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.function(self, x)
        return out


def profiled(model: nn.Module, *args: Any, **options: Any) -> Profile:
    return profile(trace(model, args), args, budget=0.5, **options)


def by_name(costs: Profile) -> dict[str, NodeCost]:
    return {n.name: n for n in costs.nodes}


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_of_linear_and_conv_are_exact() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    costs = profiled(model, torch.randn(2, 3, 6, 6))
    conv, flatten, linear = costs.nodes
    b = costs.batch
    assert (conv.parameter_bytes, conv.output_bytes) == (4 * (8 * 3 * 9 + 8), 4 * 8 * 36 * b)
    assert (flatten.parameter_bytes, flatten.output_bytes) == (0, 0)
    assert (linear.parameter_bytes, linear.output_bytes) == (4 * (288 * 10 + 10), 40 * b)
    assert costs.parameter_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert costs.output_bytes == 1192 * b


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_formulas_hold_at_other_batch_sizes(batch: int) -> None:
    def two_sizes(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]).view(2, -1, 4).double().sum(0)

    costs = profiled(Function(two_sizes), torch.randn(4, 4))
    found = {n.name: int(n.output_bytes.subs(costs.batch, batch)) for n in costs.nodes}
    assert found == {"cat": 2 * batch * 4 * 4, "view": 0, "double": 2 * batch * 4 * 8, "sum_1": batch * 4 * 8}


def test_buffers_count_and_half_precision_counts_half() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)).bfloat16()
    costs = profiled(model, torch.randn(4, 4).bfloat16())
    assert costs.parameter_bytes == 2 * (4 * 4 + 16) + 8  # num_batches_tracked is an int64
    assert costs.nodes[-1].output_bytes == 8 * costs.batch


def test_tied_weight_counts_once_at_its_first_user() -> None:
    model = Gpt()
    costs = profiled(model, torch.randint(50, (2, 8)))
    nodes = by_name(costs)
    assert nodes["tokens"].parameter_bytes == 4 * 50 * 16
    assert nodes["head"].parameter_bytes == 0
    assert costs.parameter_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_views_parts_and_in_place_writes_make_nothing() -> None:
    def views(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        left, right = y.chunk(2, 1)
        y.mul_(2)
        F.relu_(y)
        y[:, 0] = 0
        values, _places = y.max(1)
        return values + F.dropout(left + right.transpose(0, 1).t(), 0.5, training=False).sum(1)

    costs = profiled(Function(views), torch.randn(3, 4))
    b = costs.batch
    made = {n.name: n.output_bytes for n in costs.nodes if n.output_bytes != 0}
    assert made == {"add": 16 * b, "max_1": 12 * b, "add_1": 8 * b, "sum_1": 4 * b, "add_2": 4 * b}


def test_contiguous_is_free_only_where_it_does_not_copy() -> None:
    def copies(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().transpose(1, 2).contiguous()

    costs = profiled(Function(copies), torch.randn(2, 4, 3))
    assert [n.output_bytes for n in costs.nodes] == [0, 0, 48 * costs.batch]


def test_size_that_hangs_on_values_is_taken_in_proportion() -> None:
    def positive(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[x > 0] = x[x > 0] * 2
        return y

    x = torch.tensor([[1.0, -1.0, 1.0], [1.0, -1.0, -1.0]])
    costs = profiled(Function(positive), x)
    selected = [n.output_bytes for n in costs.nodes if n.name.startswith(("getitem", "mul"))]
    assert selected == [6 * costs.batch] * 2


# -- seconds ---------------------------------------------------------------------------------------------------------


def test_matmul_costs_more_than_a_view() -> None:
    costs = profiled(nn.Sequential(nn.Linear(512, 512), nn.Flatten()), torch.randn(512, 512))
    linear, flatten = costs.nodes
    assert linear.forward.at(1) > flatten.forward.at(1) > 0
    assert linear.backward.at(1) > flatten.backward.at(1)
    assert costs.seconds == tuple((n.forward + n.backward).at(costs.micro_batch) for n in costs.nodes)
    assert costs.forward_seconds + costs.backward_seconds == pytest.approx(sum(costs.seconds))


def test_equal_blocks_have_equal_seconds() -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    costs = profiled(model, torch.randn(2, 8, 16).requires_grad_())
    each = len(costs.nodes) // 4
    blocks = [costs.seconds[i : i + each] for i in range(0, len(costs.nodes), each)]
    assert blocks == [blocks[0]] * 4


def test_uses_of_one_autograd_function_have_equal_seconds() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    def closure(function: Any) -> Any:
        """A graph holds each call of an autograd function as a closure of its own."""
        return lambda x: function(x)

    traced = trace(Function(lambda m, x: (x * m.weight).exp().exp()), (torch.randn(2, 4),))
    apply = Double.apply
    for node in traced.nodes[1:]:
        node.op, node.target = "call_function", closure(apply)
    _, first, second = profile(traced, (torch.randn(2, 4),)).nodes
    assert (first.forward, first.backward) == (second.forward, second.backward)


def test_nothing_goes_back_where_nothing_requires_grad() -> None:
    def half_frozen(module: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (module.weight * 3).exp()
        return torch.sigmoid(x) * scale * module.weight

    costs = by_name(profiled(Function(half_frozen), torch.randn(64, 4)))
    went_back = {name for name, n in costs.items() if n.backward.at(1) > 0}
    assert went_back <= {"mul_2"}
    assert costs["exp"].forward.at(1) > 0


def test_what_is_written_requires_grad_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fills(module: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        rows = y.view(-1)
        y[:, :] = x * module.weight
        return rows * 2

    goes_back = _gradients_asked(monkeypatch)
    profiled(Function(fills), torch.randn(2, 4), repeats=1)
    # mul, setitem and mul_1, each to warm up and once more
    assert goes_back == [1, 1, 1] * 2


def _gradients_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ends each call of `torch.autograd.grad` has from now on, other than those back to a 0-dim tensor."""
    calls: list[int] = []
    grad = torch.autograd.grad

    def spy(ends: Any, starts: Any, *args: Any, **kwargs: Any) -> Any:
        if starts[0].dim():
            calls.append(len(ends))
        return grad(ends, starts, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    return calls


def test_equal_nodes_are_sampled_only_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_back = _gradients_asked(monkeypatch)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    traced, x = trace(model, (torch.randn(2, 4).requires_grad_(),)), torch.randn(2, 4).requires_grad_()
    profile(traced, (x,), repeats=5, budget=60)
    assert len(goes_back) == 1 + 5
    goes_back.clear()
    profile(traced, (x,), repeats=5, budget=0)
    assert len(goes_back) == 1 + 1


def test_threads_are_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    traced = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    linear = traced.nodes[0]
    function = linear.target

    def spy(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return function(*args)  # type: ignore[operator]

    linear.target = spy
    profile(traced, (torch.randn(2, 4),), threads=2)
    assert set(seen) == {2}
    assert torch.get_num_threads() == 1


# -- what models do --------------------------------------------------------------------------------------------------


def in_place(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.count.add_(1)
    x.mul_(2)
    y = x * module.weight
    left = y[:, :2]
    left.add_(module.weight[:2])
    y += module.count
    F.dropout(y, 0.5, inplace=True)
    return F.relu(y, inplace=True)


def checkpointed(module: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.utils.checkpoint.checkpoint(lambda v: (v * module.weight).exp(), x, use_reentrant=False)
    return out


def autocast(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ torch.diag(module.weight)) @ torch.diag(module.weight)


def no_derivative(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * module.weight + torch.nextafter(x * module.weight, x).detach()


MODELS = {
    "norm": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), torch.randn(3, 2, 5, 5)),
    "gpt": (Gpt(), torch.randint(50, (2, 8))),
    "lstm": (nn.LSTM(4, 8, batch_first=True), torch.randn(3, 5, 4)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)),
    "in place": (Function(in_place), torch.randn(3, 4)),
    "checkpoint": (Function(checkpointed), torch.randn(3, 4)),
    "autocast": (Function(autocast), torch.randn(3, 4)),
    "no derivative": (Function(no_derivative), torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inputs_require_grad", [False, True])
def test_model_inputs_and_random_state_stay_as_they_were(name: str, inputs_require_grad: bool) -> None:
    model, x = copy.deepcopy(MODELS[name][0]), MODELS[name][1].clone()
    x.requires_grad_(inputs_require_grad and x.is_floating_point())
    traced = trace(model, (x,))
    state, given = copy.deepcopy(model.state_dict()), x.detach().clone()
    gradient = torch.ones_like(next(model.parameters()))
    next(model.parameters()).grad = gradient.clone()
    versions = {k: p._version for k, p in model.named_parameters()}
    random = torch.get_rng_state()

    costs = profile(traced, (x,), repeats=2)

    assert torch.equal(torch.get_rng_state(), random)
    assert {k: p._version for k, p in model.named_parameters()} == versions
    assert all(torch.equal(value, state[k]) for k, value in model.state_dict().items())
    grads = [p.grad for p in model.parameters()]
    assert torch.equal(grads[0], gradient)
    assert grads[1:] == [None] * (len(grads) - 1)
    assert torch.equal(x, given)
    assert x.grad is None
    assert [n.name for n in costs.nodes] == [n.name for n in traced.nodes]
    assert all(n.forward.at(1) >= 0 and n.backward.at(1) >= 0 for n in costs.nodes)


def test_in_place_nodes_leave_later_nodes_the_values_of_the_model() -> None:
    """A wrong value on the way would be out of the table's range, which raises."""

    def checked(module: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.view(-1).mul_(2)
        y[0, 0] = 7
        module.count.add_(1)
        return torch.nn.functional.embedding((y.sum() + module.count.sum() - 21).long().expand(x.shape[0]), table)

    table = nn.Parameter(torch.randn(5, 2))  # holds 5 rows: other sums than 0 to 4 are out of range
    model = Function(checked)
    model.table = table
    x = torch.tensor([[1.0, 2.0, 3.0, 1.0]])  # 7 + 4 + 6 + 2 + 4 = 23
    traced = trace(model, (x,), out_dims=0)
    assert profile(traced, (x,)).nodes


def test_inference_mode_of_the_caller_does_not_matter() -> None:
    traced = trace(nn.Linear(64, 64), (torch.randn(64, 64),))
    with torch.inference_mode():
        costs = profile(traced, (torch.randn(64, 64),))
    assert costs.nodes[0].backward.at(1) > 0


def test_autocast_of_the_caller_stays_on() -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        costs = profile(trace(nn.Sequential(linear, linear), (x,)), (x,))
        assert torch.is_autocast_enabled("cpu")
    assert [n.output_bytes for n in costs.nodes] == [8 * costs.batch] * 2


def test_keywords_and_constants_are_inputs_too() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor, times: int) -> torch.Tensor:
            return super().forward(x) * mask * times

    kwargs = {"mask": torch.ones(4), "times": 3}
    traced = trace(Scaled(4, 4), (torch.randn(3, 4),), kwargs)
    costs = profile(traced, (torch.randn(6, 4),), kwargs, micro_batch=2)
    assert costs.micro_batch == 2
    assert costs.output_bytes == 48 * costs.batch


# -- printing and errors ---------------------------------------------------------------------------------------------


def test_profile_prints_formulas() -> None:
    b = sympy.Symbol("b", integer=True, positive=True)
    node = NodeCost(
        "conv",
        Seconds(0.0004, 0.0002),
        Seconds(0.0005, 0.0005),
        sympy.Integer(896),
        100352 * b,
        flops=2 * b,
        backward_flops=4 * b,
        saved_bytes=b + 3,
    )
    lines = str(Profile((node,), 4, b, "cpu")).splitlines()
    assert lines[0] == "1 nodes on cpu, micro-batch of 4"
    assert lines[3].split() == ["conv", "1.200", "2.500", "6*b", "896", "100352*b", "b", "+", "3"]
    assert lines[4].split() == ["total", "1.200", "2.500", "6*b", "896", "100352*b", "b", "+", "3"]


def test_more_samples_than_given_are_refused() -> None:
    traced = trace(nn.Linear(4, 4), (torch.randn(4, 4),))
    with pytest.raises(ArgumentError, match="micro_batch=5, but the inputs hold 4 samples"):
        profile(traced, (torch.randn(4, 4),), micro_batch=5)
    with pytest.raises(ArgumentError, match="micro_batch=0; expected at least 1"):
        profile(traced, (torch.randn(4, 4),), micro_batch=0)
    with pytest.raises(ArgumentError, match="threads=0; expected at least 1"):
        profile(traced, (torch.randn(4, 4),), threads=0)


def test_inputs_of_another_kind_are_refused() -> None:
    x = torch.randn(4, 4)
    traced = trace(nn.Linear(4, 4), (x,))
    with pytest.raises(ArgumentError, match=r"2 inputs for a graph that was traced on 1 \(input\)"):
        profile(traced, (x, x))
    with pytest.raises(ArgumentError, match="input input is a int; the graph was traced on a tensor"):
        profile(traced, (3,))
    with pytest.raises(ArgumentTypeError, match="expected a tuple and a dict"):
        profile(traced, x)  # type: ignore[arg-type]


def test_batch_size_that_takes_another_graph_is_refused() -> None:
    def branches(module: Any, x: torch.Tensor) -> torch.Tensor:
        return x * module.weight if x.shape[0] > 2 else x

    x = torch.randn(4, 4)
    traced = trace(Function(branches), (x,))
    assert profile(traced, (x,), micro_batch=3).micro_batch == 3
    with pytest.raises(ArgumentError, match=r"the graph does not hold for 2 samples: at .*test_profiling\.py"):
        profile(traced, (x,), micro_batch=2)


def test_error_of_a_node_names_it() -> None:
    traced = trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(RuntimeError) as raised:
        profile(traced, (torch.randn(2, 5),))
    assert "while measuring linear" in raised.value.__notes__[0]
