"""`forward_backward(micro_batches=...)`: a step is a loop of the plain model over the same micro-batches."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.devices import on_cpu, workers
from helpers.layered import Layered
from helpers.models import WithLoss, ids_and_labels
from helpers.oracle import accumulate_gradients, assert_same_gradients, assert_same_state, draw_seed
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, ArgumentTypeError, LossError

D = 8
# Samples and length of each micro-batch, step by step.
STEPS = (((2, 7), (3, 12), (2, 5)), ((4, 9),), ((1, 16), (2, 3), (2, 4), (3, 40), (1, 7)), ((2, 7), (2, 7)))


class Plain(Layered, first=D, second=D, last=D):
    """Holds for any length."""

    is_random = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.relu(self.second(h)) + h)


class Normed(Plain, norm=lambda: nn.BatchNorm1d(D)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)))


class Branching(Normed):
    """Another graph for long micro-batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(self.second(h) * 2 if x.shape[1] > 8 else h)


class Loop(Normed):
    """Another graph for each length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, states = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            h = torch.tanh(self.first(x[:, position]) + h)
            states.append(h)
        return self.last(self.norm(torch.stack(states, 1).transpose(1, 2)).transpose(1, 2))


class Dropped(Plain):
    is_random = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.second(F.dropout(self.first(x), 0.3))), 0.5))


class Reading(Plain):
    """Asks for values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.second(h) if x[0, 0, 0] > 0 else h)


def batches_of(sizes: Sequence[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(samples, length, D), torch.randn(samples, length, D)) for samples, length in sizes]


def assert_steps(
    model: Any, steps: Sequence[Sequence[tuple[int, int]]] = STEPS, *, exact: bool = True, **options: Any
) -> int:
    """Losses, outputs, gradients and buffers of each step are those of the loop. Returns how many graphs they took."""
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    with fxpipe.pipeline(model, workers(2), **options) as pipe:
        for sizes in steps:
            micro_batches = batches_of(sizes)
            for one in (plain, pipe):
                one.zero_grad()
            state = torch.get_rng_state()
            loss, outputs = pipe.forward_backward(
                micro_batches=iter(micro_batches), loss_fn=F.mse_loss, return_outputs=True
            )
            torch.set_rng_state(state)
            want, wanted = accumulate_gradients(plain, micro_batches, F.mse_loss, seed=draw_seed(model.is_random))
            torch.testing.assert_close(on_cpu(loss), want)
            for ours, theirs in zip(on_cpu(outputs), wanted, strict=True):
                torch.testing.assert_close(ours, theirs)
            names = [name for name, _ in plain.named_parameters()]
            assert_same_gradients(pipe, plain, loose=[] if exact else names)
            assert_same_state(pipe, plain, exact=exact)
        return len(pipe._fxpipe.graphs)


SHORT_STEPS = (((2, 3), (3, 5), (1, 2)), ((2, 4),), ((2, 5), (2, 3), (2, 4)))


@pytest.mark.parametrize(
    ("kind", "steps", "graphs"),
    [
        (Plain, STEPS, 2),
        (Normed, STEPS, 2),
        pytest.param(Branching, STEPS, 3, marks=pytest.mark.anywhere),
        pytest.param(Reading, STEPS, 3, marks=pytest.mark.anywhere),
        (Dropped, STEPS, 2),
        pytest.param(Loop, SHORT_STEPS, 4, marks=pytest.mark.anywhere),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_numbers_and_sizes_change_from_step_to_step(kind: type[Any], steps: Any, graphs: int) -> None:
    """Micro-batches of one step may even be of several graphs, whose buffers they hand on in their order."""
    assert assert_steps(kind(), steps, exact=kind is not Loop) == graphs  # whose weight is in both stages


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(Branching, {"schedule": "gpipe", "checkpoint": "always"}, marks=pytest.mark.anywhere),
        (Dropped, {"schedule": "1f1b", "checkpoint": "except_last"}),
        (Branching, {"schedule": "zero_bubble"}),
        (Dropped, {"schedule": "zero_bubble", "checkpoint": ["always", "never"]}),
        (Dropped, {"schedule": "interleaved_1f1b"}),
        # Otherwise a cut of so few nodes might leave the shorter graph none for a stage.
        pytest.param(
            Branching, {"schedule": "zbv", "balance": ["first", "norm", "second"]}, marks=pytest.mark.anywhere
        ),
    ],
    ids=str,
)
def test_schedules_run_any_number_of_micro_batches(kind: type[Any], options: dict[str, Any]) -> None:
    assert_steps(kind(), (STEPS[0], STEPS[1], STEPS[2]), exact=False, **options)


