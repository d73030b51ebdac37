"""Sizes that change from batch to batch: one graph where forward allows it, in every mechanism, never a wrong one."""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.devices import on_cpu, workers
from helpers.layered import Layered
from helpers.oracle import accumulate_gradients, assert_same_gradients, assert_same_state, draw_seed, train_step
from torch import nn
from torch.export import Dim

import fxpipe
from fxpipe.errors import ArgumentError, FxpipeError

D = 8
LENGTHS = (7, 12, 5, 16, 9, 40, 12)


class Layers(nn.Module):
    """What the models here are made of. The forwards differ in what they do with sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.table = nn.Parameter(torch.randn(64, D))
        self.convolution = nn.Conv1d(D, D, 3, padding=1)
        self.recurrent = nn.GRU(D, D, batch_first=True)
        self.register_buffer("cache", torch.randn(4, D))


def plainly(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(torch.relu(m.second(m.first(x))))


def position_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.first(x) + m.table[: x.shape[1]])


def causal_mask(m: Any, x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    mask = torch.full((length, length), -math.inf).triu(1)
    scores = m.first(x) @ m.second(x).transpose(1, 2) / D**0.5 + mask
    return m.last(scores.softmax(-1) @ x)


def padding_to_a_multiple(m: Any, x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    padded = F.pad(m.first(x), (0, 0, 0, -length % 4))
    windows = padded.view(x.shape[0], -1, 4, D)
    return m.last((windows + windows.mean(2, keepdim=True)).flatten(1, 2)[:, :length])


def pooling_to_a_fixed_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(F.adaptive_avg_pool1d(m.convolution(m.first(x).transpose(1, 2)), 4).transpose(1, 2))


def windows_by_unfold(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.first(x).unfold(1, 3, 2).sum(-1))


def writes_to_half(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    h[:, : x.shape[1] // 2] *= 2
    return m.last(h)


# Of these torch's fake tensors make plain numbers, or tell nothing: runs show what they make of other sizes.


def max_pool(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.max_pool1d(m.first(x).transpose(1, 2), 3, 2, ceil_mode=True)
    return m.last(h.transpose(1, 2))


def recurrent(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.recurrent(m.first(x))[0])


def linear_ramp(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.first(x) * torch.linspace(0, 1, x.shape[1])[:, None])


@fxpipe.leaf
def halved(x: torch.Tensor) -> torch.Tensor:
    half = x[:, : x.shape[1] // 2]
    return half * 2 if half.shape[1] > 4 else half


def leaf_that_halves(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(halved(m.first(x)))


# What forward concludes from a size is a condition; another conclusion is another graph.


@functools.lru_cache(maxsize=8)
def cached_positions(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)[:, None]


def positions_cached_but_for_compilers(m: Any, x: torch.Tensor) -> torch.Tensor:
    positions = cached_positions.__wrapped__ if torch.compiler.is_compiling() else cached_positions
    return m.last(m.first(x) + positions(x.shape[1]))


@functools.lru_cache(maxsize=8)
def cached_factor(length: int) -> float:
    return (length % 3 + 1) / 2


def factor_cached_but_for_compilers(m: Any, x: torch.Tensor) -> torch.Tensor:
    factor = cached_factor.__wrapped__ if torch.compiler.is_compiling() else cached_factor
    return m.last(m.first(x) * factor(x.shape[1] // 8))


def branch_on_a_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h * 2 if x.shape[1] > 10 else h)


def clipped_slice(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)[:, :10]
    return m.last(h * 3 if h.shape[1] == 10 else h)


def pieces_of_a_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(sum(piece.mean(1) for piece in m.first(x).split(4, 1)))


def grown_cache(m: Any, x: torch.Tensor) -> torch.Tensor:
    table = m.cache if x.shape[1] <= len(m.cache) else m.cache.repeat(-(-x.shape[1] // len(m.cache)), 1)
    return m.last(m.first(x) + table[: x.shape[1]])


# A size that goes on as a plain number, which nothing follows, binds the graph to it.


def loop_over_positions(m: Any, x: torch.Tensor) -> torch.Tensor:
    h, states = torch.zeros_like(x[:, 0]), []
    for position in range(x.shape[1]):
        h = torch.tanh(m.first(x[:, position]) + h)
        states.append(h)
    return m.last(torch.stack(states, 1))


def power_of_two_steps(m: Any, x: torch.Tensor) -> torch.Tensor:
    h, stride = m.first(x), 1
    while stride < x.shape[1]:
        h, stride = h + h.roll(stride, 1), stride * 2
    return m.last(h)


def padding_until_a_multiple(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    while h.shape[1] % 4:
        h = F.pad(h, (0, 0, 0, 1))
    return m.last(h.view(x.shape[0], -1, 4, D).mean(2))


def branch_between_two_sizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.first(x)[:, :10] * max(min(x.shape[1], 10), 8))


def one_size_of_its_own(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.first(x) * (2 if x.shape[1] in (12, 40) else 3))


def branch_on_contiguity(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)[:, :10]
    return m.last(h * 2 if h.is_contiguous() else h)


def windows_if_there_are_any(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h if h.shape[1] < 8 else h.unfold(1, 8, 1).mean(-1))


def branch_on_an_equal_shape(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h * 2 if h[0].is_same_size(m.table[:12]) else h)


# Numbers that are the same for sizes that are near each other.


def root_of_a_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    side = math.isqrt(x.shape[1])
    return m.last(m.first(x)[:, : side * side].unflatten(1, (side, side)).mean(2))


def text_of_a_shape(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.last(m.first(x) * len(repr(x.shape)))


def branch_on_the_bytes_of_a_storage(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h * 2 if x[0].clone().untyped_storage().nbytes() > 15 * D * x.element_size() else h)


def size_in_a_closure(m: Any, x: torch.Tensor) -> torch.Tensor:
    steps = x.shape[1] // 8 + 1

    @fxpipe.leaf
    def scaled(h: torch.Tensor) -> torch.Tensor:
        return h * steps

    return m.last(scaled(m.first(x)))


def size_in_the_closure_of_a_backward(m: Any, x: torch.Tensor) -> torch.Tensor:
    steps = x.shape[1] // 8 + 1

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            return h * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * steps

    return m.last(Scaled.apply(m.first(x)))


def branch_on_an_offset(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h * 2 if h[0, x.shape[1] // 2 :].storage_offset() > 7 * D else h)


ANY_SIZE = (
    plainly,
    position_table,
    causal_mask,
    padding_to_a_multiple,
    pooling_to_a_fixed_size,
    windows_by_unfold,
    writes_to_half,
    max_pool,
    recurrent,
    linear_ramp,
    leaf_that_halves,
    positions_cached_but_for_compilers,
    factor_cached_but_for_compilers,
)
BY_CONDITION = {  # and how many graphs LENGTHS take, the first of which is that of one size
    branch_on_a_size: 3,
    clipped_slice: 3,
    grown_cache: 2,
    pieces_of_a_size: 5,
    padding_until_a_multiple: 3,
    branch_between_two_sizes: 4,
    one_size_of_its_own: 4,
    branch_on_contiguity: 3,
    branch_on_an_equal_shape: 3,
    windows_if_there_are_any: 3,
    power_of_two_steps: 4,
}
BOUND = (
    loop_over_positions,
    root_of_a_size,
    text_of_a_shape,
    branch_on_the_bytes_of_a_storage,
    branch_on_an_offset,
    size_in_a_closure,
    size_in_the_closure_of_a_backward,
)


# Sizes in tensors that Python makes, in writes and pads, of what only runs show, in conditions and in loops.
ON_DEVICES = (
    causal_mask,
    padding_to_a_multiple,
    writes_to_half,
    recurrent,
    leaf_that_halves,
    branch_on_a_size,
    grown_cache,
    loop_over_positions,
)


def marked(forwards: Iterable[Any]) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.anywhere) if one in ON_DEVICES else one for one in forwards]


def model_of(forward: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    return type(forward.__name__, (Layers,), {"forward": forward})()


def assert_steps(model: nn.Module, batches: Sequence[torch.Tensor], chunks: int = 2, **options: Any) -> int:
    """Steps in training and outputs in evaluation are the plain model's. Returns how many graphs training took."""
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, workers(2), chunks=chunks, example_args=(batches[0].clone(),), **options) as pipe:
        for step, batch in enumerate(batches):
            for one in (plain, pipe):
                one.zero_grad()
            parts = [plain(part) for part in batch.tensor_split(chunks)]
            want = sum(part.square().mean() * (len(part) / len(torch.cat(parts))) for part in parts)
            want.backward()
            if step % 2:
                outputs = on_cpu(pipe(batch.clone()))
                torch.testing.assert_close(outputs, torch.cat(parts))
                have = outputs.square().mean()
                have.backward()
            else:
                have = pipe.forward_backward(batch.clone(), loss_fn=lambda y: y.square().mean())
            torch.testing.assert_close(on_cpu(have), want)
            assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
            assert_same_state(pipe, plain, exact=False)
        graphs = len(pipe._fxpipe.graphs)
        pipe.eval()
        plain.eval()
        with torch.no_grad():
            for batch in batches:
                torch.testing.assert_close(on_cpu(pipe(batch.clone())), plain(batch))
        return graphs


