"""Losses that a model takes itself: how those of micro-batches go together is found from the graph."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.devices import workers
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError

CLASSES, LENGTH, IGNORED = 7, 6, -100


class OwnLoss(nn.Module):
    """A language model that takes its loss itself."""

    def __init__(self, loss):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.loss = loss
        self.register_buffer("weights", torch.linspace(0.5, 2, CLASSES))

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.mix(self.embed(ids))))
        return {"logits": logits, "loss": self.loss(self, logits, labels)}


def entropy(y, t, **options):
    return F.cross_entropy(y.transpose(1, 2), t, **options)


def masked_mean(_, y, t):
    mask = t != IGNORED
    return (entropy(y, t, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def normalised_weights(_, y, t):
    """A factor that all samples share stands inside of the sum."""
    mask = t != IGNORED
    return (entropy(y, t, reduction="none") * mask / mask.sum()).sum()


def chosen(_, y, t):
    return entropy(y, t, reduction="none")[t != IGNORED].mean()


def chosen_logits(_, y, t):
    return F.cross_entropy(y[t != IGNORED], t[t != IGNORED])


def added_in_place(_, y, t):
    loss = entropy(y, t)
    loss += 0.1 * y.square().mean()
    return loss


def mean_of_each_sample(_, y, t):
    """A mean over samples, whatever counts in each."""
    return (entropy(y, t, reduction="none").sum(1) / ((t != IGNORED).sum(1) + 1)).mean()


def of_time_major_samples(_, y, t):
    """A mean over time steps, which come first: a sum over samples."""
    chances = F.one_hot(t.clamp(min=0), CLASSES).double()
    return F.kl_div(y.log_softmax(-1).transpose(0, 1), chances.transpose(0, 1), reduction="batchmean")


AFFINE = {
    "a mean over tokens that count": lambda _, y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    "with weights of classes": lambda m, y, t: entropy(y, t, weight=m.weights),
    "smoothed, with weights": lambda m, y, t: entropy(y, t, label_smoothing=0.1, weight=m.weights),
    "a sum over a mask's": masked_mean,
    "weights that add up to 1": normalised_weights,
    "chosen losses": lambda _, y, t: entropy(y, t, reduction="none")[t != IGNORED].mean(),
    "chosen logits": lambda _, y, t: F.cross_entropy(y[t != IGNORED], t[t != IGNORED]),
    "two terms": lambda _, y, t: entropy(y, t) + 0.1 * y.square().mean(),
    "two counts": lambda _, y, t: entropy(y, t) + 0.5 * entropy(y[:, :4], t[:, :4]),
    "added in place": added_in_place,
    "a penalty": lambda m, y, t: entropy(y, t) + 0.01 * sum(p.square().sum() for p in m.parameters()),
    "a sum over a number": lambda _, y, t: entropy(y, t, reduction="sum") / 37,
    "each sample's mean": mean_of_each_sample,
    "of time-major samples": of_time_major_samples,
}


def router(_, y, t):
    """The loss that balances experts: a product of two means over all tokens."""
    chances = y.softmax(-1)
    fractions = F.one_hot(chances.argmax(-1), CLASSES).double().mean((0, 1))
    return entropy(y, t) + 0.1 * CLASSES * (fractions * chances.mean((0, 1))).sum()


def chosen_by_value(_, y, t):
    losses = entropy(y, t, reduction="none")
    return losses[losses > 1].mean()


OTHER = {
    "a router's": router,
    "perplexity": lambda _, y, t: entropy(y, t).exp(),
    "a count of hidden values": chosen_by_value,
    "a square of a mean": lambda _, y, t: y.mean().square() + entropy(y, t),
}


def labels(batch: int, seed: int) -> torch.Tensor:
    """Each row has another number that counts."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, CLASSES, (batch, LENGTH), generator=generator)
    for row in found:
        row[int(torch.randint(1, LENGTH + 1, (), generator=generator)) :] = IGNORED
    return found


def batches():
    """Other ones than that it was planned on: of another size, and with a micro-batch in which nothing counts."""
    for seed, batch in enumerate((6, 7, 6), 1):
        target = labels(batch, seed)
        if seed == 3:
            target[:2] = IGNORED
        yield torch.randint(0, CLASSES, (batch, LENGTH)), target


def pair(loss, **options):
    torch.manual_seed(0)
    plain = copy.deepcopy(model := OwnLoss(loss).double())
    example = torch.randint(0, CLASSES, (6, LENGTH)), labels(6, 0)
    return plain, fxpipe.pipeline(model, workers(2), 3, example_args=example, **options)


def assert_trained(pipe, plain, have, want, exact=1e-8):
    torch.testing.assert_close(have.detach().cpu(), want.detach(), rtol=exact, atol=exact)
    for (name, p), q in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        have = p.grad.cpu()
        torch.testing.assert_close(have, q.grad, rtol=exact, atol=exact, msg=lambda m, name=name: f"{name}: {m}")


