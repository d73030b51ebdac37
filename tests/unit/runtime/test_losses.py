"""`forward_backward` and losses of every kind: the oracle is `loss_fn(model(x), target).backward()` in plain torch."""

import copy
import functools
import math
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.oracle import assert_same_gradients, assert_same_state, closing
from torch import nn
from torch.autograd.graph import GradientEdge

import fxpipe
from fxpipe.errors import LossError
from fxpipe.runtime.loss_checks import LossHistory, LossReduction, LossWeightingCheck, reductions_under
from fxpipe.utils.accelerator import generator_lock

IGNORED = -100
WIDTH, CLASSES, LENGTH = 6, 5, 4


class Tokens(nn.Module):
    """Logits of tokens, (b, length, classes)."""

    def __init__(self, zero_head: bool = False):
        super().__init__()
        self.embed, self.mix = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        if zero_head:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids)).tanh())


class OwnLoss(Tokens):
    """As language models do: the loss is a mean over the labels that count."""

    def forward(self, ids, labels=None):
        logits = super().forward(ids)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tokens(batch: int = 8) -> torch.Tensor:
    return torch.randint(0, CLASSES, (batch, LENGTH))


def padded(batch: int = 8, lengths: Any = None) -> torch.Tensor:
    """Labels of which each row has another number that count."""
    labels = tokens(batch)
    for row, length in zip(labels, lengths or [1 + i % LENGTH for i in range(batch)], strict=True):
        row[length:] = IGNORED
    return labels