def batches_of(lengths: Sequence[int], samples: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(samples, length, D) for length in lengths]


@pytest.mark.parametrize("forward", marked(ANY_SIZE))
def test_two_graphs_run_all_sizes(forward: Callable[..., Any]) -> None:
    assert assert_steps(model_of(forward), batches_of(LENGTHS)) == 2


@pytest.mark.parametrize("forward", marked(BY_CONDITION))
def test_another_conclusion_from_a_size_is_another_graph(forward: Callable[..., Any]) -> None:
    assert assert_steps(model_of(forward), batches_of(LENGTHS)) == BY_CONDITION[forward]


@pytest.mark.parametrize("forward", marked(BOUND))
def test_a_size_that_goes_on_as_a_plain_number_is_right_at_every_size(forward: Callable[..., Any]) -> None:
    assert assert_steps(model_of(forward), batches_of((12, 7, 16, 9, 12))) == 4


class Hidden(Layers):
    """Goes by a size in a way that nothing sees, at a threshold far beyond the first sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        between = x[0, -1].data_ptr() - x[0, 0].data_ptr()
        return self.last(h * 2 if between > 50 * D * x.element_size() else h)


def test_a_size_far_beyond_those_compared_is_compared_again() -> None:
    assert assert_steps(Hidden(), batches_of((7, 12, 9, 60, 8, 60))) == 3


@fxpipe.leaf
def clipped(x: torch.Tensor) -> torch.Tensor:
    return x[:, :50]


def test_a_size_that_only_a_run_shows_is_compared_beyond_those_seen() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = clipped(m.first(x))
        return m.last(h * 2 if h.shape[1] == 50 else h)

    assert assert_steps(model_of(forward), batches_of((7, 12, 9, 55, 8, 50, 52))) == 5


@fxpipe.leaf
def steps_of_five(x: torch.Tensor) -> torch.Tensor:
    return x[:, : [2, 3, 5, 8, 13, 21, 34][x.shape[1] // 5]]


def test_a_leaf_whose_sizes_follow_no_formula_has_a_graph_for_each_size() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.last(steps_of_five(m.first(x)))

    assert assert_steps(model_of(forward), batches_of((7, 12, 5, 12))) == 3


def test_a_size_of_one_is_another_graph() -> None:
    assert assert_steps(model_of(plainly), batches_of((7, 12, 1, 2, 9))) == 3


def test_two_dimensions_that_are_equal_by_chance_are_two() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, D, 3, padding=1, stride=2), nn.Conv2d(D, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.interpolate(torch.relu(self.first(x)), scale_factor=2, mode="nearest")
            return self.second(h[..., : x.shape[-2], : x.shape[-1]]) + x

    torch.manual_seed(0)
    sizes = ((16, 16), (12, 12), (16, 12), (20, 9), (7, 30))
    assert assert_steps(Images(), [torch.randn(4, 3, *size) for size in sizes]) <= 3


@pytest.mark.anywhere
def test_sizes_and_the_number_of_samples_change_together() -> None:
    torch.manual_seed(1)
    batches = [torch.randn(n, length, D) for n, length in ((4, 7), (6, 12), (2, 5), (4, 16), (7, 9), (3, 4))]
    assert assert_steps(model_of(causal_mask), batches) == 2


def condition_on_both(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    return m.last(h * 2 if x.shape[0] * x.shape[1] > 30 else h)


@pytest.mark.anywhere
def test_a_condition_on_samples_and_size_is_that_of_the_mini_batch() -> None:
    """As in the plain model, also where the micro-batches alone would go another way."""
    model = model_of(condition_on_both)
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, workers(2), chunks=2, example_args=(torch.randn(4, 40, D),)) as pipe:
        for length in (50, 45, 33, 20, 10, 6, 9):
            batch = torch.randn(4, length, D)
            torch.testing.assert_close(on_cpu(pipe(batch)), plain(batch))


@pytest.mark.anywhere
def test_a_mask_of_another_length_is_the_models_own_error() -> None:
    class Masked(Layers):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) * mask[..., None])

    model = Masked()
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, workers(2), chunks=2, example_args=(torch.randn(4, 7, D), torch.ones(4, 7))) as pipe:
        for length in (9, 12, 5):
            x, mask = torch.randn(4, length, D), torch.ones(4, length)
            torch.testing.assert_close(on_cpu(pipe(x, mask)), plain(x, mask))
        assert len(pipe._fxpipe.graphs) == 2
        with pytest.raises(RuntimeError, match="must match the size"):
            pipe(torch.randn(4, 9, D), torch.ones(4, 8))
        torch.testing.assert_close(on_cpu(pipe(x, mask)), plain(x, mask))


def test_a_mask_without_samples_may_be_of_each_length() -> None:
    class Biased(Layers):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return self.last((self.first(x) @ x.transpose(1, 2) + bias).softmax(-1) @ x)

    model = Biased()
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, workers(2), chunks=2, example_args=(torch.randn(4, 7, D), torch.randn(7, 7))) as pipe:
        for length in (9, 4, 12, 5):  # four of them are as many as the samples
            x, bias = torch.randn(4, length, D), torch.randn(length, length)
            torch.testing.assert_close(on_cpu(pipe(x, bias)), plain(x, bias))
        assert len(pipe._fxpipe.graphs) == 2


def test_formulas_that_take_torch_too_long_leave_a_graph_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.tracing.shapes.symbolic_run.PATIENCE", 0.0)
    with fxpipe.pipeline(model_of(plainly), workers(2), chunks=2, example_args=(torch.randn(4, 5, D),)) as pipe:
        for length in (6, 7, 6):
            pipe(torch.randn(4, length, D))
        assert len(pipe._fxpipe.graphs) == 3
        assert any("torch takes too long to follow it" in why for why in pipe.plan.why)


def test_the_plan_says_why_a_size_is_not_dynamic() -> None:
    with fxpipe.pipeline(
        model_of(loop_over_positions), workers(2), chunks=2, example_args=(torch.randn(4, 5, D),)
    ) as pipe:
        for length in (6, 7):
            pipe(torch.randn(4, length, D))
        (reason,) = (why for why in pipe.plan.why if "dimension 1 of x" in why)
        assert "plain number" in reason


def test_many_graphs_of_a_size_that_is_not_dynamic_are_warned_of_once() -> None:
    model = model_of(loop_over_positions)
    with fxpipe.pipeline(model, workers(2), chunks=2, example_args=(torch.randn(4, 2, D),)) as pipe:
        for length in range(3, 11):
            pipe(torch.randn(4, length, D))
        with pytest.warns(UserWarning, match="differ only in sizes of inputs, .* dimension 1 of x"):
            pipe(torch.randn(4, 11, D))
        pipe(torch.randn(4, 12, D))


def test_many_graphs_of_other_conclusions_from_sizes_are_warned_of_once_with_the_line() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        bucket = next(least for least in range(40, -1, -2) if x.shape[1] >= least)
        return m.last(m.first(x) / (bucket + 1))

    model = model_of(forward)
    with fxpipe.pipeline(model, workers(2), chunks=2, example_args=(torch.randn(4, 12, D),)) as pipe:
        for length in range(14, 28, 2):
            pipe(torch.randn(4, length, D))
        with pytest.warns(UserWarning, match=r"differ only in sizes .* concludes something else .*test_dynamic_sizes"):
            pipe(torch.randn(4, 28, D))
        pipe(torch.randn(4, 30, D))


class WithLoss(Layered, embedding=lambda: nn.Embedding(20, D), layer=D, head=(D, 20)):
    """Takes its loss by itself: a mean over the tokens that count."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.relu(self.layer(self.embedding(ids))))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 20), labels[:, 1:].reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


