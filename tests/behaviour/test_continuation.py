"""A forward that can be recorded up to some line only goes on as Python, and is the plain model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared_steps import WAYS, assert_trains, refusal_of
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state
from torch import nn
from torch.utils import checkpoint as recompute

import fxpipe
from fxpipe.errors import ArgumentError, FxpipeError, StateError


def samples(scale: float = 1.0) -> torch.Tensor:
    return torch.randn(4, 8) * scale


def calm_and_wild() -> list[torch.Tensor]:
    return [samples(30.0 if step % 2 else 0.1) for step in range(6)]


def untils(plan: Any) -> list[str]:
    return [name for stage in plan.stages for name in stage.nodes if "until" in name]


def check_cut(pipe: Any) -> None:
    assert untils(pipe.plan)


def whole_names(pipe: Any) -> list[str]:
    return [whole.name for whole in pipe.plan.whole]


class Bank(
    Layered,
    encoder=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
    head=8,
    pointer=lambda: torch.zeros(1, dtype=torch.long),
    bank=lambda: torch.randn(5, 8),
):
    """A memory bank whose pointer the model itself reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        slot = int(self.pointer)
        self.bank[slot] = h.detach().mean(0)
        self.pointer[0] = (slot + 1) % 5
        return self.head(h) @ self.bank.clone().t()


class Clamped(Layered, first=8, second=8, third=8):
    """Clamps what has grown, and shares weights of what was called before."""

    def __init__(self) -> None:
        super().__init__()
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        h = self.second(self.first(x)) + x
        if (h.abs() > 10).sum().item() > 0:
            h = h.clamp(-1, 1)
        return self.third(h) + F.linear(h, self.second.weight) + x


class Checked(
    Layered,
    norm=lambda: nn.LayerNorm(8),
    blocks=lambda: nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)),
    calls=lambda: torch.zeros((), dtype=torch.long),
    limit=lambda: torch.full((), 3.0),
):
    """Looks at hidden values between its blocks, and counts in a buffer behind them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, clamped = x, 0
        for block in self.blocks:
            h = block(self.norm(h)) + h
            if (h.abs().max() > self.limit).item():
                h = h.clamp(-3, 3) * 0.5
                clamped += 1
        self.calls += clamped
        return h * (1 + float(self.calls))


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"compile": {"backend": "eager"}}])
def test_a_memory_bank_of_the_model_itself_moves_on(options: dict[str, Any]) -> None:
    def check(pipe: Any) -> None:
        assert "forward of the model behind its call of 'encoder' is kept whole" in pipe.plan.why[0]
        assert whole_names(pipe) == ["forward of the model behind its call of 'encoder'"]
        assert all(stage.parameter_bytes for stage in pipe.plan.stages)

    assert_trains(Bank(), [samples() for _ in range(6)], check=check, out_dims=0, **options)  # of micro-batches


@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"schedule": "zero_bubble"}])
def test_a_forward_that_looks_between_its_blocks_is_cut_between_them(options: dict[str, Any]) -> None:
    def check(pipe: Any) -> None:
        assert len(untils(pipe.plan)) >= 3

    assert max(fxpipe.trace(Checked(), (samples(0.1),)).opaque_shares.values(), default=0.0) < 0.1
    assert_trains(Checked(), calm_and_wild(), check=check, **options)


def test_a_buffer_that_counts_before_the_blocks_keeps_the_rest_in_one_piece() -> None:
    """A stage would need what the last one has made of the micro-batch before."""

    class Counting(Checked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.blocks[0](x)
            self.calls += 1
            if h.abs().max() > float(self.calls):
                h = h * 0.5
            return super().forward(h)

    def check(pipe: Any) -> None:
        assert whole_names(pipe) == ["forward of the model behind its call of 'blocks.0'"]

    assert_trains(Counting(), calm_and_wild(), check=check)


@pytest.mark.filterwarnings("ignore:Drawing changes the buffer 'calls' in evaluation")
def test_random_numbers_are_drawn_once() -> None:
    """A forward that draws between its blocks stays in one piece behind the first of them."""

    class Drawing(Checked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.dropout(self.blocks[0](x), 0.5, self.training)
            if h.abs().max() > 3:
                h = h * 0.5
            for block in self.blocks[1:]:
                h = block(h)
            return h

    torch.manual_seed(0)
    model, batch = Drawing(), samples()
    found = []
    for checkpoint in ("never", "always"):
        one = copy.deepcopy(model)
        with fxpipe.pipeline(one, ["cpu", "cpu"], chunks=2, example_args=(batch,), checkpoint=checkpoint) as pipe:
            assert whole_names(pipe) == ["forward of the model behind its call of 'blocks.0'"]
            torch.manual_seed(1)
            pipe(batch).square().mean().backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name])
    model.eval()
    assert_trains(model, calm_and_wild())


def test_calls_that_depend_on_values_are_an_error_of_the_step() -> None:
    class Routed(Checked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.blocks[0](x)
            h = self.blocks[1](h) if h.abs().max() > 3 else self.blocks[2](h)
            return self.blocks[3](h)

    model = Routed()
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=2, example_args=(samples(0.1),)) as pipe:
        pipe(samples(0.1)).sum().backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with pytest.raises(StateError, match=r"calls 'blocks.1' after 'blocks.0', where it calls 'blocks.2'.*module"):
            pipe(samples(1000.0))
        assert before.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
        pipe(samples(0.1)).sum().backward()


class Twice(Bank):
    """Calls again what was called before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        if h.abs().max() > 3:
            h = h * 0.5
        return self.head(self.encoder(h))


