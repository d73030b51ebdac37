"""Losses and outputs in which samples meet at the end, and values of inputs that they share, are computed once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive import (
    WIDTH,
    Features,
    TwoTowers,
    Views,
    barlow_twins,
    negatives_by_chance,
    nt_xent,
    tower,
    vicreg,
    with_a_branch,
)
from helpers.layered import Layered
from helpers.oracle import assert_same_state
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, LossError, StateError, TraceError
from fxpipe.scheduling import ActionKind

CLASSES = 7


def nt_xent_with_a_mask(a, b):
    z = torch.cat([F.normalize(a, dim=-1), F.normalize(b, dim=-1)])
    scores = z @ z.t() / 0.2
    assert scores.isfinite().all()
    scores[torch.eye(len(z), dtype=torch.bool)] = -9e15
    same = torch.roll(torch.eye(len(z), dtype=torch.bool), len(z) // 2, 0)
    return (torch.logsumexp(scores, -1) - scores[same]).mean()


class Experts(
    Layered,
    embed=lambda: nn.Embedding(CLASSES, WIDTH),
    router=(WIDTH, 4),
    experts=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
    head=(WIDTH, CLASSES),
):
    """A language model of experts, with labels and a router's loss over all tokens that count."""

    def forward(self, ids, labels):
        h = self.embed(ids).flatten(0, 1)
        chances = (self.router(h) - torch.tensor([0.0, 0.0, 0.0, 99.0])).softmax(-1)  # nothing for the last expert
        weights, chosen = chances.topk(2, -1)
        out = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            row, column = torch.where(chosen == k)
            out.index_add_(0, row, expert(h[None, row].flatten(0, 1)) * weights[row, column, None])
        logits = self.head(torch.tanh(h + out))
        counts = (labels.flatten() >= 0).to(h.dtype)
        used = F.one_hot(chosen, len(self.experts)).to(h.dtype).sum(1)
        fractions = torch.einsum("te,t->e", used, counts) / counts.sum()
        mean = (chances * counts[:, None]).sum(0) / counts.sum()
        balance = len(self.experts) * (fractions * mean).sum()
        return F.cross_entropy(logits, labels.flatten()) + 0.1 * balance, logits.view(*ids.shape, -1)


class Weighted(Layered, body=tower, value=tower):
    """Weights of samples that add up to 1, and advantages less their mean."""

    def forward(self, x, y):
        advantages = y.sum(1) - self.value(x).mean(1).detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        weights = (x.mean(1) - x.mean(1).max()).exp()
        errors = (self.body(x) - y[:, :8]).square().mean(1)
        return (weights / weights.sum() * errors).sum() - (advantages * self.value(x)[:, 0]).mean()


class Shared(Views):
    """What samples share is computed of inputs alone, and used in forward."""

    def forward(self, x, y):
        return self.loss(self.encoder, x, y)


def scale_of_all_series(encoder, x, y):
    """The scaler of transformers' time series: series without observations have the scale of the batch."""
    is_seen = (y > 0) & (y.sum(1, keepdim=True) > y.sum(1).min())
    seen, total = is_seen.sum(1, keepdim=True), (x * is_seen).abs().sum(1, keepdim=True)
    scale = torch.where(seen > 0, total / seen.clamp(min=1), total.sum(0) / seen.sum(0).clamp(min=1))
    return (encoder(x / scale) * scale - y[:, :8]).square().sum(), scale


def inputs_over_their_spread(encoder, x, y):
    return (encoder((x - x.mean(0)) / x.std(0, keepdim=True)) + y.mean() - y[:, :8]).square().sum()


def loss_over_the_largest(encoder, x, y):
    return (encoder(x) - y[:, :8] / y.abs().max()).square().sum() * y.abs().max().square()


def rows_of_equal_number(encoder, x, y):
    rows, others = (h[y[:, 0] > 0] for h in (encoder(x), y[:, :8]))
    assert rows.size() == others.size()
    return (rows - others).square().sum() / rows.size(0)


@fxpipe.leaf
def finite(h):
    return h if h.isfinite().all() else h.clamp(-1e4, 1e4)