@pytest.mark.anywhere
def test_a_loss_in_the_model_is_that_of_the_mini_batch_at_every_size() -> None:
    torch.manual_seed(0)
    model = WithLoss()
    plain = copy.deepcopy(model)

    def inputs(length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 20, (4, length))
        return {"ids": ids, "labels": ids.masked_fill(torch.rand(4, length) < 0.3, -100)}

    with fxpipe.pipeline(model, workers(2), chunks=2, example_kwargs=inputs(7)) as pipe:
        for length in (7, 12, 5, 16, 9):
            batch = inputs(length)
            for one in (plain, pipe):
                one.zero_grad()
            want, have = plain(**batch), on_cpu(pipe(**batch))
            torch.testing.assert_close(have, want)
            want["loss"].backward()
            have["loss"].backward()
            assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
        assert len(pipe._fxpipe.graphs) == 2


# -- dynamic_shapes: said from the start -------------------------------------------------------------------------------

LENGTH = {"x": {1: "length"}}


@pytest.mark.parametrize(
    "dynamic_shapes",
    [
        pytest.param(LENGTH, marks=pytest.mark.anywhere),
        {"x": {1: Dim("length", min=2, max=64)}},
        {"x": {0: Dim("batch"), 1: Dim("length")}},
        {"x": (Dim.DYNAMIC, Dim.AUTO, Dim.STATIC)},
    ],
    ids=str,
)
def test_a_size_that_is_said_to_be_dynamic_takes_one_graph(dynamic_shapes: Any) -> None:
    assert assert_steps(model_of(causal_mask), batches_of(LENGTHS[:4]), dynamic_shapes=dynamic_shapes) == 1


