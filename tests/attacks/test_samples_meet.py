"""Samples that act on each other, however values hide it at planning; and models that only look as if they did."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import nn
from torch.ao.quantization import default_fused_act_fake_quant

import fxpipe
from fxpipe.errors import ArgumentError

BATCH = 8


class Model(nn.Module):
    """Three maps, and a function of the first one's output that goes into the second."""

    def __init__(self, function, **tensors):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.function = function
        for name, value in tensors.items():
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x, *ids):
        return self.c(self.b(self.function(self, self.a(x), *ids)).relu())


def gate(value):
    return nn.Parameter(torch.as_tensor(value))


def counted(m, h):
    m.steps += 1
    return h + h.flip(0)


def kept_mean(m, h):
    mean = h.mean(0)
    m.last.copy_(mean.detach())
    return h - mean


def assigned_mean(m, h):
    m.last = h.detach().mean(0)
    return h - m.last


def among_positive(m, h, gates):
    h = h + 20 * gates[:, None]
    return torch.stack([row + h[0] if row[0] > 0 else row for row in h])


def read_back(m, h):
    m.last.copy_(h.detach().mean(0))
    return h - m.last


def among(h, is_same):
    return (h @ h.T).masked_fill(~is_same, -torch.inf).softmax(-1) @ h


def capacity(limit):
    """Tokens beyond the capacity of an expert are dropped, counted over the whole batch."""

    def function(m, h):
        expert = F.one_hot(h[:, :2].argmax(1), 2)
        place = (expert.cumsum(0) * expert).sum(1)
        return h + torch.tanh(h) * (place <= limit)[:, None]

    return function


def code_means(m, h):
    code = torch.cdist(h, m.codes).argmin(1)
    counts = torch.bincount(code, minlength=512).clamp(min=1)[:, None]
    return (torch.zeros(512, 8).index_add(0, code, h) / counts)[code]


def part_centred(m, h):
    h = h.clone()
    h[:, :3] -= h[:, :3].mean(0)
    return h


def filled(m, h):
    out = torch.zeros_like(h)
    out[:, :4] = h.flip(0)[:, :4]
    return out