@fxpipe.leaf
def nearest(found, targets):
    """Which row of a sample is nearest to each of its boxes; the number of boxes differs."""
    return [
        torch.tensor([int(torch.cdist(t, rows).argmin()) for t in y["boxes"].split(1)], dtype=torch.int64)
        for y, rows in zip(targets, found.detach(), strict=True)
    ]


class Detector(Layered, body=tower, head=lambda: nn.Linear(4, 2)):
    """DETR: the rows nearest to the boxes of a sample are compared with them, over the number of all boxes."""

    def forward(self, x, targets):
        found = self.head(finite(self.body(x)).view(len(x), 2, 4))
        rows = nearest(found, targets)
        samples = torch.cat([torch.full_like(r, i) for i, r in enumerate(rows)])
        near, boxes = found[samples, torch.cat(rows)], torch.cat([y["boxes"] for y in targets])
        return (near - boxes).abs().sum() / max(sum(len(y["boxes"]) for y in targets), 1), found


class Tail(Views):
    """A loss that reads state which samples change."""

    def forward(self, x, y):
        return self.loss(self, F.normalize(self.encoder(x), dim=-1), F.normalize(self.encoder(y), dim=-1).detach())


def xbm(m, a, b):
    m.bank[(m.place + torch.arange(len(a))) % len(m.bank)] = b
    m.place.add_(len(a)).remainder_(len(m.bank))
    return (a @ m.bank.clone().T).logsumexp(1).mean()


def dino(m, a, b):
    chances = ((b - m.center) / 0.1).softmax(-1)
    m.center = 0.9 * m.center + 0.1 * b.mean(0, keepdim=True)
    m.kept[m.i] = b.mean(0)  # no output reads it
    m.old.copy_(m.kept[m.i.add_(1).remainder_(8)])
    return -(chances * a.log_softmax(-1)).sum(), chances


def less_the_new_centre(m, a, b):
    center = 0.9 * m.center + 0.1 * b.mean(0, keepdim=True)
    m.center = center.detach()
    return (a - center).square().mean(), b - m.center, m.center * 2


def swav(m, a, b):
    chances = torch.cat([m.queue, b]).exp()
    m.queue[len(b) :] = m.queue[: -len(b)].clone()
    m.queue[: len(b)] = b
    chances = F.normalize(F.normalize(chances, 1, 0), 1, 1)
    return -(chances[-len(b) :] * a.log_softmax(-1)).sum(1).mean()


def that_remembers(m, a, b):
    m.largest.copy_((scores := a @ b.T).detach().max())
    return F.cross_entropy(scores, torch.arange(len(a)))


def with_labels_kept(m, a, b):
    if m.labels.get("count") != len(a):
        m.labels.update(count=len(a), rows=torch.arange(len(a)))
    return F.cross_entropy(a @ b.T, m.labels["rows"]) + F.cross_entropy(b @ a.T, m.labels["rows"])


MODELS = {
    "labels for all samples": lambda: Tail(loss=with_labels_kept, labels={}),
    "XBM": lambda: Tail(loss=xbm, bank=torch.randn(24, 8), place=torch.tensor(3)),
    "DINO": lambda: Tail(loss=dino, center=torch.ones(1, 8), kept=torch.eye(8), i=torch.tensor(0), old=torch.ones(8)),
    "a centre that has moved": lambda: Tail(loss=less_the_new_centre, center=torch.ones(1, 8)),
    "SwAV": lambda: Tail(loss=swav, queue=torch.randn(30, 8)),
    "a statistic": lambda: Tail(loss=that_remembers, largest=torch.zeros(())),
    "a scale of all series": lambda: Shared(loss=scale_of_all_series),
    "inputs over their spread": lambda: Shared(loss=inputs_over_their_spread),
    "a loss over the largest": lambda: Shared(loss=loss_over_the_largest),
    "rows of an equal number": lambda: Shared(loss=rows_of_equal_number),
    "two towers": TwoTowers,
    "SimCLR": lambda: Views(loss=nt_xent),
    "SimCLR with a mask": lambda: Views(loss=nt_xent_with_a_mask),
    "VICReg": lambda: Views(loss=vicreg),
    "Barlow Twins": lambda: Views(loss=barlow_twins),
    "a branch in Python": lambda: Views(loss=with_a_branch),
    "negatives by chance": lambda: Views(loss=lambda a, b: (draw := negatives_by_chance(a, b), 2 * draw)),
    "a sample for all": lambda: Views(loss=lambda a, b: ((a + b[3]).square().mean() + b[3].mean(), a + b[3])),
    "boxes": Detector,
    "experts": Experts,
    "weights": Weighted,
    "a product of means": lambda: Views(loss=lambda a, b: a.mean() * b.square().mean()),
    "a norm and a largest": lambda: Views(loss=lambda a, b: a.norm() + torch.logsumexp(a - b, (0, 1)) + b.max()),
}