def test_a_size_beyond_that_allowed_is_refused() -> None:
    options: dict[str, Any] = {"dynamic_shapes": {"x": {1: Dim("length", min=4, max=20)}}}
    with fxpipe.pipeline(
        model_of(plainly), workers(2), chunks=2, example_args=(torch.randn(4, 7, D),), **options
    ) as pipe:
        pipe(torch.randn(4, 20, D))
        with pytest.raises(ArgumentError, match="x has size 21 in dimension 1; dynamic_shapes allows 4 to 20"):
            pipe(torch.randn(4, 21, D))
        pipe(torch.randn(4, 5, D))


def test_a_batch_that_is_named_may_be_of_any_size_within_its_bounds() -> None:
    options: dict[str, Any] = {"dynamic_shapes": {"x": {0: Dim("batch", min=2, max=8), 1: "length"}}}
    model = model_of(plainly)
    with fxpipe.pipeline(model, workers(2), chunks=2, example_args=(torch.randn(4, 7, D),), **options) as pipe:
        for samples, length in ((8, 7), (3, 5), (2, 9)):
            x = torch.randn(samples, length, D)
            torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe._fxpipe.graphs) == 1
        for samples in (1, 9):
            with pytest.raises(ArgumentError, match=f"size {samples} in dimension 0; dynamic_shapes allows 2 to 8"):
                pipe(torch.randn(samples, 7, D))