def test_a_table_of_ones_own_runs_no_more_micro_batches_than_it_has() -> None:
    table = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    with fxpipe.pipeline(Plain(), workers(2), schedule=table) as pipe:
        for count in (2, 1):
            pipe.forward_backward(micro_batches=batches_of([(2, 7)] * count), loss_fn=F.mse_loss)
            assert len(pipe.last_step.actions) == 4 * count
        with pytest.raises(ArgumentError, match="table for 2 micro-batches, but there are 3"):
            pipe.forward_backward(micro_batches=batches_of([(2, 7)] * 3), loss_fn=F.mse_loss)


def test_the_plan_is_one_of_such_micro_batches() -> None:
    with fxpipe.pipeline(Plain(), workers(2)) as pipe:
        pipe.forward_backward(micro_batches=batches_of([(2, 5), (4, 7), (3, 6)]), loss_fn=F.mse_loss)
        assert (pipe.plan.chunks, pipe.plan.micro_batch, pipe.plan.batch) == (3, 4, 12)
    with fxpipe.pipeline(Plain(), workers(2), chunks=8) as pipe:
        pipe.forward_backward(micro_batches=batches_of([(2, 5), (4, 7), (3, 6)]), loss_fn=F.mse_loss)
        assert (pipe.plan.chunks, pipe.plan.micro_batch, pipe.plan.batch) == (8, 4, 32)
        pipe.forward_backward(torch.randn(16, 7, D), target=torch.randn(16, 7, D), loss_fn=F.mse_loss)
        assert len(pipe.last_step.actions) == 32


@pytest.mark.anywhere
def test_micro_batches_and_mini_batches_take_turns() -> None:
    plain = copy.deepcopy(model := Normed())
    with fxpipe.pipeline(model, workers(2), chunks=2) as pipe:
        for _ in range(2):
            for one in (plain, pipe):
                one.zero_grad()
            micro_batches = batches_of([(2, 7), (3, 9)])
            pipe.forward_backward(micro_batches=micro_batches, loss_fn=F.mse_loss)
            accumulate_gradients(plain, micro_batches, F.mse_loss)
            x, target = batches_of([(4, 6)])[0]
            pipe.forward_backward(x, target=target, loss_fn=F.mse_loss)
            accumulate_gradients(plain, [*zip(x.tensor_split(2), target.tensor_split(2), strict=True)], F.mse_loss)
            assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
            assert_same_state(pipe, plain)


# -- Losses -----------------------------------------------------------------------------------------------------------