def inputs(model, batch, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Experts):
        ids = torch.randint(0, CLASSES, (batch, 5), generator=generator)
        labels = torch.randint(-1, CLASSES, (batch, 5), generator=generator)
        return ids, labels.where(labels >= 0, -100)
    if isinstance(model, Detector):
        boxes = [{"boxes": torch.rand(1 + i % 3, 2, generator=generator, dtype=dtype)} for i in range(batch)]
        return torch.randn(batch, WIDTH, generator=generator, dtype=dtype), boxes
    return tuple(torch.randn(batch, WIDTH, generator=generator, dtype=dtype) for _ in range(2))


def tensors(out):
    return out if isinstance(out, tuple) else (out,)


def assert_steps(pipe, plain, batches, exact):
    """Outputs, losses and all gradients are those of the plain model on the whole batch, over steps that train."""
    optimizers = [torch.optim.SGD(one.parameters(), 0.05) for one in (pipe, plain)]

    def total(out):
        return tensors(out)[0] + sum(0.01 * o.square().sum() for o in tensors(out)[1:])

    for step, given in enumerate(batches):
        results = []
        for one, optimizer in zip((pipe, plain), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            if step % 2 and one is pipe:
                loss, out = pipe.forward_backward(*given, loss_fn=total, reduction="sum", return_outputs=True)
            else:
                out = one(*given)
                loss = total(out)
                loss.backward()
            results.append((*tensors(out), loss))
        for have, want in zip(*results, strict=True):
            torch.testing.assert_close(have.detach().cpu(), want.detach(), rtol=exact, atol=exact)
        for (name, have), want in zip(pipe.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(have.cpu(), want, rtol=exact, atol=exact, msg=name)
        for (name, p), q in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            scale = max(1.0, float(q.grad.abs().max()))
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=exact, atol=exact * scale, msg=name)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(("dtype", "chunks"), [(torch.float32, 4), (torch.float64, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_the_plain_model_on_the_whole_batch(name, dtype, chunks):
    plain = copy.deepcopy(model := MODELS[name]().to(dtype))
    options = {"checkpoint": "always"} if chunks == 2 else {}
    batches = [inputs(model, batch, dtype, seed) for seed, batch in enumerate((8, 11, 8), 1)]
    example = inputs(model, 8, dtype)
    with fxpipe.pipeline(
        model, ["cpu", "cpu"], chunks, example_args=example, progress=False, profile_budget=0.0, **options
    ) as pipe:
        assert_steps(pipe, plain, batches, 1e-10 if dtype == torch.float64 else 2e-4)
        for one in (pipe, plain):
            one.eval()
        with torch.no_grad():
            results = []
            for one in (pipe, plain):
                torch.manual_seed(0)
                results.append(tensors(one(*batches[0])))
            for have, want in zip(*results, strict=True):
                torch.testing.assert_close(have, want)
        for have, want in zip(pipe.buffers(), plain.buffers(), strict=True):  # evaluation may change them, too
            torch.testing.assert_close(have, want, rtol=2e-4, atol=2e-4)


def assert_gradients(model, plain, rtol=1e-4, atol=1e-6):
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.cpu(), q[1].grad, rtol=rtol, atol=atol, msg=name)


# -- losses that need all samples --------------------------------------------------------------------------------------


def supervised(out, target):
    z = F.normalize(torch.cat([out["a"], out["b"]]), dim=-1)
    same = target.repeat(2)[:, None] == target.repeat(2)
    scores = (z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return -scores.log_softmax(-1).where(same, 0).nan_to_num(neginf=0).mean() * out["number"]


def dice(out, target):
    chances, wanted = out["a"].sigmoid(), F.one_hot(target, 8)
    return 1 - 2 * (chances * wanted).sum() / (chances.sum() + wanted.sum()) + out["b"].square().mean()


def a_pair(out, target):
    return (out["a"] @ out["b"].T).square().sum(), (target > 0).sum()


@pytest.mark.parametrize(("loss_fn", "schedule"), [(supervised, "1f1b"), (dice, "gpipe"), (a_pair, "zero_bubble")])
def test_a_loss_of_all_samples(loss_fn, schedule):
    model = Features().double()
    plain, example = copy.deepcopy(model), inputs(model, 8, torch.float64)
    with fxpipe.pipeline(
        model, ["cpu", "cpu"], 4, schedule=schedule, example_args=example, progress=False, profile_budget=0.0
    ) as pipe:
        for seed, batch in enumerate((8, 11, 8, 3)):
            given, target = inputs(model, batch, torch.float64, seed), torch.arange(batch) % 5
            options = {"target": target, "loss_fn": loss_fn, "reduction": "batch"}
            loss, out = pipe.forward_backward(*given, **options, return_outputs=True)
            output = plain(*given)
            want = loss_fn(output, target)
            want = want[0] / want[1] if isinstance(want, tuple) else want
            want.backward()
            torch.testing.assert_close(loss, want.detach())
            torch.testing.assert_close(out["a"], output["a"].detach())
            assert_gradients(model, plain, 1e-10, 1e-12)
        assert fxpipe.verify(pipe, *given, **options)
        assert pipe.last_step.schedule == "gpipe"


def test_a_product_of_means_is_one_of_all_samples():
    given = inputs(model := MODELS["a product of means"](), 8, torch.float32)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=given, progress=False, profile_budget=0.0) as pipe:
        assert pipe.plan.schedule == "gpipe"
        assert "needs all samples together" in " ".join(str(pipe.plan).split())  # lines break by the length of paths


@pytest.mark.parametrize("overlap", [False, True])
def test_stages_are_updated_after_a_loss_of_all_samples(overlap):
    model = TwoTowers()
    plain, given = copy.deepcopy(model), inputs(model, 8, torch.float32)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=given, progress=False, profile_budget=0.0) as pipe:
        own = fxpipe.optim.StageOptimizer(pipe, torch.optim.AdamW, lr=1e-2, overlap=overlap)
        other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for seed in range(3):
            given = inputs(model, 8, torch.float32, seed)
            loss = pipe.forward_backward(*given, loss_fn=lambda out: out[0], optimizer=own)
            want = plain(*given)[0]
            want.backward()
            other.step()
            other.zero_grad()
            torch.testing.assert_close(loss, want.detach(), rtol=1e-4, atol=1e-5)


def test_a_loss_of_all_samples_that_fails_changes_nothing():
    given = inputs(model := Features(), 8, torch.float32)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=given, progress=False, profile_budget=0.0) as pipe:
        with pytest.raises(ZeroDivisionError):
            pipe.forward_backward(*given, loss_fn=lambda out: 1 / (len(out["a"]) - 8), reduction="batch")
        with pytest.raises(LossError, match="does not require grad"):
            pipe.forward_backward(*given, loss_fn=lambda out: out["a"].detach().mean(), reduction="batch")
        with pytest.raises(ArgumentError, match="reduction='batch' with micro_batches"):
            pipe.forward_backward(micro_batches=[given], loss_fn=len, reduction="batch")
        assert all(p.grad is None for p in model.parameters())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_micro_batches_of_the_caller_and_mini_batches_of_a_stream_share_their_own():
    plain = Shared(loss=loss_over_the_largest)
    parts = [inputs(plain, 8, torch.float32, seed) for seed in (1, 2)]
    losses = torch.stack([plain(*part) for part in parts])
    losses.sum().backward()
    model, calls = copy.deepcopy(plain), [(part, {}, None) for part in parts]
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=parts[0], schedule="pipedream") as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.0)
        stream = pipe.train_stream(calls, optimizer=optimizer, reduction="sum")
        torch.testing.assert_close(torch.stack([*stream]), losses.detach())
        model.zero_grad()
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=parts[0]) as pipe:
        pipe.forward_backward(micro_batches=calls, reduction="sum")
        assert_gradients(model, plain)


