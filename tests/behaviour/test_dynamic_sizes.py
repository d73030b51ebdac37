"""Sizes that change from batch to batch: one graph where forward allows it, in every mechanism, never a wrong one."""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared_steps import assert_trains
from helpers.devices import on_cpu, workers
from helpers.layered import Layered
from helpers.models import WithLoss, ids_and_labels
from helpers.oracle import assert_same_gradients
from torch import nn
from torch.export import Dim

import fxpipe
from fxpipe.errors import ArgumentError, FxpipeError

D = 8
LENGTHS = (7, 12, 5, 16, 9, 40, 12)

Function = Callable[[Any, torch.Tensor], torch.Tensor]  # of the model and hidden values [samples, length, D]


class Model(
    Layered,
    first=D,
    second=D,
    last=D,
    table=lambda: nn.Parameter(torch.randn(64, D)),
    convolution=lambda: nn.Conv1d(D, D, 3, padding=1),
    recurrent=lambda: nn.GRU(D, D, batch_first=True),
    cache=lambda: torch.randn(4, D),
):
    """What a function does with sizes, between two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self, self.first(x)))


def causal_mask(m: Any, h: torch.Tensor) -> torch.Tensor:
    mask = torch.full((h.shape[1], h.shape[1]), -math.inf).triu(1)
    return (h @ m.second(h).mT / D**0.5 + mask).softmax(-1) @ h


def padding_to_a_multiple(m: Any, h: torch.Tensor) -> torch.Tensor:
    windows = F.pad(h, (0, 0, 0, -h.shape[1] % 4)).view(h.shape[0], -1, 4, D)
    return (windows + windows.mean(2, keepdim=True)).flatten(1, 2)[:, : h.shape[1]]


def writes_to_half(m: Any, h: torch.Tensor) -> torch.Tensor:
    h[:, : h.shape[1] // 2] *= 2
    return h


@fxpipe.leaf
def halved(x: torch.Tensor) -> torch.Tensor:
    half = x[:, : x.shape[1] // 2]
    return half * 2 if half.shape[1] > 4 else half


@functools.lru_cache(maxsize=8)
def cached_positions(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32)[:, None]


@functools.lru_cache(maxsize=8)
def cached_factor(length: int) -> float:
    return (length % 3 + 1) / 2


def unless_compiling(cached: Any) -> Any:
    """Compilers get the function without its cache, as in transformers."""
    return cached.__wrapped__ if torch.compiler.is_compiling() else cached


ANY_SIZE: dict[str, Function] = {
    "plainly": lambda m, h: torch.relu(m.second(h)),
    "position table": lambda m, h: h + m.table[: h.shape[1]],
    "causal mask": causal_mask,
    "padding to a multiple": padding_to_a_multiple,
    "pooling to a fixed size": lambda m, h: F.adaptive_avg_pool1d(m.convolution(h.mT), 4).mT,
    "windows by unfold": lambda m, h: h.unfold(1, 3, 2).sum(-1),
    "writes to half": writes_to_half,
    # Of these torch's fake tensors make plain numbers, or tell nothing: runs show what they make of other sizes.
    "max pool": lambda m, h: F.max_pool1d(h.mT, 3, 2, ceil_mode=True).mT,
    "recurrent": lambda m, h: m.recurrent(h)[0],
    "linear ramp": lambda m, h: h * torch.linspace(0, 1, h.shape[1])[:, None],
    "leaf that halves": lambda m, h: halved(h),
    "cached positions": lambda m, h: h + unless_compiling(cached_positions)(h.shape[1]),
    "cached factor": lambda m, h: h * unless_compiling(cached_factor)(h.shape[1] // 8),
}


def grown_cache(m: Any, h: torch.Tensor) -> torch.Tensor:
    table = m.cache if h.shape[1] <= len(m.cache) else m.cache.repeat(-(-h.shape[1] // len(m.cache)), 1)
    return h + table[: h.shape[1]]


def power_of_two_steps(m: Any, h: torch.Tensor) -> torch.Tensor:
    length, stride = h.shape[1], 1
    while stride < length:
        h, stride = h + h.roll(stride, 1), stride * 2
    return h


def padding_until_a_multiple(m: Any, h: torch.Tensor) -> torch.Tensor:
    while h.shape[1] % 4:
        h = F.pad(h, (0, 0, 0, 1))
    return h.view(h.shape[0], -1, 4, D).mean(2)


# What forward concludes from a size is a condition; another conclusion is another graph. The numbers are those of the
# graphs that LENGTHS take, the first of which is that of one size.
BY_CONDITION: dict[str, tuple[Function, int]] = {
    "branch on a size": (lambda m, h: h * 2 if h.shape[1] > 10 else h, 3),
    "clipped slice": (lambda m, h: h[:, :10] * (3 if h[:, :10].shape[1] == 10 else 1), 3),
    "grown cache": (grown_cache, 2),
    "pieces of a size": (lambda m, h: sum(piece.mean(1) for piece in h.split(4, 1)), 5),
    "padding until a multiple": (padding_until_a_multiple, 3),
    "branch between two sizes": (lambda m, h: h[:, :10] * max(min(h.shape[1], 10), 8), 4),
    "one size of its own": (lambda m, h: h * (2 if h.shape[1] in (12, 40) else 3), 4),
    "branch on contiguity": (lambda m, h: h[:, :10] * (2 if h[:, :10].is_contiguous() else 1), 3),
    "branch on an equal shape": (lambda m, h: h * 2 if h[0].is_same_size(m.table[:12]) else h, 3),
    "windows if there are any": (lambda m, h: h if h.shape[1] < 8 else h.unfold(1, 8, 1).mean(-1), 3),
    "power of two steps": (power_of_two_steps, 4),
}


def loop_over_positions(m: Any, h: torch.Tensor) -> torch.Tensor:
    state, states = torch.zeros_like(h[:, 0]), []
    for position in range(h.shape[1]):
        state = torch.tanh(m.second(h[:, position]) + state)
        states.append(state)
    return torch.stack(states, 1)


def root_of_a_size(m: Any, h: torch.Tensor) -> torch.Tensor:
    side = math.isqrt(h.shape[1])
    return h[:, : side * side].unflatten(1, (side, side)).mean(2)


def size_in_a_closure(m: Any, h: torch.Tensor) -> torch.Tensor:
    steps = h.shape[1] // 8 + 1

    @fxpipe.leaf
    def scaled(h: torch.Tensor) -> torch.Tensor:
        return h * steps

    return scaled(h)


def size_in_the_closure_of_a_backward(m: Any, h: torch.Tensor) -> torch.Tensor:
    steps = h.shape[1] // 8 + 1

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            return h * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * steps

    return Scaled.apply(h)


# A size that goes on as a plain number, which nothing follows, binds the graph to it: also numbers that are the same
# for sizes that are near each other.
BOUND: dict[str, Function] = {
    "loop over positions": loop_over_positions,
    "root of a size": root_of_a_size,
    "text of a shape": lambda m, h: h * len(repr(h.shape)),
    "bytes of a storage": lambda m, h: h * (2 if h[0].clone().untyped_storage().nbytes() > 15 * D * 4 else 1),
    "an offset": lambda m, h: h * (2 if h[0, h.shape[1] // 2 :].storage_offset() > 7 * D else 1),
    "size in a closure": size_in_a_closure,
    "size in the closure of a backward": size_in_the_closure_of_a_backward,
}

# Sizes in tensors that Python makes, in writes and pads, of what only runs show, in conditions and in loops.
ON_DEVICES = (
    "causal mask", "padding to a multiple", "writes to half", "recurrent", "leaf that halves", "branch on a size",
    "grown cache", "loop over positions",
)  # fmt: skip


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.anywhere] * (name in ON_DEVICES)) for name in names]


def batches_of(lengths: Sequence[int], samples: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(samples, length, D) for length in lengths]


def graphs_of(function: Function, lengths: Sequence[int] = LENGTHS, **options: Any) -> int:
    return assert_trains(Model(function=function), batches_of(lengths), evaluates=True, **options)


@pytest.mark.parametrize("name", marked(ANY_SIZE))
def test_two_graphs_run_all_sizes(name: str) -> None:
    assert graphs_of(ANY_SIZE[name]) == 2


@pytest.mark.parametrize("name", marked(BY_CONDITION))
def test_another_conclusion_from_a_size_is_another_graph(name: str) -> None:
    function, graphs = BY_CONDITION[name]
    assert graphs_of(function) == graphs


@pytest.mark.parametrize("name", marked(BOUND))
def test_a_size_that_goes_on_as_a_plain_number_is_right_at_every_size(name: str) -> None:
    assert graphs_of(BOUND[name], (12, 7, 16, 9, 12)) == 4


# -- floats that forward computes of sizes stay sizes -----------------------------------------------------------------


def resized(h: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.interpolate(h.mT, **options).mT


FLOATS: dict[str, Function] = {
    "size / 2": lambda m, h: h / (h.shape[1] / 2),
    "power": lambda m, h: h * h.shape[1] ** -0.5 / h.shape[1] ** 2,
    "round and floor": lambda m, h: h[:, math.floor(h.shape[1] * 0.2) : round(h.shape[1] * 0.75)],
    "ceil to a multiple": lambda m, h: F.pad(h, (0, 0, 0, math.ceil(h.shape[1] / 4) * 4 - h.shape[1])),
    "full": lambda m, h: h + torch.full((h.shape[1], 1), h.shape[1] / 3, dtype=h.dtype),
    "interpolate by a factor": lambda m, h: resized(h, scale_factor=h.shape[1] / 4),
    "tensor": lambda m, h: h * torch.tensor(h.shape[1] / 3),
}
FLOATS_BY_CONDITION: dict[str, Function] = {
    "comparison": lambda m, h: h * 2 if h.shape[1] / 4 > 2.6 else h * 3,
    "least of two": lambda m, h: h * min(h.shape[1] / 10, 1.0),
    "absolute value": lambda m, h: h * abs(h.shape[1] / 2 - 5.5),
    "whole number": lambda m, h: h * 2 if (h.shape[1] / 2).is_integer() else h,
}
BOUND_FLOATS: dict[str, Function] = {
    "int of a part": lambda m, h: h[:, : int(h.shape[1] * 0.5)],
    "int": lambda m, h: h[:, : int(h.shape[1]) - 1],
    "float": lambda m, h: h / float(h.shape[1]),
    "logarithm": lambda m, h: h * math.log(h.shape[1]),
    "float first": lambda m, h: h * (0.5 * h.shape[1]),
    "text of a float": lambda m, h: h * len(f"{h.shape[1] / 2}"),
    "rest of a float": lambda m, h: h * ((h.shape[1] / 2) // 1.5),
    "power of a float": lambda m, h: h * 2.0 ** (h.shape[1] / 8),
    # To sympy that is a product of two, rounded once: 0.1 * 3 * 10 is 3.0000000000000004 and not 3.
    "product of products": lambda m, h: h[:, : math.floor(h.shape[1] * 0.1 * 5)],
}
FLOAT_LENGTHS = (7, 9, 12, 5, 16, 11)


@pytest.mark.parametrize("name", FLOATS)
def test_two_graphs_run_all_sizes_that_come_to_floats(name: str) -> None:
    assert graphs_of(FLOATS[name], FLOAT_LENGTHS) == 2


@pytest.mark.parametrize("name", FLOATS_BY_CONDITION)
def test_a_comparison_of_a_float_is_a_condition(name: str) -> None:
    assert graphs_of(FLOATS_BY_CONDITION[name], FLOAT_LENGTHS) == 3


@pytest.mark.parametrize("name", BOUND_FLOATS)
def test_a_float_that_cannot_be_followed_has_a_graph_for_each_size(name: str) -> None:
    assert graphs_of(BOUND_FLOATS[name], (7, 9, 12, 9)) == 3


def test_a_condition_holds_where_python_says_so() -> None:
    """1.1 * 3 is more than 3.3 in floats."""
    assert graphs_of(lambda m, h: h * 2 if h.shape[1] * 1.1 > 3.3 else h, (9, 7, 3, 2, 5)) == 3


def test_a_float_that_comes_to_a_plain_number_for_one_batch_is_a_number_there() -> None:
    traced = fxpipe.trace(Model(function=FLOATS["size / 2"]), (torch.randn(4, 7, D),))
    assert [node.args[1] for node in traced.nodes if "div" in node.name] == [3.5]


def test_a_mean_by_the_number_of_samples_as_a_float_is_that_of_the_mini_batch() -> None:
    model = Model(function=lambda m, h: h.sum((1, 2)).sum() / float(len(h)))
    model.last = nn.Identity()
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu"], 2, example_args=(torch.randn(4, 5, D),), progress=False) as pipe:
        for samples in (4, 7, 2, 12):
            x = torch.randn(samples, 5, D)
            torch.testing.assert_close(pipe(x), plain(x))


# -- sizes that runs show, and other graphs ---------------------------------------------------------------------------


def goes_by_what_nothing_sees(m: Any, h: torch.Tensor) -> torch.Tensor:
    """At a threshold far beyond the first sizes."""
    return h * 2 if h[0, -1].data_ptr() - h[0, 0].data_ptr() > 50 * D * h.element_size() else h


@fxpipe.leaf
def clipped(x: torch.Tensor) -> torch.Tensor:
    return x[:, :50]


@fxpipe.leaf
def steps_of_five(x: torch.Tensor) -> torch.Tensor:
    return x[:, : [2, 3, 5, 8, 13, 21, 34][x.shape[1] // 5]]


@pytest.mark.parametrize(
    ("function", "lengths", "graphs"),
    [
        pytest.param(goes_by_what_nothing_sees, (7, 12, 9, 60, 8, 60), 3, id="far beyond those compared"),
        pytest.param(
            lambda m, h: clipped(h) * (2 if clipped(h).shape[1] == 50 else 1), (7, 12, 9, 55, 8, 50, 52), 5,
            id="a run shows it beyond those seen",
        ),
        pytest.param(lambda m, h: steps_of_five(h), (7, 12, 5, 12), 3, id="no formula"),
        pytest.param(ANY_SIZE["plainly"], (7, 12, 1, 2, 9), 3, id="one"),
    ],
)  # fmt: skip
def test_a_size_for_which_the_graph_does_not_hold_has_its_own(
    function: Function, lengths: Sequence[int], graphs: int
) -> None:
    assert graphs_of(function, lengths) == graphs


def test_two_dimensions_that_are_equal_by_chance_are_two() -> None:
    class Images(Layered, first=lambda: nn.Conv2d(3, D, 3, 2, 1), second=lambda: nn.Conv2d(D, 3, 3, padding=1)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.interpolate(torch.relu(self.first(x)), scale_factor=2, mode="nearest")
            return self.second(h[..., : x.shape[-2], : x.shape[-1]]) + x

    sizes = ((16, 16), (12, 12), (16, 12), (20, 9), (7, 30))
    assert assert_trains(Images(), [torch.randn(4, 3, *size) for size in sizes], evaluates=True) <= 3


@pytest.mark.anywhere
def test_sizes_and_the_number_of_samples_change_together() -> None:
    torch.manual_seed(1)
    batches = [torch.randn(n, length, D) for n, length in ((4, 7), (6, 12), (2, 5), (4, 16), (7, 9), (3, 4))]
    assert assert_trains(Model(function=causal_mask), batches, evaluates=True) == 2


def pipe_of(model: Any, *example: torch.Tensor, **options: Any) -> Any:
    return fxpipe.pipeline(model, workers(2), 2, example_args=example or (torch.randn(4, 7, D),), **options)


def assert_outputs(pipe: Any, plain: nn.Module, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(on_cpu(pipe(*inputs)), plain(*inputs))


@pytest.mark.anywhere
def test_a_condition_on_samples_and_size_is_that_of_the_mini_batch() -> None:
    """As in the plain model, also where the micro-batches alone would go another way."""
    plain = copy.deepcopy(model := Model(function=lambda m, h: h * 2 if h.shape[0] * h.shape[1] > 30 else h))
    with pipe_of(model, torch.randn(4, 40, D)) as pipe:
        for length in (50, 45, 33, 20, 10, 6, 9):
            assert_outputs(pipe, plain, torch.randn(4, length, D))


@pytest.mark.anywhere
def test_a_mask_of_another_length_is_the_models_own_error() -> None:
    class Masked(Layered, first=D, last=D):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) * mask[..., None])

    plain = copy.deepcopy(model := Masked())
    with pipe_of(model, torch.randn(4, 7, D), torch.ones(4, 7)) as pipe:
        for length in (9, 12, 5):
            assert_outputs(pipe, plain, torch.randn(4, length, D), torch.ones(4, length))
        assert len(pipe._fxpipe.graphs) == 2
        with pytest.raises(RuntimeError, match="must match the size"):
            pipe(torch.randn(4, 9, D), torch.ones(4, 8))
        assert_outputs(pipe, plain, torch.randn(4, 5, D), torch.ones(4, 5))


class Biased(Layered, first=D, last=D):
    """Its second input has no samples."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x) @ x.mT + bias).softmax(-1) @ x)


