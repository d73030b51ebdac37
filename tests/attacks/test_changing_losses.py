"""Losses that change between steps, and padding that comes later: the loss of the mini-batch, or a `LossError`.

A way is a generator of (loss_fn, target) for each step; pipe and plain model each run one of their own.
"""

import copy
import types
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.errors import LossError

WIDTH, LENGTH, CLASSES = 3, 4, 5
MEAN, SUM = "mean", "sum"


def values(batch=8):
    return torch.linspace(-1, 2, batch * CLASSES, dtype=torch.double).reshape(batch, CLASSES)


def labels(lengths=(1,) * 8):
    """Class numbers, of which only those of the first `lengths[i]` places of sample i count; others are -100."""
    targets = torch.arange(len(lengths) * LENGTH).reshape(-1, LENGTH) % CLASSES
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = -100
    return targets


def rooted(y, t):
    """A loss of all samples together."""
    return F.mse_loss(y, t).sqrt()


# -- what the loss depends on changes --------------------------------------------------------------------------------


class Trainer:
    def __init__(self):
        self.criterion, self.steps, self.alpha = nn.MSELoss(), 0, 0.0

    def loss(self, y, t):
        return self.criterion(y, t)


def one_function_all_along():
    trainer = Trainer()
    loss_fn = trainer.loss
    for reduction in (MEAN, MEAN, SUM):
        trainer.criterion.reduction = reduction
        yield loss_fn, values()


def list_that_grows():
    trainer, terms = Trainer(), []

    def loss_fn(y, t):
        trainer.log.append(F.mse_loss(y, t).item())
        return F.mse_loss(y, t) + sum(term(y, t) for term in terms)

    trainer.log = []
    for count in (0, 0, 0, 1):
        terms += [rooted] * count
        yield loss_fn, values()


def module_in_a_module():
    module = nn.Module()
    module.inner = nn.ModuleList([nn.MSELoss()])
    module.forward = lambda y, t: module.inner[0](y, t)
    for reduction in (MEAN, SUM):
        module.inner[0].reduction = reduction
        yield module, values()


def patched_forward():
    module = nn.MSELoss()
    yield module, values()
    module.forward = rooted
    yield module, values()


def patched_class():
    class Own(nn.Module):
        def forward(self, y, t):
            return F.mse_loss(y, t)

    own = Own()
    yield own, values()
    Own.forward = lambda self, y, t: rooted(y, t)
    yield own, values()


@dataclass
class Weighted:
    alpha: float = 0.0
    steps: int = 0

    def __call__(self, y, t):
        return F.mse_loss(y, t) + self.alpha * F.mse_loss(y, t).sqrt()


def term_that_comes_later():
    weighted = Weighted()
    for alpha in (0.0, 0.0, 0.5):
        weighted.alpha = alpha
        yield weighted, values()


def temperature():
    trainer = Trainer()

    def loss_fn(y, t):
        return (F.mse_loss(y, t, reduction="none") * trainer.alpha).exp().mean().log() / trainer.alpha

    for trainer.alpha in (1e-9, 1.0):
        yield loss_fn, values()


def counter():
    trainer = Trainer()

    def loss_fn(y, t):
        return F.mse_loss(y, t) if trainer.steps < 3 else rooted(y, t)

    for trainer.steps in range(5):
        yield loss_fn, values()


def tokens(criterion):
    return lambda y, t: criterion(y.unsqueeze(-1).expand(*y.shape, LENGTH), t)


def ignored_class():
    criterion = nn.CrossEntropyLoss()
    loss_fn = tokens(criterion)
    for ignored in (-100, -100, 1):
        criterion.ignore_index = ignored
        yield loss_fn, labels((4, 4, 4, 4, 3, 3, 4, 4)).clamp(min=0)


def class_weight():
    criterion = nn.CrossEntropyLoss()
    loss_fn = tokens(criterion)
    for weight in (None, torch.arange(CLASSES).double()):
        criterion.weight = weight
        yield loss_fn, labels((4,) * 8)


def a_criterion_that_stays_right():
    trainer = Trainer()
    for criterion in (nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.MSELoss()):
        trainer.criterion = criterion
        yield lambda y, t: trainer.criterion(y, t), values()


def name_that_is_never_assigned():
    def loss_fn(y, t):
        return F.mse_loss(y, t) if y is not None else later

    yield loss_fn, values()
    yield loss_fn, values()
    later = None


# -- padding and empty micro-batches come later ----------------------------------------------------------------------

EVEN, FEW, NONE = (2,) * 8, (1, 4, 2, 3, 4, 4, 1, 1), (2, 2, 2, 2, 2, 2, 0, 0)
ONE, ONE_AND_NONE = (1, 0) * 4, (1, 0, 0, 1, 1, 0, 0, 0)


def padding(loss, *lengths):
    """Steps whose samples have these lengths, with a loss of the tokens' losses and a mask of those that count."""

    def of_tokens(y, t):
        return loss(F.cross_entropy(y.unsqueeze(-1).expand(*y.shape, LENGTH), t, reduction="none"), t != -100)

    return lambda: ((of_tokens, labels(some)) for some in lengths)


def constant_zero(losses, mask):
    return losses[mask].mean() if mask.any() else torch.zeros((), dtype=losses.dtype)