def test_what_an_input_with_a_gradient_gives_is_refused():
    x, y = inputs(plain := Shared(loss=inputs_over_their_spread), 8, torch.float32)
    with pytest.raises(ArgumentError, match="samples act on each other"):
        fxpipe.trace(plain, (x.requires_grad_(), y), chunks=2)


def test_a_tail_of_parameters_that_were_frozen_while_planning_is_refused():
    model = TwoTowers().requires_grad_(False)
    given = inputs(model, 8, torch.float32)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=given) as pipe:
        pipe(*given)
        model.requires_grad_(True)
        with pytest.raises(LossError, match=r"output 0 .* make the pipe after you set requires_grad"):
            pipe.forward_backward(*given, loss_fn=lambda out: out[0])


def test_a_cache_of_a_draw_is_refused():
    fill = lambda m, n: m.labels.get("n") == n or m.labels.update(n=n, kept=torch.randperm(n))  # noqa: E731
    loss = lambda m, a, b: (fill(m, len(a)), (F.log_softmax(a @ b.T, 1).diagonal() * m.labels["kept"]).mean())[1]  # noqa: E731
    with pytest.raises(TraceError, match=r"labels|batch size"):
        fxpipe.trace(Tail(loss=loss, labels={}), inputs(None, 8, torch.float32), chunks=2)