class Pair(Layered, lin=8):
    def forward(self, x: torch.Tensor, *, scale: float) -> dict[str, Any]:
        return {"h": self.lin(x) * scale, "more": (x, None, "text")}


class Structured(Layered, pair=Pair, last=Pair):
    """Hands on results of any structure."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.pair(x, scale=2.0)
        h, (again, nothing, text) = found["h"], found["more"]
        assert (nothing, text) == (None, "text")
        if h.sum() > 0:
            h = -h
        with torch.no_grad():
            teacher = self.last(again, scale=1.0)["h"]
        return self.last(h, scale=3.0)["h"] + teacher


@pytest.mark.parametrize(
    ("kind", "checkpoint"), [(Clamped, "never"), (Clamped, "always"), (Twice, "never"), (Structured, "never")]
)
def test_a_branch_on_hidden_values_goes_either_way(kind: Any, checkpoint: str) -> None:
    assert_trains(kind(), calm_and_wild(), checkpoint=checkpoint)


def test_a_large_module_that_reads_is_recorded_up_to_there() -> None:
    def check(pipe: Any) -> None:
        assert whole_names(pipe) == ["forward of module '0' behind its call of 'encoder'"]

    assert_trains(nn.Sequential(Bank(), nn.Linear(5, 2)), [samples() for _ in range(5)], check=check, out_dims=0)


def test_a_buffer_that_some_step_writes_to_between_the_blocks_is_an_error_of_that_step_and_stays() -> None:
    class Raising(Checked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x
            for block in self.blocks:
                h = block(self.norm(h)) + h
                if (h.abs().max() > self.limit).item():
                    self.limit += 1
                    h = h * 0.5
            return h

    model = Raising()
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=2, example_args=(samples(0.1),)) as pipe:
        assert untils(pipe.plan)
        pipe(samples(0.1)).sum().backward()
        with pytest.raises(FxpipeError, match="writes to 'limit', which it reads before it calls other modules"):
            pipe(samples(1000.0))
        assert model.limit.item() == 3


def test_a_forward_that_writes_to_what_it_was_given_stays_in_one_piece() -> None:
    class InPlace(Checked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.blocks[0](x)
            if h.abs().max() > 3:
                h = h * 0.5
            h += 1
            for block in self.blocks[1:]:
                h = block(h) + h
            return h

    def check(pipe: Any) -> None:
        assert whole_names(pipe) == ["forward of the model behind its call of 'blocks.0'"]
        assert not untils(pipe.plan)

    assert_trains(InPlace(), calm_and_wild(), check=check)


def test_a_module_that_is_called_without_gradients_is_recorded_without_gradients() -> None:
    class Taught(Checked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.blocks[0](x)
            if h.abs().max() > 3:
                h = h * 0.5
            with torch.no_grad():
                teacher = self.blocks[1](h)
            if h.abs().max() > 2:
                h = h - teacher
            return self.blocks[3](self.blocks[2](h)) + teacher

    assert_trains(Taught(), calm_and_wild(), check=check_cut)


class Chosen(Layered, first=4, layers=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(4))):
    """A hidden number says which layer runs; each number of samples gives another one."""

    def forward(self, x):
        h = self.first(x)
        count = torch.nonzero(h.square().sum(-1) > -1).shape[0]
        return self.layers[count % 4](h)


def test_planning_ends_where_python_behind_a_read_runs_other_functions_at_other_sizes():
    with pytest.raises(ArgumentError, match="put together, are not the output of the batch"):
        fxpipe.trace(Chosen(), (torch.randn(6, 4),), chunks=2)


class Experts(
    Layered,
    first=4,
    router=(4, 3),
    last=4,
    experts=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)),
    embedding=lambda: nn.Embedding(3, 4),
):
    """How many rows a small module is given depends on values, and `ids` is used late or not at all."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = self.first(x).flatten(0, 1)
        scores, chosen = self.router(rows).softmax(-1).max(-1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (index,) = torch.where(chosen == number)
            if index.numel():
                mixed.index_add_(0, index, expert(rows[index]) * scores[index, None])
        h = x + mixed.view_as(x)
        return self.last(h + self.embedding(ids) if self.uses_ids else h)


@pytest.mark.parametrize(("seed", "uses_ids"), [(0, False), (1, True)])
def test_sizes_chosen_by_value_do_not_fix_the_batch_of_the_inputs_behind_them(seed: int, uses_ids: bool) -> None:
    torch.manual_seed(seed)
    batches = [(torch.randn(n, 4, 4), torch.randint(0, 3, (n, 4))) for n in (8, 8, 5)]
    assert_trains(Experts(uses_ids=uses_ids), batches)


class Scaled(Layered, layer=4, last=4):
    """A number of the samples is read before the line that makes the rest Python, and used on both sides of it."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        number = int(ids.max())
        h = self.layer(x * number)
        if (h.abs() > 3).sum().item() > 0:
            h = h.clamp(-1, 1)
        return self.last(h) / number


def test_a_number_of_the_samples_is_the_same_on_both_sides_of_what_is_recorded() -> None:
    numbers = (4, 4, 4, 4), (1, 2, 3, 4), (4, 2, 1, 1)
    batches = [(torch.randn(4, 4), torch.tensor(ids)) for ids in numbers]
    assert_trains(Scaled(), batches, out_dims=0)  # the number and the branch are those of a micro-batch


class Recomputing(Layered, first=8, second=8, third=8, last=8):
    """Calls modules inside of checkpoints, before and behind a line that looks at hidden values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x * 1)).exp()
        if (h.abs() > 2.5).sum().item() > 0:
            h = h.clamp(0, 2)
        h = recompute.checkpoint(lambda value: torch.tanh(self.second(value.exp())) * value, h, use_reentrant=False)
        h = recompute.checkpoint(lambda value: self.third(value * 2).sigmoid(), h, use_reentrant=False)
        return self.last(h)