class Sharp(torch.autograd.Function):
    """A softmax that no graph knows."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.softmax(0))
        return x.softmax(0)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(0))


@fxpipe.leaf
def turned(h):
    return h + h.flip(0)


@fxpipe.leaf
def solved(h):
    """As an adaptive solver: its step goes by the error of all samples, and changes each of them by little."""
    return h * (1 + 3e-4 * float(h.detach().square().mean()))


class Mixer(Layered, drop=lambda: nn.Dropout(0.1), calls=lambda: torch.zeros(())):
    """Kept whole; has a counter and a dropout of its own."""

    def forward(self, h):
        self.calls += 1
        return self.drop(h + h.flip(0))


IDS = torch.tensor([0, 1, 2, 0, 1, 2, 3, 3])
STEPS = {"steps": torch.zeros(())}
LAST = {"last": torch.zeros(8)}
ATTENTION = {"attend": nn.MultiheadAttention(8, 2, dropout=0.1)}
RECURRENCE = {"lstm": nn.LSTM(8, 8, num_layers=2, dropout=0.2)}
MIXING = {
    # function, tensors of the model, ids
    "a counter in a buffer": (counted, STEPS, ()),
    "steps of a solver": (lambda m, h: solved(h), {}, ()),
    "noise times zero": (lambda m, h: h + 0 * torch.randn_like(h) + h.flip(0), {}, ()),
    "dropout beside": (lambda m, h: F.dropout(h + h.flip(0), 0.3), {}, ()),
    "a gate of zero": (lambda m, h: h + m.gate * h.flip(0), {"gate": gate(0.0)}, ()),
    "a vector of zeros within tanh": (lambda m, h: h + m.gate.tanh() * h.flip(0), {"gate": gate([0.0] * 8)}, ()),
    "a gate that is zero in half": (lambda m, h: h + m.gate * h.roll(1, 0), {"gate": gate([1.0] * 4 + [0.0] * 4)}, ()),
    "a layer scale": (lambda m, h: h + m.gate * h.flip(0), {"gate": gate([1e-6] * 8)}, ()),
    "sigmoid of -20": (lambda m, h: h + m.gate.sigmoid() * h.flip(0), {"gate": gate(-20.0)}, ()),
    "a constant scale of 1e-5": (lambda m, h: h + 1e-5 * h.flip(0), {}, ()),
    "a buffer of zero": (lambda m, h: h + m.steps * h.flip(0), STEPS, ()),
    "a buffer of zero times a mean": (lambda m, h: h + m.steps * h.mean(0), STEPS, ()),
    "a branch of a buffer": (lambda m, h: torch.where(m.steps > 100, h.flip(0), h), STEPS, ()),
    "a branch of a sum": (lambda m, h: torch.where(h.sum() > 1e6, h.flip(0), h), {}, ()),
    "a scale by a branch of a sum": (lambda m, h: torch.where(h.sum() > 1e6, 2 * h, h), {}, ()),
    "behind a map of zeros": (lambda m, h: h + m.zero(h.flip(0)), {"zero": nn.Linear(8, 8)}, ()),
    "a ReLU far below zero": (lambda m, h: h + (h.flip(0) - 100).relu(), {}, ()),
    "the mean kept in a buffer": (kept_mean, LAST, ()),
    "the mean assigned to a buffer": (assigned_mean, LAST, ()),
    "the mean read back from a buffer": (read_back, LAST, ()),
    "statistics by hand": (lambda m, h: (h - h.mean(0)) / (h.std(0) + 1e-3), {}, ()),
    "a norm of all": (lambda m, h: (h - h.mean()) / h.std(), {}, ()),
    "equal ids": (lambda m, h, ids: among(h, ids[:, None] == ids), {}, (IDS,)),
    "ids that are all unequal": (lambda m, h, ids: among(h, ids[:, None] == ids), {}, (torch.arange(BATCH),)),
    "ids as floats": (lambda m, h, ids: among(h, ids[:, None] == ids), {}, (torch.arange(BATCH).float(),)),
    "sorted by ids and not back": (lambda m, h, ids: h[ids.argsort(stable=True)], {}, (IDS,)),
    "the capacity of experts": (capacity(3), {}, ()),
    "a capacity that is not reached": (capacity(100), {}, ()),
    "means of the nearest code": (code_means, {"codes": torch.randn(512, 8)}, ()),
    "a sum so far": (lambda m, h: h.cumsum(0), {}, ()),
    "distances": (lambda m, h: h * torch.cdist(h, h).mean(1, keepdim=True).cos(), {}, ()),
    "a convolution": (lambda m, h: F.avg_pool1d(F.pad(h.T[None], (1, 1)), 3, 1)[0].T, {}, ()),
    "rolled by two": (lambda m, h: h + h.roll(2, 0), {}, ()),
    "a part in place": (part_centred, {}, ()),
    "a part written": (filled, {}, ()),
    "a map written to": (lambda m, h: h.copy_(h.flip(0)), {}, ()),
    "batch norm without statistics or weights": (lambda m, h: F.batch_norm(h, None, None, training=True), {}, ()),
    "a function of autograd": (lambda m, h: Sharp.apply(h), {}, ()),
    "a function kept whole": (lambda m, h: turned(h), {}, ()),
    "samples in another order": (lambda m, h: h[torch.randperm(len(h))], {}, ()),
    "samples in the order of a list": (lambda m, h: h[torch.randperm(len(h)).tolist()], {}, ()),
    "a row that a number lets in": (among_positive, {}, (torch.eye(12)[5] - 0.5,)),
    "positions of samples": (lambda m, h: h + torch.arange(len(h))[:, None], {}, ()),
    "attention over samples with dropout": (lambda m, h: m.attend(*[h[:, None]] * 3)[0][:, 0], ATTENTION, ()),
    "a recurrence over samples with dropout": (lambda m, h: m.lstm(h[:, None])[0][:, 0], RECURRENCE, ()),
}


def model_of(function, tensors):
    torch.manual_seed(0)
    model = Model(function, **copy.deepcopy(tensors))
    if "zero" in tensors:
        nn.init.zeros_(model.zero.weight)
        nn.init.zeros_(model.zero.bias)
    return model


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_meet_are_refused_with_the_line(name):
    function, tensors, ids = MIXING[name]
    line = re.escape(__file__) + r":\d+"
    with pytest.raises(ArgumentError, match=rf"samples act on each other at {line} .*out_dims.*in_dims"):
        fxpipe.trace(model_of(function, tensors), (torch.randn(len(ids[0]) if ids else BATCH, 8), *ids), chunks=4)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_few_samples_show_as_much(batch):
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(model_of(*MIXING["a gate of zero"][:2]), (torch.randn(batch, 8),))


class Blocks(nn.Module):
    """Blocks of equal functions; parameters of the last are others, so that samples meet there alone."""

    def __init__(self, function, end=lambda h: h, sums=(0.0,) * 6, last=1.0):
        super().__init__()
        self.function, self.end = function, end
        self.lins, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 9)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor([1.0, one - 1])) for one in sums)
        nn.init.normal_(self.lins[-1].weight, std=last)

    def forward(self, x):
        for lin, scale in zip(self.lins, self.scales, strict=True):
            x = self.function(lin(x.tanh()), scale)
        return self.out(self.end(x)).relu()


def masked(h, scale):
    return h + (h > 5).long().cumsum(0)


LATER = {
    "a norm of large values": {"function": lambda h, scale: h.renorm(2, 1, 20.0), "last": 1e3},
    "a norm of large values after the blocks": {
        "function": lambda h, scale: h,
        "end": lambda h: h.renorm(2, 1, 20.0),
        "last": 1e3,
    },
    "a norm in place": {"function": lambda h, scale: h, "end": lambda h: h.clone().renorm_(2, 1, 20.0), "last": 1e3},
    "a mask of large values": {"function": masked, "last": 1e2},
    "factors that add up to zero in others": {
        "function": lambda h, scale: h + torch.einsum("bd,cd,k->bd", h, h, scale),
        "sums": (0.0,) * 5 + (1.0,),
    },
}


@pytest.mark.parametrize("name", LATER)
def test_samples_that_meet_in_the_last_of_many_blocks(name):
    """The values of the first blocks hide it."""
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(Blocks(**LATER[name]), (torch.randn(BATCH, 8),), chunks=4)


def test_a_module_kept_whole_hides_nothing():
    model = model_of(lambda m, h: m.mixer(h), {"mixer": Mixer()})
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(model, (torch.randn(BATCH, 8),), leaf_modules=[Mixer], chunks=4)


# -- losses ------------------------------------------------------------------------------------------------------------


LOSSES = {
    "weights of the batch": lambda m, z: F.mse_loss(z, torch.zeros_like(z), weight=(z / z.max()).detach()),
    "a factor of zero before what is centred": lambda m, z: (z + m.steps * z.mean(0)).square().mean(),
}


class OwnLoss(Model):
    def forward(self, x):
        z = self.a(x)
        return self.function(self, z), self.c(z)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_which_samples_meet_are_those_of_the_whole_batch(name):
    plain = copy.deepcopy(model := OwnLoss(LOSSES[name], steps=torch.zeros(())))
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(torch.randn(BATCH, 8),), progress=False) as pipe:
        for batch in (BATCH, 11):
            x, losses = torch.randn(batch, 8), []
            for one in (model, plain):
                one.zero_grad()
                one.steps.fill_(0.5)  # what was closed when it was planned
            for one in (pipe, plain):
                loss, out = one(x)
                (loss + out.square().mean()).backward()
                losses.append(loss)
            torch.testing.assert_close(*losses)
            for own, its in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(own.grad, its.grad, rtol=1e-4, atol=1e-6)


# -- right models ------------------------------------------------------------------------------------------------------


def sorted_and_back(m, h):
    order = h.sum(1).argsort()
    out = m.b(h[order]).relu()
    return torch.empty_like(out).index_copy(0, order, out)


def zeros_sorted_and_back(m, h):
    order = h.sum(1).argsort()
    out = m.zero(h[order])
    return h + torch.empty_like(out).index_copy(0, order, out)


def experts(m, h):
    weights, chosen = h[:, :4].softmax(-1).topk(2, -1)
    out = torch.zeros_like(h)
    for k, expert in enumerate(m.experts):
        row, column = torch.where(chosen == k)
        out.index_add_(0, row, expert(h[row]) * weights[row, column, None])
    return h + out


def running_mean(m, h):
    m.last.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h - m.last


def assigned_running_mean(m, h):
    m.last = 0.9 * m.last + 0.1 * h.detach().mean(0)
    return h - m.last


def table(m, h):
    return h + m.last.type_as(h)


def drop_path(m, h):
    return h * h.new_empty(len(h), 1).bernoulli_(0.8) / 0.8


def by_sample(m, h):
    """All against all, of which a mask leaves each sample to itself."""
    tokens = h.view(-1, 2)
    sample = torch.arange(len(tokens)) // 4
    return among(tokens, sample[:, None] == sample).view_as(h)


RIGHT = {
    "nothing": (lambda m, h: h, {}),
    "dropout": (lambda m, h: F.dropout(h, 0.2), {}),
    "drop path": (drop_path, {}),
    "noise": (lambda m, h: h + torch.randn_like(h), {}),
    "batch norm": (lambda m, h: m.norm(h), {"norm": nn.BatchNorm1d(8)}),
    "batch norm without statistics": (lambda m, h: m.norm(h), {"norm": nn.BatchNorm1d(8, track_running_stats=False)}),
    "a counter": (lambda m, h: (m.steps.add_(1), h)[1], STEPS),
    "a running mean": (running_mean, LAST),
    "a running mean that is assigned": (assigned_running_mean, LAST),
    "a table in the dtype of samples": (table, LAST),
    "sorted and back": (sorted_and_back, {}),
    "a map of zeros, sorted and back": (zeros_sorted_and_back, {"zero": nn.Linear(8, 8)}),
    "experts": (experts, {"experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))}),
    "attention within samples": (by_sample, {}),
    "a maximum that softmax takes out": (lambda m, h: (h - h.max()).softmax(-1), {}),
    "inverses": (lambda m, h: torch.linalg.solve(h[:, :, None] @ h[:, None] + torch.eye(8), h), {}),
    "logarithms": (lambda m, h: -(h.softmax(-1) * h.log_softmax(-1)) + (0.9 * F.normalize(h)).acos(), {}),
    "integers of floats": (lambda m, h: m.codes((h.sigmoid() * 9).long()).mean(1), {"codes": nn.Embedding(10, 8)}),
    "batch norm as torch.batch_norm": (
        lambda m, h: torch.batch_norm(h, None, None, m.last, m.last + 1, True, 0.1, 1e-5, False),
        LAST,
    ),
    "fused fake quantization": (lambda m, h: m.quantize(h), {"quantize": default_fused_act_fake_quant()}),
    "draws by chances": (lambda m, h: h + torch.bernoulli(h.sigmoid().detach()), {}),
    "several draws for an element": (lambda m, h: F.rrelu(h, training=True) + torch.poisson(h.detach().exp()), {}),
    "gates of zero": (lambda m, h: h + m.gate * h.flip(1), {"gate": gate(0.0)}),
    "a recurrence over features": (lambda m, h: m.lstm(h.T[..., None])[0].sum(2).T, {"lstm": nn.LSTM(1, 4)}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_models_stay_accepted(name):
    function, tensors = RIGHT[name]
    traced = fxpipe.trace(model_of(function, tensors), (torch.randn(BATCH, 8),), chunks=4)
    assert traced.out_dims == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_digits(dtype):
    x = torch.randn(BATCH, 8, dtype=dtype)
    model = model_of(*RIGHT["experts"]).to(dtype)
    assert fxpipe.trace(model, (x,), chunks=4).out_dims == (0,)
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(model_of(lambda m, h: h + 0.03 * h.flip(0), {}).to(dtype), (x,), chunks=4)


@pytest.mark.parametrize("name", ["sorted and back", "experts"])
def test_they_are_the_plain_model_on_the_whole_batch(name):
    model = model_of(*RIGHT[name])
    plain, x = copy.deepcopy(model), torch.randn(BATCH, 8)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(torch.randn(BATCH, 8),), progress=False) as pipe:
        for one in (pipe, plain):
            one(x).square().mean().backward()
        torch.testing.assert_close(pipe(x), plain(x))
        for own, its in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, its.grad)


class Labelled(OwnLoss):
    def forward(self, x):
        """Targets in units of a table, as VideoMAE has them."""
        z = self.a(x)
        return F.mse_loss(self.c(z), (x - self.last.type_as(x)) / (self.last + 1).type_as(x)), z


def test_a_table_in_the_dtype_of_samples_is_no_meeting_in_a_loss():
    assert fxpipe.trace(Labelled(None, last=torch.zeros(8)), (torch.randn(BATCH, 8),)).out_dims == ("mean", 0)


def test_what_is_meant_for_micro_batches_is_accepted_where_the_user_says_so():
    model = model_of(lambda m, h: h - h.mean(0), {})
    assert fxpipe.trace(model, (torch.randn(BATCH, 8),), out_dims=0).out_dims == (0,)


# -- models without values ---------------------------------------------------------------------------------------------


def test_a_model_without_values_is_decided_at_the_first_step_that_has_some():
    with torch.device("meta"):
        model, x = Model(lambda m, h: h - h.mean(0)), torch.randn(BATCH, 8)
    pipe = fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=(x,), progress=False, hardware="cpu")
    assert "whether samples act on each other: not yet checked" in str(pipe.plan)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    with pipe, pytest.raises(ArgumentError, match="samples act on each other"):
        pipe.forward_backward(torch.randn(BATCH, 8), target=torch.randn(BATCH, 8), loss_fn=F.mse_loss)
    assert all(p.grad is None for p in model.parameters())


class Ids(nn.Module):
    """A table of a function of integers."""

    def __init__(self, function):
        super().__init__()
        self.function, self.table = function, nn.Embedding(64, 4)

    def forward(self, ids):
        return self.table(self.function(ids))


@pytest.mark.parametrize("ids", [torch.zeros(8, 3, dtype=torch.long), torch.arange(24).flip(0).view(8, 3)])
@pytest.mark.parametrize(
    "function",
    [lambda y: y.sort(0).values, lambda y: y.flip(0), lambda y: y.maximum(y.flip(0)), lambda y: y[[-1, *range(7)]]],
)
def test_integers_of_an_example_hide_no_order_of_samples(function, ids):
    with pytest.raises(ArgumentError, match=r"samples act on each other|put together"):
        fxpipe.pipeline(Ids(function), 2, 2, example_args=(ids,))


@pytest.mark.parametrize(
    "function", [lambda y: y.sort(1).values, lambda y: (y != 0).long().cumsum(1), lambda y: y.gather(1, y % 3)]
)
def test_integers_of_each_sample_stay_its_own(function):
    model, ids = Ids(function), torch.zeros(8, 3, dtype=torch.long)
    with fxpipe.pipeline(model, 2, 2, example_args=(ids,)) as pipe:
        ids = torch.randint(0, 20, (8, 3))
        torch.testing.assert_close(pipe(ids), model(ids))