def assert_step(pipe, plain, *inputs, interleaved: bool):
    for model in (pipe, plain):
        model.zero_grad()
    want = plain(*inputs)["loss"]
    want.backward()
    if interleaved:
        have = pipe.forward_backward(*inputs, loss_fn=lambda out: out["loss"])
    else:
        have = pipe(*inputs)["loss"]
        have.backward()
    assert_trained(pipe, plain, have, want)


# Each way in which a loss is put together, once.
ON_DEVICES = ("a mean over tokens that count", "with weights of classes", "two counts", next(iter(OTHER)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.anywhere if name in ON_DEVICES else ()) for name in (*AFFINE, *OTHER)]
)
def test_a_models_loss_is_that_of_the_mini_batch(name):
    """In evaluation, in the drop-in and in `forward_backward`."""
    plain, pipe = pair((AFFINE | OTHER)[name])
    with pipe:
        for ids, target in batches():
            with torch.no_grad():
                have, want = pipe(ids, target), plain(ids, target)
                torch.testing.assert_close(have["loss"].cpu(), want["loss"], rtol=1e-10, atol=1e-12)
            for interleaved in (False, True):
                assert_step(pipe, plain, ids, target, interleaved=interleaved)


def own_loss(out):
    return out["loss"]


@pytest.mark.parametrize(
    ("name", "loss_fn", "reduction", "options"),
    [
        ("two counts", lambda out: out["loss"] / 4 + out["logits"].square().mean(), "mean", {}),
        ("two terms", own_loss, "mean", {}),
        ("a sum over a number", own_loss, "sum", {}),
        ("a penalty", own_loss, "sum", {}),
        ("two counts", own_loss, "mean", {"schedule": "zero_bubble", "checkpoint": "always"}),
    ],
)
def test_forward_backward_goes_on_with_it_under_either_reduction(name, loss_fn, reduction, options):
    plain, pipe = pair(AFFINE[name], **options)
    with pipe:
        for ids, target in batches():
            for model in (pipe, plain):
                model.zero_grad()
            output = plain(ids, target)
            want = loss_fn(output)
            want.backward()
            have, out = pipe.forward_backward(ids, target, loss_fn=loss_fn, reduction=reduction, return_outputs=True)
            assert_trained(pipe, plain, have, want)
            torch.testing.assert_close(out["loss"], output["loss"].detach())


class Metrics(Layered, lin=(4, 3)):
    """Two losses, a rate and a count beside each other."""

    def forward(self, x, t):
        y = self.lin(x)
        right = y.argmax(-1) == t
        return F.cross_entropy(y, t), y.square().mean(), right.double().mean(), right.sum(), y.mean(0)


def test_metrics_beside_the_loss():
    plain = Metrics().double()
    x, t = torch.randn(7, 4).double(), torch.tensor([0, 1, -100, 2, -100, -100, 1])
    with fxpipe.pipeline(copy.deepcopy(plain), ["cpu"], 3, example_args=(x[:6], t[:6])) as pipe, torch.no_grad():
        for have, want in zip(pipe(x, t), plain(x, t), strict=True):
            torch.testing.assert_close(have, want)


def test_a_loss_in_few_digits_is_summed_in_more():
    """The sum over tokens would overflow where the mean does not."""
    plain, pipe = pair(lambda _, y, t: 3e4 * entropy(y.half() * 2, t).half())
    with pipe, torch.no_grad():
        ids, target = next(batches())
        assert plain(ids, target)["loss"].isfinite()
        torch.testing.assert_close(pipe(ids, target)["loss"], plain(ids, target)["loss"])


# -- out_dims by field -----------------------------------------------------------------------------------------------


def test_one_field_may_be_told_and_the_others_are_found():
    example = torch.randint(0, CLASSES, (6, LENGTH)), labels(6, 0)
    traced = fxpipe.trace(OwnLoss(AFFINE["two terms"]), example, out_dims={"loss": "sum"})
    assert traced.out_dims == (0, "sum")
    with pytest.raises(ArgumentError, match="it has no 'lost', but 'logits', 'loss'"):
        fxpipe.trace(OwnLoss(AFFINE["two terms"]), example, out_dims={"lost": "sum"})


def test_a_loss_that_adds_up_is_known_as_a_sum():
    """So the backward of a micro-batch does not wait for the outputs of the others."""
    example = torch.randint(0, CLASSES, (6, LENGTH)), labels(6, 0)
    assert fxpipe.trace(OwnLoss(of_time_major_samples), example).out_dims == (0, "sum")


class Counted(OwnLoss):
    """As models of transformers, to which the Trainer gives `num_items_in_batch`."""

    def forward(self, ids, labels, count):
        output = super().forward(ids, labels)
        return output | {"loss": output["loss"] / count}