@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}])
def test_checkpoints_around_calls_that_are_recorded_are_calls(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    assert_trains(Recomputing(), calm_and_wild(), check=check_cut, **options)


class Taught(nn.Module):
    """A teacher follows its student: forward writes to parameters without a gradient."""

    def __init__(self, follow: Callable[[Any, Any], Any], is_first: bool, looks: bool = False) -> None:
        super().__init__()
        self.student, self.teacher, self.head = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.teacher.requires_grad_(False)
        self.follow, self.is_first, self.looks = follow, is_first, looks

    @torch.no_grad()
    def teach(self, x: torch.Tensor) -> torch.Tensor:
        taught = None if self.is_first else self.teacher(x)
        for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            self.follow(p, q)
        return self.teacher(x) if taught is None else taught

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.student(x)
        if self.looks and h.detach().max() > 10:
            h = h * 0.5
        return self.head(h) + self.teach(x)


FOLLOWS: list[Callable[[Any, Any], Any]] = [
    lambda p, q: p.mul_(0.9).add_(q, alpha=0.1),
    lambda p, q: p.data.lerp_(q.data, 0.1),
    lambda p, q: setattr(p, "data", p.data * 0.9 + q.data * 0.1),
]


@pytest.mark.filterwarnings("ignore:module '1' is one node")
@pytest.mark.parametrize("number", range(3))
def test_a_teacher_follows_its_student_once_in_a_mini_batch(number: int) -> None:
    batches, follow = calm_and_wild(), FOLLOWS[number]

    def inner(looks: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Taught(follow, True, looks), nn.Linear(8, 8))

    for way in WAYS[:2]:
        assert not refusal_of(lambda: Taught(follow, is_first=False), lambda step: (batches[step],), way)
        assert not refusal_of(lambda: inner(False), lambda step: (batches[step],), way, checkpoint="always")
    assert "changes '1.teacher.0.weight' at" in refusal_of(lambda: inner(True), lambda step: (batches[step],))
    assert_trains(inner(True), batches, chunks=1, checkpoint="always")
    model, x = Taught(follow, is_first=True), samples()
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:  # in each micro-batch of the caller
        pipe.forward_backward(micro_batches=[((x,), {}, None)] * 2, loss_fn=lambda y: y.mean())
    plain(x), plain(x)
    assert_same_state(model, plain, exact=False)


def test_the_vectors_of_spectral_norm_change_once_in_a_mini_batch() -> None:
    x = samples()
    assert not refusal_of(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh()), lambda _: (x,))