def test_an_input_without_samples_may_have_a_dynamic_first_dimension() -> None:
    class Masked(Layers):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.last((self.first(x) @ x.mT + mask).softmax(-1) @ x)  # type: ignore[no-any-return]

    def inputs(samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, length, D), torch.zeros(length, length).tril()

    model, shapes = Masked(), {"x": {0: "batch", 1: "length"}, "mask": {0: "length", 1: "length"}}
    with fxpipe.pipeline(model, workers(2), chunks=2, example_args=inputs(4, 7), dynamic_shapes=shapes) as pipe:
        for samples, length in ((4, 7), (5, 9), (2, 4)):
            x, mask = inputs(samples, length)
            torch.testing.assert_close(pipe(x, mask), model(x, mask))
        assert len(pipe._fxpipe.graphs) == 1


def test_a_static_dimension_has_a_graph_for_each_size() -> None:
    options: dict[str, Any] = {"dynamic_shapes": {"x": {1: Dim.STATIC}}}
    model = model_of(plainly)
    with fxpipe.pipeline(model, workers(2), chunks=2, example_args=(torch.randn(4, 7, D),), **options) as pipe:
        for length in (7, 9, 12, 9):
            x = torch.randn(4, length, D)
            torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe._fxpipe.graphs) == 3
        reasons = pipe._fxpipe.graphs[-1][0].traced.why
        assert reasons == ("dimension 1 of x has one graph for each size: dynamic_shapes says that it is static",)


@pytest.mark.parametrize(
    ("dynamic_shapes", "message"),
    [
        ({"y": {1: "length"}}, "names 'y', which is no tensor input"),
        ({"x": {5: "length"}}, "dimension 5 for x"),
        ({"x": {1: 0.5}}, "is 0.5; expected a name"),
        ({"x": 1}, "expected a dict from dimensions"),
        ([LENGTH], "expected a dict from the names of inputs"),
        ({"x": {1: "same", 2: "same"}}, "gives both the name 'same'"),
        ({"x": {0: "same", 1: "same"}}, "no input has a batch dimension"),
        ({"x": {2: "width"}}, "dimension 2 of x, which cannot vary: its size is fixed by"),
    ],
)
def test_what_cannot_be_dynamic_is_refused(dynamic_shapes: Any, message: str) -> None:
    with pytest.raises(FxpipeError, match=message):
        fxpipe.pipeline(
            model_of(plainly), ["cpu"], chunks=2, example_args=(torch.randn(7, 7, D),), dynamic_shapes=dynamic_shapes
        )