def test_state_that_changes_once_in_a_step():
    """Not in a failed one; with each of the caller's micro-batches; not in a stream, which has no end of a step."""
    plain = MODELS["a centre that has moved"]()
    model, parts = copy.deepcopy(plain), [inputs(plain, 8, torch.float32, seed) for seed in (1, 2)]
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=parts[0], schedule="pipedream") as pipe:
        with pytest.raises(ZeroDivisionError):
            pipe.forward_backward(*parts[0], loss_fn=lambda out: 1 / 0)
        torch.testing.assert_close(pipe(*parts[0]), plain(*parts[0]))
        torch.stack([plain(*part)[0] / 2 for part in parts]).sum().backward()
        pipe.forward_backward(micro_batches=[(part, {}, None) for part in parts], loss_fn=lambda out: out[0])
        assert_same_state(model, plain, exact=False)
        assert_gradients(model, plain)
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.0)
        with pytest.raises(StateError, match=r"forward changes 'center' once .* train with forward_backward"):
            next(pipe.train_stream([(parts[0], {}, None)], optimizer=optimizer, loss_fn=lambda out: out[0]))


def test_state_of_numbers_that_each_micro_batch_draws_changes_with_it():
    model = Tail(loss=lambda m, a, b: (m.q * (r := torch.rand(8)) + a, m.q.lerp_(r * b.mean(0), 1))[0], q=torch.ones(8))
    assert fxpipe.trace(model, inputs(model, 8, torch.float32), chunks=4).update is None


class Centred(Views, calls=lambda: torch.ones(())):
    """Two equal views, less their means: 0, unless samples of one batch meet different numbers."""

    def forward(self, x, y):
        z = self.encoder(x)
        changed, plain = self.change(self, z), z.detach()
        return ((changed - changed.mean(0)) - (plain - plain.mean(0))).square().sum()


def counted(model, z):
    model.calls = model.calls + 1
    return z * model.calls


COMMON = {
    "a vector": lambda model, z: z + torch.randn(8),
    "a matrix": lambda model, z: z @ torch.randn(8, 8),
    "dropout of features": lambda model, z: z * F.dropout(torch.ones(8), 0.5),
    "a factor": lambda model, z: z * torch.rand(()),
    "an order of features": lambda model, z: z[:, torch.randperm(8)],
    "a counter that is set": counted,
}


@pytest.mark.parametrize("name", COMMON)
def test_what_samples_have_in_common_may_not_differ_between_micro_batches(name):
    model = Centred(change=COMMON[name])
    with pytest.raises(ArgumentError, match=r"made at .*test_joint_tail.py:\d+"):
        fxpipe.trace(model, inputs(model, 8, torch.float32), chunks=4)