class Momentum(Layered, queue=lambda: torch.randn(8, 16), pointer=lambda: torch.zeros(1, dtype=torch.long)):
    """MoCo as published: keys in a queue, of an encoder that starts as a copy of the other and follows it."""

    def __init__(self, follow: Callable[[Any, Any], Any], is_method: bool) -> None:
        super().__init__(follow=follow, is_method=is_method)
        self.queries = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.keys = copy.deepcopy(self.queries).requires_grad_(False)

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        pointer = int(self.pointer)
        assert 16 % len(keys) == 0
        self.queue[:, pointer : pointer + len(keys)] = keys.T
        self.pointer[0] = (pointer + len(keys)) % 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries(x)
        with torch.no_grad():
            for p, q in zip(self.keys.parameters(), self.queries.parameters(), strict=True):
                self.follow(p, q)
            keys = self.keys(x * 2)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone()], 1)
        self.enqueue(keys) if self.is_method else PLAIN_ENQUEUE(self, keys)
        return logits


PLAIN_ENQUEUE = Momentum.enqueue  # no method to fxpipe


@pytest.mark.filterwarnings("ignore:module")
@pytest.mark.parametrize("is_method", [True, False])
@pytest.mark.parametrize("follow", [*FOLLOWS, lambda p, q: p.data.mul_(0.9).add_(q.data, alpha=0.1)])
def test_an_encoder_of_keys_follows_and_its_queue_moves_on(follow: Callable[[Any, Any], Any], is_method: bool) -> None:
    model = Momentum(follow, is_method)
    plain, x = copy.deepcopy(model), torch.randn(8, 8)
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=1, schedule="1f1b", example_args=(x[:4],)) as pipe:
        assert is_method == (whole_names(pipe) == ["enqueue"])
        optimizers = [torch.optim.SGD(one.queries.parameters(), 0.5) for one in (plain, model)]
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            want = sum(plain(part).square().mean() / 2 for part in x.chunk(2))
            want.backward()
            have = pipe.forward_backward(
                micro_batches=[((part,), {}, None) for part in x.chunk(2)], loss_fn=lambda y: y.square().mean()
            )
            torch.testing.assert_close(have, want.detach())
            assert_same_gradients(model, plain, loose=[name for name, _ in plain.named_parameters()])
            assert_same_state(model, plain, exact=False)
            for optimizer in optimizers:
                optimizer.step()
    assert is_method == (not refusal_of(lambda: copy.deepcopy(plain), lambda _: (x,)))  # the rest of forward is no tail


def test_a_teacher_that_is_to_be_trained_as_well_is_refused_and_planning_leaves_it_as_it_was() -> None:
    model, x = Taught(FOLLOWS[0], is_first=True), samples()
    before = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        assert_same_state(model, before)
        with pytest.raises(TypeError):
            pipe.forward_backward(x, loss_fn=lambda y: y + None)
        assert_same_state(model, before)
        model.teacher.requires_grad_(True)
        with pytest.raises(FxpipeError, match=r"the parameter 'teacher.0.weight' at .*\(requires_grad_\(False\)\)"):
            pipe(x)
