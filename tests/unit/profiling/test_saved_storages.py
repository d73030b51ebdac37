"""What autograd keeps, to the byte: each stage of a cut runs for real, and hooks show which storages it saves."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import each_once
from helpers.layered import Layered
from helpers.models import GPT, ResNet, TwoBranch, UNet
from helpers.run_stages import Stages, leaves_of, sample, saved_by
from helpers.saved_bytes import Of, Pictures, counted, of_stages
from torch import nn

import fxpipe
from fxpipe.profiling import memory
from fxpipe.profiling.memory import GraphCounts
from fxpipe.profiling.saved_storages import observe_storages
from fxpipe.rewriting.cut_points import forbidden_cuts
from fxpipe.tracing import Traced, trace
from fxpipe.tracing.fake_tensors import ValuesNeededError


def some_cuts(traced: Traced, cuts: int = 4) -> list[tuple[int, ...]]:
    """No cut, and random ones: 2 to 4 stages."""
    dice = random.Random(1)
    forbidden = forbidden_cuts(traced)
    allowed = [place for place in range(1, len(traced.nodes)) if place not in forbidden]
    found = [(0,)]
    for k in range(cuts):
        found.append((0, *sorted(dice.sample(allowed, min(len(allowed), 1 + k % 3)))))
    return found


def assert_exact(
    model: nn.Module,
    *args: Any,
    kwargs: dict[str, Any] | None = None,
    sizes: tuple[int, ...] = (1, 3, 8),
    **options: Any,
) -> GraphCounts:
    """Counted with the samples of a micro-batch, the bytes of every stage are what hooks see, whatever the cut."""
    leaves = leaves_of(args, kwargs)
    traced = trace(model, args, kwargs, **options)
    for samples in sizes:
        counts = counted(traced, leaves, samples)
        for starts in some_cuts(traced):
            want = Stages(traced, starts).run(sample(traced, leaves, samples), saved_by)
            names = [traced.nodes[s].name for s in starts[1:]]
            assert of_stages(counts, traced, starts, samples) == want, f"{samples} samples, cut before {names}"
    return counts


# -- models ------------------------------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """Saves its input, its output and a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y := x * x, x.new_ones(7))
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


class Part(torch.autograd.Function):
    """Returns a part of something larger, all of which stays with it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x, x.new_ones(len(x), 5)], 1)[:, 2:6]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def views(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Small views of something large, of each other, and expanded ones."""
    h = m.linear(x)
    left, right = h.chunk(2, 1)
    small = (h * 2)[:, :2]
    wide = m.weight[:2].exp().expand(3, x.shape[0], 2)
    return (left * right).sigmoid() * small * wide.sum(0) + h.t().tanh().t()[:, 1:3].exp()


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y += m.count
    y.relu_()
    z = y.view(-1) * 2
    z.mul_(3).sigmoid_()
    z.view(-1, 4)[:, :2].add_(1)
    return F.dropout(m.linear(z.view(-1, 4)), 0.5, inplace=True)


def input_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return (m.linear(x) * x).exp()


def autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = m.linear(m.linear(x))
        with torch.autocast("cpu", enabled=False):
            h = m.linear(h.float())
        return F.softmax(h @ m.frozen, -1) * F.layer_norm(h, (4,), m.weight)