class CentredWeights(Views, other=tower):
    """Weights of the samples, less their mean: 0 for equal ones."""

    def forward(self, x, y, weights):
        errors = (self.encoder(x) - self.other(x)).square().mean(1)
        return ((weights - weights.mean()) * errors).sum()


@pytest.mark.parametrize("chunks", [4, 8])
def test_a_step_takes_weights_of_all_samples_however_they_are_at_first(chunks):
    model, x = CentredWeights(), torch.randn(8, WIDTH)
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks, example_args=(x, x, torch.rand(8)), progress=False) as pipe:
        for weights in (torch.ones(8), torch.rand(8)):
            loss, want = pipe.forward_backward(x, x, weights), plain(x, x, weights)
            want.backward()
            torch.testing.assert_close(loss, want.detach())
            assert_gradients(model, plain)


def test_a_metric_of_the_whole_batch_does_not_change_how_micro_batches_count():
    class Metric(Views):
        def forward(self, x):
            y = self.encoder(x)
            return y, y.detach().std()

    model, x = Metric(), torch.randn(8, WIDTH)
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), progress=False) as pipe:
        loss = pipe.forward_backward(micro_batches=[x[:6], x[6:]], loss_fn=lambda output: output[0].square().mean())
    want = plain(x)[0].square().mean()
    want.backward()
    torch.testing.assert_close(loss, want)
    assert_gradients(model, plain)


def test_a_large_part_of_the_model_is_no_tail():
    class Head(Views, head=(8, 64)):
        def forward(self, x, y):
            z = self.encoder(x)
            return self.head(z - z.mean(0)).square().mean()

    model = Head()
    with pytest.raises(ArgumentError, match=r"samples act on each other at .*% of the parameters"):
        fxpipe.trace(model, inputs(model, 8, torch.float32), chunks=4)


# -- what stages run ---------------------------------------------------------------------------------------------------


def test_stages_run_nothing_of_the_tail_and_gather_no_logits():
    model = TwoTowers()
    traced = fxpipe.trace(model, inputs(model, 8, torch.float32), chunks=4)
    assert {node.name for node in traced.nodes}.isdisjoint({"matmul", "cross_entropy", "arange"})
    model = Experts()
    traced = fxpipe.trace(model, inputs(model, 8, torch.float32), chunks=4)
    rows = [node for node, how in zip(traced.pieces, traced.piece_dims, strict=True) if isinstance(how, int)]
    assert all("head" not in node.name for node in rows)
    assert traced.out_dims == ("combined", 0)


@pytest.mark.parametrize(
    "loss", [lambda f, x, y: nt_xent(f(x), f(y)), inputs_over_their_spread], ids=["a tail", "a head"]
)
def test_a_second_length_makes_a_graph_for_all_lengths(loss):
    class Texts(Shared):
        def forward(self, x, y):
            return super().forward(x.mean(1), y.mean(1))

    torch.manual_seed(0)
    model = Texts(loss=loss)
    lengths = [tuple(torch.randn(8, length, WIDTH) for _ in range(2)) for length in (5, 7, 6, 9)]
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=lengths[0], profile_budget=0.0) as pipe:
        for pair in lengths:
            torch.testing.assert_close(pipe(*pair), model(*pair))
        assert len(pipe._fxpipe.graphs) == 2


def test_a_list_with_an_entry_for_each_sample_is_whole_and_the_samples_are_cut():
    traced = fxpipe.trace(Detector(), inputs(Detector(), 4, torch.float32), chunks=2)
    assert traced.in_dims == (0, None, None, None, None)
    assert traced.out_dims == ("combined", 0)


@fxpipe.leaf
def criterion(rows, targets):
    near = [torch.cdist(r, y["boxes"]).min(0).values.mean() for r, y in zip(rows, targets, strict=True)]
    return torch.stack(near).mean()


@fxpipe.leaf
def distances(rows, targets):
    return torch.cat([torch.cdist(r, y["boxes"]).min(0).values for r, y in zip(rows, targets, strict=True)])


SIZES_OF_BOXES = {  # what forward does with its boxes, and the number of graphs for three lists of boxes
    "only Python reads them": (lambda rows, targets: criterion(rows, targets), 1),
    "it counts them": (lambda rows, targets: criterion(rows, targets) / sum(len(y["boxes"]) for y in targets), 3),
    "it counts what Python makes": (lambda rows, targets: (d := distances(rows, targets)).sum() / len(d), 3),
}