def tokens_of(sizes: Sequence[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Some of the targets do not count."""
    xs = [torch.randn(samples, length, D) for samples, length in sizes]
    return [(x, torch.randint(0, D, x.shape[:2]).masked_fill(torch.rand(x.shape[:2]) < 0.4, -100)) for x in xs]


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 256.0), ("sum", 1.0)])
def test_losses_are_means_over_samples_or_sums(reduction: str, scale: float) -> None:
    """A power of two scales without rounding."""
    model = Plain()
    plain, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu", init_scale=scale)
    with fxpipe.pipeline(model, workers(2)) as pipe:
        micro_batches = batches_of(STEPS[0])
        have = pipe.forward_backward(
            micro_batches=micro_batches, loss_fn=F.mse_loss, reduction=reduction, grad_scaler=scaler
        )
        want, _ = accumulate_gradients(plain, micro_batches, F.mse_loss, reduction=reduction, scale=scale)
        torch.testing.assert_close(on_cpu(have), want)
        assert_same_gradients(pipe, plain)


def with_labels(sizes: Sequence[tuple[int, int]]) -> list[tuple[tuple[torch.Tensor, torch.Tensor], None]]:
    return [(ids_and_labels(*size), None) for size in sizes]


def weighted(plain: nn.Module, micro_batches: Any) -> torch.Tensor:
    pairs = [token_loss(plain(x), target) for x, target in micro_batches]
    return sum(total for total, _ in pairs) / sum(count for _, count in pairs)


def of_samples(plain: nn.Module, micro_batches: Any) -> torch.Tensor:
    samples = sum(len(ids) for (ids, _), _ in micro_batches)
    return sum(plain(*inputs)["loss"] * (len(inputs[0]) / samples) for inputs, _ in micro_batches)


@pytest.mark.anywhere
@pytest.mark.parametrize(
    ("kind", "make", "loss_fn", "loss_of"),
    [
        pytest.param(Plain, tokens_of, token_loss, weighted, id="weights of loss_fn"),
        pytest.param(WithLoss, with_labels, lambda output: output["loss"], of_samples, id="the model's own"),
    ],
)
def test_losses_are_weighted_by_what_loss_fn_returns_or_by_samples(
    kind: Any, make: Any, loss_fn: Any, loss_of: Any
) -> None:
    plain = copy.deepcopy(model := kind())
    with fxpipe.pipeline(model, workers(2)) as pipe:
        for sizes in STEPS:
            micro_batches = make(sizes)
            for one in (plain, pipe):
                one.zero_grad()
            have, outputs = pipe.forward_backward(micro_batches=micro_batches, loss_fn=loss_fn, return_outputs=True)
            want = loss_of(plain, micro_batches)
            want.backward()
            torch.testing.assert_close(on_cpu(have), want.detach())
            assert len(outputs) == len(sizes)
            assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])


# -- What forward leaves behind, and what it is given -----------------------------------------------------------------


@pytest.mark.anywhere
def test_deferred_batch_norm_is_that_of_all_micro_batches() -> None:
    class NormedFirst(Normed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x.transpose(1, 2)).transpose(1, 2)
            return self.last(self.second(h) * 2 if x.shape[1] > 8 else h)

    model = NormedFirst()
    norm = copy.deepcopy(model.norm)
    with fxpipe.pipeline(model, workers(2), deferred_batch_norm=True) as pipe:
        for sizes in STEPS:
            micro_batches = batches_of(sizes)
            pipe.forward_backward(micro_batches=micro_batches, loss_fn=F.mse_loss)
            norm(torch.cat([x.flatten(0, 1) for x, _ in micro_batches]))
            assert_same_state(model.norm, norm, exact=False)


@pytest.mark.anywhere
def test_inputs_that_require_grad_get_theirs() -> None:
    class Prompted(Plain):
        def forward(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.cat([prompt.expand(len(x), -1, -1), x], 1))

    plain = copy.deepcopy(model := Prompted())
    leaves = {name: [torch.randn(*shape, D).requires_grad_() for shape in ((2, 7), (3, 4), (1, 1))] for name in "ab"}
    for ours, theirs in zip(*leaves.values(), strict=True):
        ours.data.copy_(theirs.data)
    options: dict[str, Any] = {"in_dims": {"x": 0, "prompt": None}}
    with fxpipe.pipeline(model, workers(2), **options) as pipe:
        *xs, prompt = leaves["a"]
        calls = [((x * 2, prompt), None) for x in xs]
        pipe.forward_backward(micro_batches=calls, loss_fn=lambda y: y.square().mean())
    *xs, prompt = leaves["b"]
    for x in xs:
        (plain(x * 2, prompt).square().mean() * (len(x) / 5)).backward()
    for ours, theirs in zip(*leaves.values(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert_same_gradients(model, plain)


class Writing(Plain):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        state += h.detach().mean(1)
        self.left = h.detach()
        return self.last(h + state[:, None])


@pytest.mark.anywhere
def test_what_forward_writes_to_inputs_and_leaves_in_attributes_is_the_loops() -> None:
    plain = copy.deepcopy(model := Writing())
    with fxpipe.pipeline(model, workers(2)) as pipe:
        for sizes in STEPS:
            xs = [x for x, _ in batches_of(sizes)]
            states = [torch.randn(len(x), D) for x in xs]
            ours = [state.clone() for state in states]
            pipe.forward_backward(
                micro_batches=[((x, state), None) for x, state in zip(xs, ours, strict=True)],
                loss_fn=lambda y: y.square().mean(),
            )
            for x, state in zip(xs, states, strict=True):
                (plain(x, state).square().mean() * (len(x) / sum(map(len, xs)))).backward()
            torch.testing.assert_close(ours, states)
            torch.testing.assert_close(model.left.cpu(), plain.left)
            assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])


def test_memory_that_forward_writes_to_and_another_micro_batch_reads_is_refused() -> None:
    state = torch.zeros(2, D)
    calls = [((torch.randn(2, length, D), state), None) for length in (3, 4)]
    with (
        fxpipe.pipeline(Writing(), workers(2)) as pipe,
        pytest.raises(ArgumentError, match=r"the input state .* overlaps with that of state of micro-batch 1"),
    ):
        pipe.forward_backward(micro_batches=calls, loss_fn=lambda y: y.square().mean())


@pytest.mark.anywhere
def test_structure_and_dtype_may_differ() -> None:
    class Optional(Layered, embedding=lambda: nn.Embedding(20, D), last=D):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            h = self.embedding(ids)
            return self.last(h if mask is None else h * mask[..., None])

    torch.manual_seed(0)
    plain = copy.deepcopy(model := Optional())
    ids = [torch.randint(0, 20, (2, length)) for length in (5, 7, 3, 3)]
    inputs: list[Any] = [
        {"ids": ids[0]},
        (ids[1].int(), torch.rand(2, 7)),
        ids[2],
        {"ids": ids[3], "mask": torch.rand(2, 3)},
    ]
    calls = [(x, torch.randn(2, ids[i].shape[1], D)) for i, x in enumerate(inputs)]
    with fxpipe.pipeline(model, workers(2)) as pipe:
        have = pipe.forward_backward(micro_batches=calls, loss_fn=F.mse_loss)
    want = 0
    for x, target in calls:
        output = plain(**x) if isinstance(x, dict) else plain(*x) if isinstance(x, tuple) else plain(x)
        loss = F.mse_loss(output, target) / 4
        loss.backward()
        want = want + loss.detach()
    torch.testing.assert_close(on_cpu(have), want)
    assert_same_gradients(model, plain)


# -- Errors: clear ones, and nothing is changed -----------------------------------------------------------------------


class StopData(Exception):
    pass


def failing_iterator() -> Iterator[Any]:
    yield from batches_of(STEPS[0])
    raise StopData("no more data")


def loss_that_fails(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if y.shape[1] == 12:
        raise RuntimeError("not this one")
    return F.mse_loss(y, target)


X, T = batches_of([(2, 7)])[0]


@pytest.mark.parametrize(
    ("micro_batches", "error", "message", "options"),
    [
        ([], ArgumentError, "micro_batches is empty", {}),
        (failing_iterator, StopData, "no more data", {}),
        ([(X, T), (X, T, T)], ArgumentTypeError, "micro-batch 1 is a tuple of 3", {}),
        ([(X, T), X], ArgumentError, "micro-batch 1 has no target", {}),
        ([(X, T), (X[:0], T[:0])], ArgumentError, "hold no samples", {}),
        ([(X, T), (X.to("meta"), T)], ArgumentError, "have no values", {}),
        pytest.param(
            [(X, T), (X[..., :3], T)], RuntimeError, "shapes cannot be multiplied", {}, marks=pytest.mark.anywhere
        ),
        ([(X, T), ((X, X), T)], TypeError, "forward", {}),
        ([(X, T), (X, T[:, :3])], RuntimeError, "must match the size", {}),
        pytest.param(
            batches_of(STEPS[0]), RuntimeError, "not this one", {"loss_fn": loss_that_fails}, marks=pytest.mark.anywhere
        ),
        (batches_of(STEPS[0]), ArgumentError, "inputs or a target beside them", {"x": X}),
        (batches_of(STEPS[0]), LossError, "0-dim", {"loss_fn": lambda y, t: y - t}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_bad_micro_batches_change_nothing(
    micro_batches: Any, error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    model = Normed()
    with fxpipe.pipeline(model, workers(2), example_args=(torch.randn(4, 7, D),), chunks=2) as pipe:
        pipe.forward_backward(micro_batches=batches_of(STEPS[1]), loss_fn=F.mse_loss)
        before = copy.deepcopy(model)
        for copied, parameter in zip(before.parameters(), model.parameters(), strict=True):
            copied.grad = None if parameter.grad is None else parameter.grad.clone()
        if callable(micro_batches):
            micro_batches = micro_batches()
        with pytest.raises(error, match=message) as raised:
            pipe.forward_backward(micro_batches=micro_batches, **{"loss_fn": F.mse_loss, **options})
        assert_same_gradients(model, before)
        assert_same_state(model, before)
        pipe.forward_backward(micro_batches=batches_of(STEPS[0]), loss_fn=F.mse_loss)
        assert not any(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))
        if error in (RuntimeError, TypeError):
            assert any("micro-batch" in note for note in raised.value.__notes__)


def test_the_iterator_may_use_the_pipe() -> None:
    """Labels of its own making, say: it is read before the step begins."""
    with fxpipe.pipeline(Plain(), workers(2), example_args=(torch.randn(4, 7, D),), chunks=2) as pipe:

        def labelled() -> Iterator[Any]:
            for x, _ in batches_of(STEPS[1] * 2):
                with torch.no_grad():
                    yield x, pipe(x)

        loss = pipe.forward_backward(micro_batches=labelled(), loss_fn=F.mse_loss)
        assert loss == 0