def no_grad(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = m.linear(x).softmax(-1)
        with torch.enable_grad():
            scale = (m.weight * x).exp()
    return (m.linear(x) - target).square() * scale.detach() + m.linear(x).detach().exp()


def unused(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.linear(x).exp()
    values, places = m.linear(x).max(1)
    h, (last, _) = m.linear(x).sort(1)[0], m.linear(x)[:, :2].unbind(1)
    return values.exp() * last + h.gather(1, places[:, None]).squeeze(1)


def frozen(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ m.frozen) @ m.frozen
    return (h * m.weight + m.frozen.exp().sum(0) * h) @ m.frozen


def attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    q = m.linear(x).view(-1, 4, 2, 2).transpose(1, 2)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    bias = m.weight.exp().expand(x.shape[0], 1, 4, 4)
    first = F.scaled_dot_product_attention(q, q * 2, q.exp(), is_causal=True)
    second = F.scaled_dot_product_attention(first, q, q, attn_mask=mask)
    scores = (second @ q.transpose(-2, -1) + bias).masked_fill(mask, -9.0).softmax(-1)
    return F.dropout(scores, 0.2) @ second


class Table(nn.Module):
    """Embeddings, an LSTM, a cross entropy inside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bag = nn.Embedding(9, 6), nn.EmbeddingBag(9, 6, mode="max")
        self.lstm, self.gru = nn.LSTM(6, 5, 2, batch_first=True, dropout=0.1), nn.GRU(5, 4, batch_first=True)
        self.head = nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.bag(ids)[:, None]
        out = self.head(self.gru(self.lstm(x)[0])[0])
        return F.cross_entropy(out.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)


ROWS, WORDS = torch.randn(8, 4), torch.randint(0, 9, (8, 5))
SMALL = {
    "views": views,
    "in place": in_place,
    "input in place": input_in_place,
    "autocast": autocast,
    "no grad": no_grad,
    "unused": unused,
    "frozen": frozen,
    "part": lambda m, x: m.linear(Part.apply(m.linear(x))),
    "autograd function": lambda m, x: Square.apply(m.linear(Square.apply(m.linear(x)))) * m.weight,
}
LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "attention": (lambda: Of(attention), (torch.randn(8, 4, 4),)),
    "unet": (UNet, (torch.randn(8, 3, 16, 16),)),
    "resnet": (ResNet, (torch.randn(8, 3, 8, 8),)),
    "resnet that is evaluated": (lambda: ResNet().eval(), (torch.randn(8, 3, 8, 8),)),
    "pictures": (Pictures, (torch.randn(8, 3, 8, 8),)),
    "gpt": (GPT, (torch.randint(0, 17, (8, 7)),)),
    "lstm": (Table, (WORDS,)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(8, 3, 8),)),
}


@pytest.mark.parametrize(("name", "gradient"), each_once(SMALL, [False, True]))
def test_stages_of_small_functions_save_what_is_said(name: str, gradient: bool) -> None:
    assert_exact(Of(SMALL[name]), ROWS.clone().requires_grad_(gradient))


@pytest.mark.parametrize("name", LARGE)
def test_stages_of_models_save_what_is_said(name: str) -> None:
    make, args = LARGE[name]
    assert_exact(make(), *args)


def test_two_inputs_and_a_shared_module() -> None:
    assert_exact(TwoBranch(), torch.randn(8, 6), kwargs={"other": torch.randn(8, 6)})


def test_a_node_that_saves_a_storage_twice_saves_it_once():
    class Square(Layered, linear=4):
        def forward(self, x):
            y = self.linear(x)
            return y * y  # saves y for either factor

    x = torch.randn(8, 4)
    traced = trace(Square(), (x,))
    saved = counted(traced, [x], 4).saved
    assert [s.savers for s in saved if s.maker == 0] == [(1,)]
    for one in saved:
        assert list(one.savers) == sorted(set(one.savers))


def choosing(m: Any, x: torch.Tensor) -> torch.Tensor:
    """How many rows go on depends on a product."""
    h = m.linear(x)
    is_positive = h.detach() > 0
    return h.masked_scatter(is_positive, h[is_positive].square())


@fxpipe.leaf
def clipped(h: torch.Tensor) -> torch.Tensor:
    return h.exp() if h.detach().numpy().any() else h


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (GPT, (8, 7)),
        (UNet, (8, 3, 16, 16)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (8, 5, 8)),
        (lambda: Of(lambda m, x: clipped(m.linear(x)) @ m.frozen), (8, 4)),
        (lambda: Of(choosing), (8, 6, 4)),
    ],
)
def test_one_node_of_each_kind_counts_what_all_nodes_do(monkeypatch: pytest.MonkeyPatch, make: Any, shape: Any) -> None:
    x = torch.randint(0, 17, shape) if make is GPT else torch.randn(shape)
    traced = trace(make(), (x,))
    found = counted(traced, [x], 2)
    monkeypatch.setattr(memory, "runs_python", lambda node: True)
    everything = counted(traced, [x], 2)
    assert (found.nodes, found.saved) == (everything.nodes, everything.saved)


def test_values_of_other_nodes_are_not_read() -> None:
    x = torch.randn(8, 6, 4)
    traced = trace(Of(choosing), (x,))
    observe_storages(traced, traced.effects, [x])
    with pytest.raises(ValuesNeededError):
        observe_storages(traced, traced.effects, [x], once=True)


def test_one_node_of_a_kind_stands_for_others_as_a_tensor_of_its_own() -> None:
    """Attention whose query, key and value are of one kind has three gradients all the same."""

    def attends(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(m.linear(x), m.linear(x), m.linear(x))

    x = torch.randn(8, 2, 3, 4)
    traced = trace(Of(attends), (x,))
    found = [observe_storages(traced, traced.effects, [x], once).probes for once in (False, True)]
    assert found[0] == found[1]