@pytest.mark.parametrize("name", SIZES_OF_BOXES)
def test_numbers_of_boxes_that_only_python_of_the_tail_reads_need_no_graph(name):
    class Whole(Detector):
        def forward(self, x, targets):
            return SIZES_OF_BOXES[name][0](self.head(self.body(x).view(len(x), 2, 4)), targets)

    torch.manual_seed(0)
    plain = copy.deepcopy(model := Whole())
    batches = [
        (torch.randn(len(counts), WIDTH), [{"boxes": torch.rand(count, 2)} for count in counts])
        for counts in ((1, 2, 3, 2), (2, 2, 3, 3), (5, 4, 3, 2))
    ]
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=batches[0], profile_budget=0.0) as pipe:
        for batch in batches:
            for one in (pipe, plain):
                one.zero_grad()
                one(*batch).backward()
            assert_gradients(model, plain)
        assert len(pipe._fxpipe.graphs) == SIZES_OF_BOXES[name][1]


def test_plans_know_the_tail():
    with torch.device("meta"):
        model, batch = TwoTowers(), (torch.randn(8192, WIDTH), torch.randn(8192, WIDTH))
    seconds = []
    for chunks in (2, 8):
        plan = fxpipe.plan(model, 2, example_args=batch, chunks=chunks, hardware="a100-80gb")
        first, last = plan.stages
        assert first.loss_seconds == 0
        seconds.append(last.loss_seconds * chunks)
        # No stage works while the tail is computed: stages are as even as without it.
        assert last.loss_seconds > first.seconds > 0.8 * (last.seconds - last.loss_seconds)
        assert first.seconds < 1.2 * (last.seconds - last.loss_seconds)
        scores = fxpipe.simulate(plan).memory[-1].at_peak.working / (8192 * 8192 * 4)
        assert 2 < scores < 5.5  # in float32, with gradients; outputs share them
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)  # rel: operations of a micro-batch take a launch at least
    spans = [span.seconds for span in fxpipe.simulate(plan).spans if span.action[:2] == (ActionKind.FORWARD, 1)]
    assert 8 * max(spans[:7]) < seconds[1] < spans[7]  # with the last F
    assert f"loss {1e3 * seconds[1]:.2f} ms of the last F of stage 1" in str(plan)
    stream = fxpipe.plan(model, 2, example_args=batch, chunks=8, hardware="a100-80gb", schedule="pipedream")
    for j, count in enumerate((2, 1)):
        assert (stream.weight_versions(j), stream.in_flight(j)) == (count, 8 * count)
        assert fxpipe.simulate(stream).memory[j].peak <= stream.memory(j, b=1024)


def test_a_tail_that_few_samples_cannot_have_is_planned_without_its_cost():
    """Of two samples, which planning repeats, the covariance of three features has no Cholesky factor."""

    def whitened(a, b):
        z = a[:, :3] + b[:, :3]
        return torch.linalg.cholesky(z.T @ z - 1e-9 * torch.eye(3)).diagonal().log().sum().square()  # beyond rounding

    model = Views(loss=whitened).double()
    plain, given = copy.deepcopy(model), inputs(model, 8, torch.float64)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 4, example_args=given) as pipe:
        assert pipe.plan.stages[-1].loss_seconds == 0
        loss, want = pipe.forward_backward(*given), plain(*given)
        want.backward()
        torch.testing.assert_close(loss, want.detach())
        assert_gradients(model, plain)


def test_steps_are_compared_with_the_tail_where_it_runs():
    x, y = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    with fxpipe.pipeline(TwoTowers(), ["cpu", "cpu"], chunks=4, example_args=(x, y)) as pipe:
        pipe.forward_backward(x, y, loss_fn=lambda output: output[0])
        compared = fxpipe.simulate(pipe.plan).compared(pipe.last_step)
        assert not compared.learns_loss
        assert compared.loss.simulated > 0
        pipe(x, y)[0].backward()  # the tail runs between the forwards and the backwards
        compared = fxpipe.simulate(pipe.plan).compared(pipe.last_step)
        assert compared.loss is None