def test_the_samples_and_another_dimension_cannot_have_one_name() -> None:
    shapes = {"x": {0: "same", 1: "same"}}
    with pytest.raises(ArgumentError, match="dimension 1 of x the name 'same', which is that of the samples in x"):
        fxpipe.plan(model_of(plainly), 1, example_args=(torch.randn(7, 7, D),), in_dims=0, dynamic_shapes=shapes)


def test_a_loop_over_a_size_that_is_said_to_be_dynamic_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dimension 1 of x, which cannot vary: .*plain number"):
        fxpipe.pipeline(
            model_of(loop_over_positions),
            ["cpu"],
            chunks=2,
            example_args=(torch.randn(4, 7, D),),
            dynamic_shapes=LENGTH,
        )


WIDTH = 6
FEW_LENGTHS = (5, 9, 4)  # the last one is of no recording


class Everything(nn.Module):
    """Batch norm, dropout, and a value that skips stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x) + torch.arange(x.shape[1])[:, None]
        h = self.norm(skip.transpose(1, 2)).transpose(1, 2)
        h = self.third(F.dropout(torch.relu(self.second(h)), 0.3))
        return self.last(h + skip)


class Statistics:
    """Running statistics as deferred batch norm has them: those of all values of a step."""

    def __init__(self, model: Everything):
        self.norm, self.inputs = copy.deepcopy(model.norm), list[torch.Tensor]()
        self.handle = model.norm.register_forward_pre_hook(lambda module, args: self.inputs.append(args[0].detach()))

    def of_step(self) -> nn.Module:
        self.norm(torch.cat([x.transpose(1, 2).flatten(0, 1) for x in self.inputs]))
        self.inputs.clear()
        return self.norm


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "deferred"),
    [
        ("gpipe", "never", False),
        ("1f1b", "always", False),
        ("interleaved_1f1b", "except_last", True),
        pytest.param("zero_bubble", "always", True, marks=pytest.mark.anywhere),
        ("zero_bubble_2p", "never", True),
        pytest.param("zbv", "except_last", False, marks=pytest.mark.anywhere),
    ],
)
def test_steps_of_any_size_are_the_plain_models(schedule: str, checkpoint: str, deferred: bool) -> None:
    model = Everything()
    plain = copy.deepcopy(model)
    statistics = Statistics(plain)
    options: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint, "deferred_batch_norm": deferred}
    example = (torch.randn(4, FEW_LENGTHS[0], WIDTH),)
    with fxpipe.pipeline(
        model, workers(2), 2, stages_per_device=2, example_args=example, hardware="cpu", **options
    ) as pipe:
        assert pipe.plan.portals
        for step, length in enumerate(FEW_LENGTHS):
            for run in (cut_step, handed_over_step):
                pipe.zero_grad()
                plain.zero_grad()
                torch.manual_seed(step)
                have, want = run(pipe, plain, length, "gpipe" if schedule == "gpipe" else "1f1b")
                torch.testing.assert_close(on_cpu(have), want)
                assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
                of_all = statistics.of_step()
                assert_same_state(model.norm, of_all if deferred else plain.norm, exact=False)
        assert len(pipe._fxpipe.graphs) == 2


def cut_step(pipe: Any, plain: nn.Module, length: int, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A mini-batch; the loss of the pipe and of the plain model."""
    x, target = torch.randn(5, length, WIDTH), torch.randn(5, length, WIDTH)
    state = torch.get_rng_state()
    have = pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
    torch.set_rng_state(state)
    seed = draw_seed(True)
    return have, train_step(plain, (x,), {}, target, F.mse_loss, chunks=2, order=order, seed=seed, batch=5)


def handed_over_step(pipe: Any, plain: nn.Module, length: int, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Micro-batches of their own lengths."""
    sizes = [(2, length), (3, length + 2), (1, length)]
    micro_batches = [(torch.randn(*size, WIDTH), torch.randn(*size, WIDTH)) for size in sizes]
    state = torch.get_rng_state()
    have = pipe.forward_backward(micro_batches=micro_batches, loss_fn=F.mse_loss)
    torch.set_rng_state(state)
    return have, accumulate_gradients(plain, micro_batches, F.mse_loss, seed=draw_seed(True))[0]