def token_mean(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def masked_mean(logits, labels):
    mask = labels != IGNORED
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return (losses * mask.flatten()).sum() / mask.sum()


def selected_mean(logits, labels):
    mask = labels != IGNORED
    return F.cross_entropy(logits[mask], labels[mask], reduction="none").mean()


def token_sum(weight):
    """(total, weight), the weight made by `weight` of the number of labels."""

    def loss_fn(logits, labels):
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, weight((labels != IGNORED).sum())

    return loss_fn


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def pipe_of(model: nn.Module, chunks: int = 4, **options: Any) -> Any:
    return closing(fxpipe.pipeline(model, ["cpu", "cpu"], chunks, **options))


def assert_equal_step(pipe, plain, args, target, ours, theirs, exact=1e-10, **options):
    """A step of both, from the gradients they have."""
    want = theirs(plain(*args), target) if target is not None else theirs(plain(*args))
    want.backward()
    have = pipe.forward_backward(*args, target=target, loss_fn=ours, **options)
    torch.testing.assert_close(have, want.detach(), equal_nan=True)
    assert not have.requires_grad
    for (name, p), q in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(
                p.grad, q[1].grad, rtol=exact, atol=exact, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
            )


# -- (total, weight) -------------------------------------------------------------------------------------------------

WEIGHTS: dict[str, Any] = {
    "int tensor": lambda n: n,
    "int32": lambda n: n.int(),
    "float tensor": lambda n: n.double(),
    "half": lambda n: n.half(),
    "int": int,
    "float": float,
    "large": lambda n: n * 2.0**40,
    "small": lambda n: float(n) / 2**40,
}


class TwoRoots(Layered, inner=(3, 1)):
    """A mean over samples, though what is summed counts otherwise in each micro-batch."""

    def forward(self, x):
        return (self.inner(x) / x.shape[0] ** 0.5).sum() / x.shape[0] ** 0.5


def test_what_is_summed_may_be_divided_by_numbers_of_its_own():
    plain, x = TwoRoots(), torch.randn(5, 3)
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu", "cpu"], 2, example_args=(x,)) as pipe:
        for run in (lambda: pipe(x).backward(), lambda: pipe.forward_backward(x)):
            for model in (plain, pipe):
                model.zero_grad()
            plain(x).backward()
            run()
            torch.testing.assert_close(pipe.model.inner.weight.grad, plain.inner.weight.grad)


def test_weights_of_every_kind():
    """One micro-batch has nothing that counts."""
    plain = copy.deepcopy(model := Tokens().double())
    with pipe_of(model) as pipe:
        for name, weight in WEIGHTS.items():
            scale = {"large": 2.0**40, "small": 2.0**-40}.get(name, 1.0)
            for batch, lengths in [(8, [4, 1, 0, 0, 3, 2, 1, 1]), (7, [0, 0, 4, 3, 2, 2, 2]), (3, None)]:
                for m in (model, plain):
                    m.zero_grad()
                ids, labels = tokens(batch), padded(batch, lengths)
                theirs = lambda y, t, scale=scale: token_mean(y, t) / scale  # noqa: E731
                assert_equal_step(pipe, plain, (ids,), labels, token_sum(weight), theirs)


def test_where_nothing_counts_it_is_as_in_torch():
    """The loss is NaN, the gradients are zeros."""
    plain = copy.deepcopy(model := Tokens().double())
    ids, labels = tokens(), torch.full((8, LENGTH), IGNORED)
    want = token_mean(plain(ids), labels)
    want.backward()
    assert want.isnan()
    with pipe_of(model) as pipe:
        for weight in (lambda n: n, int, float):
            pipe.zero_grad()
            assert pipe.forward_backward(ids, target=labels, loss_fn=token_sum(weight)).isnan()
            assert_same_gradients(pipe, plain)


def test_weights_do_not_overflow_where_the_mean_does_not():
    """In half precision a gradient of a sum over 2**20 would."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    plain, x = copy.deepcopy(model), torch.randn(8, 4).half()
    F.mse_loss(plain(x).float(), x.float()).backward()
    with pipe_of(model) as pipe:
        for weight in (2**20, torch.tensor(2**20), 2.0**20):

            def loss_fn(y, t, weight=weight):
                return (y.float() - t.float()).pow(2).mean() * weight, weight

            pipe.zero_grad()
            pipe.forward_backward(x, target=x, loss_fn=loss_fn)
            for p, q in zip(pipe.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-3)


BAD_WEIGHTS = {
    r"weight.*requires grad.*detach.*drop-in": lambda y: y.exp().mean(),
    r"tensor of shape \(2,\) as weight.*number or a 0-dim": lambda y: torch.ones(2),
    r"NoneType as weight": lambda y: None,
    r"str as weight": lambda y: "3",
    r"tensor of shape \(\) as weight": lambda y: torch.tensor(1j),
}


def test_weights_that_are_none():
    with pipe_of(Tokens()) as pipe:
        for words, weight in BAD_WEIGHTS.items():
            with pytest.raises(LossError, match=words):
                pipe.forward_backward(tokens(), loss_fn=lambda y, weight=weight: (y.mean(), weight(y)))
        assert all(p.grad is None for p in pipe.parameters())


def test_padding_is_noticed_when_it_comes():
    """Symptom: the loss was compared in its first step only, and means over tokens that came later were wrong."""
    model = Tokens()
    with pipe_of(model) as pipe:
        for loss_fn in (token_mean, masked_mean, selected_mean):
            for _ in range(2):
                pipe.forward_backward(tokens(), target=tokens(), loss_fn=loss_fn)
            for p in pipe.parameters():
                p.grad = torch.ones_like(p)
            for _ in range(2):
                with pytest.raises(LossError, match=r"no mean over samples.*\(total, weight\).*drop-in"):
                    pipe.forward_backward(tokens(), target=padded(), loss_fn=loss_fn)
            assert all(torch.equal(p.grad, torch.ones_like(p)) for p in pipe.parameters())
            even = padded(8, [2, 3] * 4)  # as many in each micro-batch
            pipe.forward_backward(tokens(), target=even, loss_fn=loss_fn)


def test_a_head_of_zeros_does_not_hide_a_mean_over_tokens():
    """Every token has the same loss then, however they are weighed; only gradients tell."""
    table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])

    def weighted(logits, labels):  # of a kind that nothing but the comparison can see
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses * (table[labels] / table[labels].sum())).flatten().dot(torch.ones(labels.numel()))

    with pipe_of(Tokens(zero_head=True)) as pipe:
        with pytest.raises(LossError, match=r"same loss.*gradients.*no mean over samples.*\(total, weight\)"):
            pipe.forward_backward(tokens(), target=tokens(), loss_fn=weighted)
        assert all(p.grad is None for p in pipe.parameters())


def _contrastive(z, t):
    return F.cross_entropy(z.flatten(1) @ z.flatten(1).t(), torch.arange(len(z)))


def _dice(z, t):
    p, t = z.sigmoid(), t.sigmoid()
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def test_losses_of_all_samples_at_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before, x = copy.deepcopy(model), torch.randn(8, 4)
    with pipe_of(model) as pipe:
        for loss_fn in (_contrastive, _dice, lambda z, t: F.mse_loss(z, t).sqrt()):
            pipe.train()
            before.train()
            for reduction in ("mean", "sum"):
                with pytest.raises(LossError, match=r"loss_fn\(pipe\(x\), target\)\.backward\(\)"):
                    pipe.forward_backward(x, target=x, loss_fn=loss_fn, reduction=reduction)
            assert_same_state(pipe, before)
            assert all(p.grad is None for p in pipe.parameters())
            loss_fn(pipe.eval()(x), x).backward()  # without the statistics of micro-batches
            loss_fn(before.eval()(x), x).backward()
            assert_same_gradients(pipe, before, [n for n, _ in before.named_parameters()])
            for m in (pipe, before):
                m.zero_grad()


def test_a_sum_that_is_a_mean_under_another_name():
    with pipe_of(small()) as pipe:
        x = torch.randn(8, 4)
        pipe.forward_backward(x, target=x, loss_fn=lambda y, t: (y - t).pow(2).sum() / len(y))
        with pytest.raises(LossError, match="no weighted mean"):
            pipe.forward_backward(x, target=x, loss_fn=lambda y, t: ((y - t).pow(2).mean(), len(y)))


def by_sample(logits, labels):
    return sum(token_mean(y[None], t[None]) for y, t in zip(logits, labels, strict=True)) / len(labels)


def test_a_step_that_is_run_again_to_verify_draws_the_same_numbers():
    """One sample in each micro-batch: padding looks wrong in the second step, which is run again, and is right."""
    model, ids, labels, seen = Tokens(), tokens(4), padded(4), []
    model.mix = nn.Sequential(nn.Dropout(0.5), model.mix)

    def loss_fn(logits, labels):
        seen.append(logits.detach())
        return by_sample(logits, labels)

    with pipe_of(model) as pipe:
        pipe.forward_backward(ids, target=tokens(4), loss_fn=loss_fn)
        seen.clear()
        torch.manual_seed(3)
        loss = pipe.forward_backward(ids, target=labels, loss_fn=loss_fn)
        state = torch.get_rng_state()
        first, again, whole = seen[:4], seen[4:8], seen[8]
        assert len(seen) == 9
        assert torch.equal(torch.cat(first), torch.cat(again))
        torch.testing.assert_close(torch.cat(first), whole)
        torch.testing.assert_close(loss, by_sample(whole, labels))
        torch.manual_seed(3)
        torch.randint(2**62, ())
        assert torch.equal(torch.get_rng_state(), state)
        seen.clear()
        pipe.forward_backward(ids, target=labels, loss_fn=loss_fn)
        assert len(seen) == 4  # it is known to be right now


def test_when_it_is_verified():
    kind, due = LossHistory(is_cheap=False), []
    for n in range(1, 1001):
        if kind.is_due:
            due.append(n)
            assert kind.look_at_elements
        kind.count_pass()
    assert due == [1, 10, 100, 1000]
    assert not kind.look_at_elements
    assert LossHistory(is_cheap=True, passes=5).look_at_elements


def test_outputs_are_kept_in_verified_steps_only():
    with pipe_of(small()) as pipe:
        x, alive, most = torch.randn(12, 4), weakref.WeakSet(), []

        def loss_fn(y, t):
            if len(y) == 3:
                storage = y.untyped_storage()
                alive.add(storage)
                most[-1] = max(most[-1], len(alive))
            return F.mse_loss(y, t)

        for _ in range(11):
            most.append(0)
            pipe.forward_backward(x, target=x, loss_fn=loss_fn)
    assert most[0] == most[9] == 4
    assert max(most[1:9] + most[10:]) <= 2


def test_a_target_that_loss_fn_changes():
    """The loss of the whole is taken of the target as it was."""

    def loss_fn(y, t):
        return F.mse_loss(y, t.sub_(1))

    model, x = small().double(), torch.randn(8, 4).double()
    plain, ours, theirs = copy.deepcopy(model), x.clone(), x.clone()
    with pipe_of(model) as pipe:
        for _ in range(2):
            want = loss_fn(plain(x), theirs)
            torch.testing.assert_close(pipe.forward_backward(x, target=ours, loss_fn=loss_fn), want.detach())
            assert torch.equal(ours, theirs)


def _twice(y, t):
    return F.mse_loss(y, torch.zeros_like(y)) * 2 + y.sum() / 3


@pytest.mark.parametrize(
    ("loss", "want"),
    [
        (lambda y, t: token_mean(y, t), [("NllLossBackward0", 20)]),
        (masked_mean, [("SumBackward0", 1)]),
        (selected_mean, [("MeanBackward0", 20)]),
        (_twice, [("MseLossBackward0", 160), ("SumBackward0", 1)]),
        (lambda y, t: F.l1_loss(y, torch.zeros_like(y), reduction="sum"), [("SumBackward0", 1)]),
        (lambda y, t: y.mean((1, 2)).mean(0), [("MeanBackward1", 8)]),
        (lambda y, t: y.flatten().dot(y.flatten()), []),
        (lambda y, t: sum((y.mean() for _ in range(99)), y.sum()), []),
    ],
)  # fmt: skip
def test_the_head_of_a_loss(loss, want):
    y = (torch.randn(8, LENGTH, CLASSES, requires_grad=True)) * 1
    labels = padded()
    assert (labels != IGNORED).sum() == 20
    value = loss(y, labels)
    found = reductions_under(value.grad_fn, value.output_nr)
    assert [(r.edge.node.name(), int(r.count)) for r in found] == want


def _own(out):
    return out["loss"]


def _weighed(out, labels):
    n = (labels != IGNORED).sum()
    return out["loss"] * n, n


@pytest.mark.parametrize("out_dims", ["mean", {"loss": "mean", "logits": 0}], ids=["one", "tree"])
def test_a_models_own_loss_of_which_the_user_has_said_how_it_goes_together(out_dims):
    """It was an error in the drop-in: the mean over samples of means over tokens may well be what is wanted."""
    plain = copy.deepcopy(model := OwnLoss().double())
    with pipe_of(model, 2, out_dims=out_dims) as pipe:
        ids, labels = tokens(), padded()
        parts = [plain(*part)["loss"] for part in zip(ids.chunk(2), labels.chunk(2), strict=True)]
        (sum(parts) / 2).backward()
        out = pipe(ids, labels)
        out["loss"].backward()
        torch.testing.assert_close(out["loss"], sum(parts) / 2)
        torch.testing.assert_close(out["logits"], plain(ids)["logits"])
        assert_same_gradients(pipe, plain, [n for n, _ in plain.named_parameters()])
        (sum(plain(*part)["loss"] for part in zip(ids.chunk(2), labels.chunk(2), strict=True)) / 2).backward()
        pipe.forward_backward(ids, labels, loss_fn=_own)
        assert_same_gradients(pipe, plain, [n for n, _ in plain.named_parameters()])
        assert_equal_step(pipe, plain, (ids, labels), labels, _weighed, lambda out, t: out["loss"])


def noisy(y, t):
    return F.mse_loss(F.dropout(y, 0.5) + torch.randn_like(y), t)


def with_own_generator(y, t, generator=torch.Generator()):  # noqa: B008
    return F.mse_loss(y + torch.randn(y.shape, generator=generator, dtype=y.dtype), t)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_loss_that_draws_draws_what_a_loop_over_micro_batches_draws(schedule):
    """It was an error: the loss of the whole mini-batch draws other numbers, and so was another one."""
    plain = copy.deepcopy(model := nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double())
    x, target = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    with pipe_of(model, schedule=schedule) as pipe:
        torch.manual_seed(1)
        ours = [pipe.forward_backward(x, target=target, loss_fn=noisy) for _ in range(2)]
        state = torch.get_rng_state()
        torch.manual_seed(1)
        theirs = []
        for _ in range(2):
            losses = [noisy(plain(part), t) / 4 for part, t in zip(x.chunk(4), target.chunk(4), strict=True)]
            sum(losses).backward()
            theirs.append(sum(losses).detach())
        torch.testing.assert_close(ours, theirs)
        assert_same_gradients(pipe, plain, [n for n, _ in plain.named_parameters()])
        assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_that_draws_from_a_generator_of_its_own_and_writes_to_its_target():
    def loss_fn(y, t):
        return with_own_generator(y, t.mul_(0.5))

    with pipe_of(small()) as pipe:
        for _ in range(2):
            pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=loss_fn)


def test_a_loss_that_is_no_mean_is_refused_though_its_model_draws():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with pipe_of(model) as pipe, pytest.raises(LossError, match="it is no mean over samples"):
        pipe.forward_backward(torch.randn(8, 4), target=torch.randn(8, 4), loss_fn=lambda y, t: F.mse_loss(y, t).sqrt())


def test_nobody_borrows_the_generator_while_the_loss_draws():
    """What it drew in that time would be drawn again: a stage that borrows puts the generator back."""
    free, lock = [], generator_lock(torch.device("cpu"))

    def borrow():
        free.append(lock.acquire(blocking=False))
        if free[-1]:
            lock.release()

    def loss_fn(y):
        other = threading.Thread(target=borrow)
        other.start()
        other.join()
        return y.square().mean()

    with pipe_of(small(), 2) as pipe:
        pipe.forward_backward(torch.randn(2, 4), loss_fn=loss_fn)
    assert free[:2] == [False, False]


class Learned(Layered, lin=4, log_scale=lambda: nn.Parameter(torch.zeros(()))):
    """A loss with a weight, and with its own buffer."""

    def forward(self, y, t):
        return F.mse_loss(self.lin(y), t) * torch.exp(-self.log_scale) + self.log_scale


def test_a_loss_module_gets_its_gradients_and_its_hooks_fire_once():
    """Symptom: a hook on a parameter of the loss ran for each micro-batch and once more, on what it had changed."""
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), Learned().double()
    plain, plain_loss = copy.deepcopy((model, loss))
    calls: dict[str, list[str]] = {"ours": [], "theirs": []}
    for name, module in (("ours", loss), ("theirs", plain_loss)):
        module.lin.weight.register_hook(lambda g, name=name: (calls[name].append("hook"), g * 2)[1])
        module.lin.weight.register_post_accumulate_grad_hook(lambda p, name=name: calls[name].append("after"))
    with pipe_of(model) as pipe:
        optimizers = [
            torch.optim.Adam([*m.parameters(), *own.parameters()], lr=0.1)
            for m, own in ((pipe, loss), (plain, plain_loss))
        ]
        for batch in (8, 7, 3):
            x, t = torch.randn(batch, 4).double(), torch.randn(batch, 4).double()
            assert_equal_step(pipe, plain, (x,), t, loss, plain_loss)
            assert calls["ours"] == calls["theirs"]
            for p, q in zip(loss.parameters(), plain_loss.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert calls["ours"] == ["hook", "after"] * 3


def test_a_hook_on_a_parameter_that_the_model_and_the_loss_use_fires_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    plain, calls = copy.deepcopy(model), []
    for m in (model, plain):
        m[0].weight.register_hook(lambda g: (calls.append(1), g * 3)[1])

    def penalised(m):
        return lambda y, t: F.mse_loss(y, t) + 0.1 * m[0].weight.pow(2).sum()

    x = torch.randn(7, 4).double()
    with pipe_of(model) as pipe:
        assert_equal_step(pipe, plain, (x,), x, penalised(model), penalised(plain))
    assert len(calls) == 2


def test_what_was_made_of_a_parameter_before_the_step_belongs_to_all_micro_batches():
    """Symptom: the second micro-batch failed, as the first had freed the graph of exp."""
    model = small().double()
    plain, x = copy.deepcopy(model), torch.randn(8, 4).double()
    ours, theirs = (torch.zeros((), dtype=torch.double, requires_grad=True) for _ in range(2))
    a, b = ours.exp(), theirs.exp()
    with pipe_of(model) as pipe:
        assert_equal_step(pipe, plain, (x,), x, lambda y, t: F.mse_loss(y * a, t), lambda y, t: F.mse_loss(y * b, t))
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_micro_batch_of_padding_adds_nothing(schedule):
    """The plain model takes one loss, which requires grad; a micro-batch may have nothing to take one of."""

    def loss_fn(logits, labels):
        mask = labels != IGNORED
        if not mask.any():
            return torch.zeros((), dtype=logits.dtype), 0
        return F.cross_entropy(logits[mask], labels[mask], reduction="sum"), mask.sum()

    plain = copy.deepcopy(model := Tokens().double())
    with pipe_of(model, schedule=schedule) as pipe:
        for lengths in ([0, 0, 1, 2, 0, 0, 3, 4], [1, 2, 3, 4, 4, 3, 0, 0]):
            assert_equal_step(pipe, plain, (tokens(),), padded(8, lengths), loss_fn, token_mean)
        with pytest.raises(LossError, match="does not require grad"):
            pipe.forward_backward(tokens(), target=padded(8, [0] * 8), loss_fn=loss_fn)


def test_frozen_models():
    x = torch.randn(8, 4)
    with pipe_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)) as pipe:
        with pytest.raises(LossError, match=r"does not require grad.*frozen"):
            pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
        given, loss = x.clone().requires_grad_(), Learned()
        pipe.forward_backward(given, target=x, loss_fn=loss)
        assert given.grad is not None
        assert loss.lin.weight.grad is not None
        loss = Learned()
        pipe.forward_backward(x, target=x, loss_fn=loss)
        assert loss.lin.weight.grad is not None
        assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize("batch", [8, 7])
def test_a_sum_over_samples(batch):
    """Micro-batches count the same, however many samples they have."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain, x, t = copy.deepcopy(model), torch.randn(batch, 4).double(), torch.randn(batch, 2).double()
    loss_fn = functools.partial(F.mse_loss, reduction="sum")
    with pipe_of(model, 3) as pipe:
        for _ in range(2):  # the first is verified
            assert_equal_step(pipe, plain, (x,), t, loss_fn, loss_fn, reduction="sum")


class _Widened(torch.overrides.TorchFunctionMode):
    """The most elements that were held in float64 at once."""

    most = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.most = max(self.most, result.numel())
        return result


def test_to_verify_a_loss_holds_no_gradient_in_float64():
    from fxpipe.runtime.loss_checks import PIECE, _squared_norms

    part = torch.randn(3, PIECE)
    with _Widened() as widened:
        squares = _squared_norms(part, 2 * part, torch.tensor(2.0))
    assert squares[0] == 0
    torch.testing.assert_close(squares[1:], part.double().square().sum().expand(2))
    assert 0 < widened.most <= PIECE


MEAN = SimpleNamespace(name=lambda: "MeanBackward0")


def _difference(gradients, counts, share=lambda i: 1.0, means_only=False, dtype=torch.float32):
    elements = LossWeightingCheck(True, frozenset())
    for i, (gradient, count) in enumerate(zip(gradients, counts, strict=True)):
        found = [LossReduction(GradientEdge(MEAN, 0), count)]
        elements.note("loss", i, found, [torch.tensor(gradient, dtype=dtype)])
    return elements.difference(share, means_only)


def test_elements_that_count_the_same_are_right():
    assert _difference([1.0, 2.0], [4, 8]) is None
    assert _difference([1.0, 1.0 + 5e-6], [4, 4]) is None  # a last bit


@pytest.mark.parametrize("times", [1.001, 1.01, 1.1, 1.25])
def test_a_difference_of_a_thousandth_is_one(times):
    words = _difference([1.0, times], [4, 4])
    assert f"(Mean) that count {times:.3g} times as much in micro-batch 1 as in micro-batch 0" in words


def test_half_precision_has_fewer_digits():
    assert _difference([1.0, 1.02], [4, 4], dtype=torch.bfloat16) is None
    assert _difference([1.0, 1.1], [4, 4], dtype=torch.bfloat16)


def test_a_micro_batch_of_no_elements_that_counts_is_wrong():
    """A mean over none: what it hands on would be shared by nobody."""
    assert "count inf times as much in micro-batch 1" in _difference([1.0, 1.0], [4, 0])
    assert _difference([1.0, 0.0], [4, 0]) is None
    assert _difference([1.0, math.inf], [4, 4]) is None  # an overflow, for a scaler of gradients to see


def test_micro_batches_may_count_by_their_share():
    assert _difference([1.0, 3.0], [4, 4], share=lambda i: (1.0, 3.0)[i]) is None
    assert _difference([1.0, 3.0], [4, 4], share=lambda i: (1.0, 2.0)[i])


def test_sums_may_be_left_out():
    assert _difference([1.0, 3.0], [1, 1])
    assert _difference([1.0, 3.0], [1, 1], means_only=True) is None
    assert _difference([1.0, 3.0], [4, 4], means_only=True)


def test_the_head_of_a_graph():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    loss = 2 * x.mean() + (weight.sum() - 1) * 3
    assert [r.count for r in reductions_under(loss.grad_fn, 0)] == [12, 1]
    assert reductions_under((x.mean() * x).sum().grad_fn, 0)[0].count == 1  # what is beyond a sum is not looked at