@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_sum_over_a_count_that_the_trainer_gives(as_tensor):
    """A mean would be a third of it."""
    model = Counted(AFFINE["a sum over a number"]).double()
    plain, ((ids, target), *_) = copy.deepcopy(model), batches()
    count = (target != IGNORED).sum()
    inputs = (ids, target, count if as_tensor else int(count))
    with fxpipe.pipeline(model, workers(2), 3, example_args=inputs) as pipe:
        for interleaved in (False, True):
            assert_step(pipe, plain, *inputs, interleaved=interleaved)


# -- where the graph does not tell -----------------------------------------------------------------------------------


@fxpipe.leaf
def hidden(y, t):
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


def written_part(_, y, t):
    parts = torch.zeros(2)
    parts[0] = entropy(y, t)
    return parts[0] + parts[1]


# Where nothing is padding each of these is a mean over samples, or a sum; elsewhere it is neither.
MIXED = {
    "weights over their sum": lambda _, y, t: (entropy(y, t, reduction="none") * ((t >= 0) / (t >= 0).sum())).sum(),
    "weights over the largest": lambda _, y, t: (
        entropy(y, t, reduction="none").mean(1) * (counts(t) / counts(t).max())
    ).mean(),
    "a target over a mean": lambda _, y, t: F.mse_loss(y.mean((1, 2)), counts(t) / counts(t).mean()),
    "the largest so far": lambda _, y, t: (y.mean((1, 2)) * counts(t).cummax(0)[0]).mean(),
    "a function kept whole": lambda _, y, t: hidden(y, t),
    "a value that is written to": written_part,
    "an unknown sum": lambda _, y, t: torch.einsum("blc,bl->", y, (t >= 0).float()) / (t >= 0).sum(),
}


def counts(t):
    return (t != IGNORED).sum(1).float()


def added_to_zeros(_, y, t):
    loss = torch.zeros(())
    loss.add_(entropy(y, t))
    loss.add_(y.mean())
    return loss


def written_to_zeros(_, y, t):
    loss = torch.zeros(len(y))
    loss[:] = entropy(y, t, reduction="none").mean(1)
    return loss.mean()


def chosen_soft_targets(_, y, t):
    mask = t != IGNORED
    return F.cross_entropy(y[mask], F.one_hot(t[mask], CLASSES).float() * 0.9 + 0.01)


def margins(_, y, t):
    return F.triplet_margin_loss(y[:, 0], y[:, 1], y[:, 2]) + F.multi_margin_loss(y[:, 0], t[:, 0].clamp(min=0))


EVEN = {
    "added to zeros": added_to_zeros,
    "written to zeros": written_to_zeros,
    "weighted errors": lambda _, y, t: F.mse_loss(y.mean(2), t.float(), weight=(t != IGNORED).float()),
    "chosen soft targets": chosen_soft_targets,
    "variances": lambda _, y, t: F.gaussian_nll_loss(y.mean((1, 2)), counts(t), y.std((1, 2))),
    "margins": margins,
}


@pytest.mark.parametrize("name", [*MIXED, *EVEN])
def test_losses_planned_without_padding_are_right_with_it(name):
    """The example has no padding, and values of the example say nothing of other batches."""
    even = torch.randint(0, CLASSES, (6, LENGTH)), torch.randint(0, CLASSES, (6, LENGTH))
    plain = copy.deepcopy(model := OwnLoss((MIXED | EVEN)[name]))
    with fxpipe.pipeline(model, ["cpu"], 3, example_args=even) as pipe:
        for batch in (6, 7):
            given = torch.randint(0, CLASSES, (batch, LENGTH)), labels(batch, 1)
            have, want = pipe(*given)["loss"], plain(*given)["loss"]
            torch.testing.assert_close(have, want)
            have.backward()
            want.backward()
            for own, its in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(own.grad, its.grad, rtol=1e-4, atol=1e-6)


def test_a_function_kept_whole_is_a_mean_over_micro_batches_where_the_user_says_so():
    model = OwnLoss(lambda _, y, t: hidden(y, t))
    even = torch.randint(0, CLASSES, (6, LENGTH)), torch.randint(0, CLASSES, (6, LENGTH))
    pipe = fxpipe.pipeline(model, ["cpu"], 3, example_args=even, out_dims={"loss": "mean"})
    with pipe, torch.no_grad():
        parts = [model(*part)["loss"] for part in zip(even[0].chunk(3), labels(6, 1).chunk(3), strict=True)]
        torch.testing.assert_close(pipe(even[0], labels(6, 1))["loss"], sum(parts) / 3)


def test_a_count_of_what_is_drawn_is_known_behind_the_draw_alone():
    def loss(_, y, t):
        kept = torch.rand_like(t.double()) < 0.5
        return ((y.sum(-1) * 0 + 1) * kept).sum() / kept.sum()

    _, pipe = pair(loss)
    with pipe:
        for given in batches():
            torch.testing.assert_close(pipe(*given)["loss"].item(), 1.0)
            loss = pipe.forward_backward(*given, loss_fn=lambda out: out["loss"])
            torch.testing.assert_close(loss.item(), 1.0)