BOTH = {"x": {0: "batch", 1: "length"}, "bias": {0: "length", 1: "length"}}


@pytest.mark.parametrize(("shapes", "graphs"), [(None, 2), (BOTH, 1)], ids=["found", "named"])
def test_an_input_without_samples_may_be_of_each_length(shapes: Any, graphs: int) -> None:
    plain = copy.deepcopy(model := Biased())
    with pipe_of(model, torch.randn(4, 7, D), torch.randn(7, 7), dynamic_shapes=shapes) as pipe:
        for samples, length in ((4, 9), (4, 4), (5, 12), (2, 5)):  # four of them are as many as the samples
            assert_outputs(pipe, plain, torch.randn(samples, length, D), torch.randn(length, length))
        assert len(pipe._fxpipe.graphs) == graphs


def test_formulas_that_take_torch_too_long_leave_a_graph_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.tracing.shapes.symbolic_run.PATIENCE", 0.0)
    with pipe_of(Model(function=ANY_SIZE["plainly"])) as pipe:
        for length in (6, 8, 6):
            pipe(torch.randn(4, length, D))
        assert len(pipe._fxpipe.graphs) == 3
        assert any("torch takes too long to follow it" in why for why in pipe.plan.why)


def bucket(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h / (next(least for least in range(40, -1, -2) if h.shape[1] >= least) + 1)


@pytest.mark.parametrize(
    ("function", "step", "message"),
    [
        (loop_over_positions, 1, "differ only in sizes of inputs, .* dimension 1 of x"),
        (bucket, 2, "differ only in sizes .* concludes something else .*test_dynamic_sizes"),
    ],
)
def test_many_graphs_for_sizes_are_warned_of_once(function: Function, step: int, message: str) -> None:
    lengths = iter(range(2, 50, step))
    with pipe_of(Model(function=function), torch.randn(4, next(lengths), D)) as pipe:
        for _ in range(9 - step):  # those of the second size hold also for the first one, if it is a condition
            pipe(torch.randn(4, next(lengths), D))
        with pytest.warns(UserWarning, match=message):
            pipe(torch.randn(4, next(lengths), D))
        pipe(torch.randn(4, next(lengths), D))
        if function is loop_over_positions:
            assert any("dimension 1 of x" in why and "plain number" in why for why in pipe.plan.why)


@pytest.mark.anywhere
def test_a_loss_in_the_model_is_that_of_the_mini_batch_at_every_size() -> None:
    plain = copy.deepcopy(model := WithLoss())

    with pipe_of(model, *ids_and_labels(4, 7)) as pipe:
        for length in (7, 12, 5, 16, 9):
            batch = ids_and_labels(4, length)
            want, have = plain(*batch), on_cpu(pipe(*batch))
            torch.testing.assert_close(have, want)
            for one, output in ((plain, want), (pipe, have)):
                one.zero_grad()
                output["loss"].backward()
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
    assert graphs_of(causal_mask, LENGTHS[:4], dynamic_shapes=dynamic_shapes) == 1


def test_a_size_beyond_those_allowed_is_refused() -> None:
    model = Model(function=ANY_SIZE["plainly"])
    shapes = {"x": {0: Dim("batch", min=2, max=8), 1: Dim("length", min=4, max=20)}}
    with pipe_of(model, dynamic_shapes=shapes) as pipe:
        for samples, length in ((8, 7), (3, 5), (2, 9), (4, 20)):
            assert_outputs(pipe, model, torch.randn(samples, length, D))
        for place, samples, length, allowed in ((0, 1, 7, "2 to 8"), (0, 9, 7, "2 to 8"), (1, 4, 21, "4 to 20")):
            size = (samples, length)[place]
            with pytest.raises(
                ArgumentError, match=f"x has size {size} in dimension {place}; dynamic_shapes allows {allowed}"
            ):
                pipe(torch.randn(samples, length, D))
        assert_outputs(pipe, model, torch.randn(4, 5, D))
        assert len(pipe._fxpipe.graphs) == 1


def test_a_static_dimension_has_a_graph_for_each_size() -> None:
    model = Model(function=ANY_SIZE["plainly"])
    with pipe_of(model, dynamic_shapes={"x": {1: Dim.STATIC}}) as pipe:
        for length in (7, 9, 12, 9):
            assert_outputs(pipe, model, torch.randn(4, length, D))
        assert len(pipe._fxpipe.graphs) == 3
        reasons = pipe._fxpipe.graphs[-1][0].traced.why
        assert reasons == ("dimension 1 of x has one graph for each size: dynamic_shapes says that it is static",)


@pytest.mark.parametrize(
    ("dynamic_shapes", "options", "message"),
    [
        ({"y": {1: "length"}}, {}, "names 'y', which is no tensor input"),
        ({"x": {5: "length"}}, {}, "dimension 5 for x"),
        ({"x": {1: 0.5}}, {}, "is 0.5; expected a name"),
        ({"x": 1}, {}, "expected a dict from dimensions"),
        ([LENGTH], {}, "expected a dict from the names of inputs"),
        ({"x": {1: "same", 2: "same"}}, {}, "gives both the name 'same'"),
        ({"x": {0: "same", 1: "same"}}, {}, "no input has a batch dimension"),
        ({"x": {0: "same", 1: "same"}}, {"in_dims": 0}, "dimension 1 of x the name 'same', .* of the samples in x"),
        ({"x": {2: "width"}}, {}, "dimension 2 of x, which cannot vary: its size is fixed by"),
    ],
)
def test_what_cannot_be_dynamic_is_refused(dynamic_shapes: Any, options: Any, message: str) -> None:
    with pytest.raises(FxpipeError, match=message):
        pipe_of(Model(function=ANY_SIZE["plainly"]), torch.randn(7, 7, D), dynamic_shapes=dynamic_shapes, **options)


def test_a_loop_over_a_size_that_is_said_to_be_dynamic_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dimension 1 of x, which cannot vary: .*plain number"):
        pipe_of(Model(function=loop_over_positions), dynamic_shapes=LENGTH)


class Skipping(Layered, first=D, second=D, third=D, last=D, norm=lambda: nn.BatchNorm1d(D)):
    """Batch norm, and a value that skips stages."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x) + torch.arange(x.shape[1])[:, None]
        return self.last(self.third(torch.relu(self.second(self.norm(skip.mT).mT))) + skip)


@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [
        ("gpipe", "never"),
        ("1f1b", "always"),
        ("interleaved_1f1b", "except_last"),
        pytest.param("zero_bubble", "always", marks=pytest.mark.anywhere),
        ("zero_bubble_2p", "never"),
        pytest.param("zbv", "except_last", marks=pytest.mark.anywhere),
    ],
)
def test_schedules_run_any_size(schedule: str, checkpoint: str) -> None:
    def check(pipe: Any) -> None:
        assert pipe.plan.portals

    options: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint, "stages_per_device": 2}
    batches = batches_of((5, 9, 4), samples=5)  # the last one is of no recording
    assert assert_trains(Skipping(), batches, check=check, hardware="cpu", **options) == 2