PADDED = {
    "nanmean": padding(lambda losses, mask: losses.where(mask, torch.nan).nanmean(), EVEN, FEW),
    "times zero": padding(lambda losses, mask: losses[mask].mean() if mask.any() else losses.sum() * 0, EVEN, NONE),
    "constant zero": padding(constant_zero, EVEN, NONE),
    "zero by zero": padding(lambda losses, mask: (losses * mask).sum() / mask.sum(), EVEN, NONE),
    "at least one": padding(lambda losses, mask: (losses * mask).sum() / mask.sum().clamp(min=1), ONE, ONE_AND_NONE),
    "pair": padding(lambda losses, mask: ((losses * mask).sum(), mask.sum()), EVEN, NONE, FEW),
    "with epsilon": padding(lambda losses, mask: (losses * mask).sum() / (mask.sum() + 1e-8), EVEN, NONE),
    "mean over samples": padding(lambda losses, mask: (losses * mask).sum(1).mean(), EVEN, FEW, NONE),
}


# -- micro-batches of other sizes ------------------------------------------------------------------------------------


def last_batch_divided_by_two():
    for batch in (8, 8, 5):
        yield lambda y, t: (y - t).square().mean(1).sum() / max(len(y), 2), values(batch)


def last_batch_of_single_samples():
    def loss_fn(y, t):
        return F.mse_loss(y, t) if len(y) != 1 else F.mse_loss(y, t, reduction=SUM)

    for batch in (8, 5):
        yield loss_fn, values(batch)


def last_batch_of_a_mean():
    for batch in (8, 5, 3, 8, 7):
        yield F.mse_loss, values(batch)


WAYS = {
    way.__name__: way
    for way in (
        one_function_all_along, list_that_grows, module_in_a_module, patched_forward, patched_class,
        term_that_comes_later, temperature, counter, ignored_class, class_weight, a_criterion_that_stays_right,
        name_that_is_never_assigned, last_batch_divided_by_two, last_batch_of_single_samples, last_batch_of_a_mean,
    )
} | PADDED  # fmt: skip
RIGHT = {
    "a_criterion_that_stays_right", "name_that_is_never_assigned", "last_batch_of_a_mean", "pair", "mean over samples",
}  # fmt: skip


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


@pytest.fixture(scope="module")
def pipe():
    options = {"progress": False, "check": False, "hardware": "cpu", "balance": ["1"], "schedule": "pipedream_2bw"}
    example = (torch.ones(8, WIDTH).double(),)
    with fxpipe.pipeline(model(), ["cpu"] * 2, 4, example_args=example, **options) as made:
        made.forward_backward(*example, loss_fn=torch.mean)  # its workers are not those of the first test that uses it
        yield made


def assert_right_or_refused(pipe, way):
    """Returns whether all steps ran."""
    plain, ours, theirs = copy.deepcopy(fxpipe.unwrap(pipe)), way(), way()
    for model in (pipe, plain):
        model.zero_grad()
    while (step := next(ours, None)) is not None:
        loss_fn, target = step
        x = torch.linspace(-1, 1, len(target) * WIDTH, dtype=torch.double).reshape(-1, WIDTH)
        before = [p.grad if p.grad is None else p.grad.clone() for p in pipe.parameters()]
        try:
            have = pipe.forward_backward(x, target=target, loss_fn=loss_fn)
        except LossError:
            for p, gradient in zip(pipe.parameters(), before, strict=True):
                assert p.grad is gradient is None or torch.equal(p.grad, gradient)
            return False
        loss_fn, target = next(theirs)
        want = loss_fn(plain(x), target)
        want = want[0] / want[1] if isinstance(want, tuple) else want
        want.backward()
        torch.testing.assert_close(have, want.detach())
        for (name, p), q in zip(plain.named_parameters(), pipe.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=lambda m, name=name: f"{name}: {m}")
    return True


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_changes_is_right_or_refused(way, pipe):
    assert assert_right_or_refused(pipe, WAYS[way]) or way not in RIGHT


# -- a step and a stream say the same --------------------------------------------------------------------------------


def dropped_token_mean(y, t):
    losses = F.dropout(F.cross_entropy(y.unsqueeze(-1).expand(*y.shape, LENGTH), t, reduction="none"), 0.1)
    return losses.sum() / (t != -100).sum()


def dropped_mean(y, t):
    return F.dropout(F.cross_entropy(y.unsqueeze(-1).expand(*y.shape, LENGTH), t, reduction="none"), 0.1).mean()


def noisy_root(y, t):
    return F.cross_entropy(y + 0.1 * torch.randn_like(y), t[:, 0]).sqrt()


def token_mean(y, t):
    return F.cross_entropy(y.unsqueeze(-1).expand(*y.shape, LENGTH), t)


@pytest.mark.parametrize("lengths", [EVEN, FEW])
@pytest.mark.parametrize("loss_fn", [dropped_token_mean, dropped_mean, noisy_root, token_mean])
@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_a_stream_accepts_and_refuses_the_same_losses_as_a_step(loss_fn, lengths, reduction, pipe):
    x, target, accepted = torch.ones(8, WIDTH).double(), labels(lengths), []
    optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.0)

    def step(loss_fn):
        pipe.forward_backward(x, target=target, loss_fn=loss_fn, reduction=reduction)

    def stream(loss_fn):
        return list(pipe.train_stream([(x, target)], loss_fn=loss_fn, optimizer=optimizer, reduction=reduction))

    for run in (step, stream):
        pipe.zero_grad()
        try:
            run(types.FunctionType(loss_fn.__code__.replace(co_name=run.__name__), globals()))  # known to none of them
            accepted.append(True)
        except LossError:
            accepted.append(False)
    assert accepted[0] == accepted[1]
    assert not (accepted[0] and loss_fn is dropped_token_mean and lengths is FEW)
