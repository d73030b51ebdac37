"""What needs all samples together is over 2 x 2 ranks computed from the samples of both replicas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive import Features, TwoTowers, Views, negatives_by_chance, nt_xent, tower, with_a_branch
from helpers.layered import Layered
from helpers.ranks import raised, square_mesh
from torch import nn

import fxpipe
from fxpipe.errors import DistributedError, LossError

UNEVEN = [(8, 5), (3, 8), (1, 6)]  # by step, the samples of each replica


class Supervised(Layered, temperature=lambda: nn.Parameter(torch.tensor(0.7))):
    """Supervised contrastive, with a parameter of its own. The target is a tuple."""

    def forward(self, out, target):
        classes, weights, names = target
        z = F.normalize(torch.cat([out["a"], out["b"]]), dim=-1)
        same = classes.repeat(2)[:, None] == classes.repeat(2)
        scores = (z @ z.T / self.temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        losses = -scores.log_softmax(-1).where(same, 0).nan_to_num(neginf=0).mean(1)
        assert len(names) == len(classes)
        return (losses * weights[classes].repeat(2)).mean() * out["number"]


def a_pair(out, target):
    return (out["a"] @ out["b"].T).square().sum(), (target[0] > 0).sum()


class Series(Layered, encoder=tower):
    """Series over the scale of all of them, which is computed of inputs alone, and a loss over their largest value."""

    def forward(self, x, y):
        scale = torch.where(x.mean() > 9, x.mean(0), x.abs().sum(0) / (x > 0).sum(0).clamp(min=1))
        errors = self.encoder((x - x.mean(0)) / scale) - y[:, :8] / y.abs().max()
        return errors.square().mean(), errors


class Counted(Layered, encoder=tower):
    """Which labels count, and so the divisor of the loss, depends on the largest value of all samples."""

    def forward(self, x, y):
        x = x / x.abs().max()
        labels = (x[:, 0] * 20).long().clamp(0, 7)
        return F.cross_entropy(self.encoder(x), torch.where(x[:, 1] > 0.1, labels, -100), reduction="mean")


def first_of_outputs(out):
    return out[0] + 0.01 * out[1].square().sum()


CASES = {
    "two towers": (TwoTowers, {"loss_fn": first_of_outputs}, {"chunks": 3}),
    "SimCLR": (lambda: Views(loss=nt_xent), {}, {"chunks": 2, "schedule": "1f1b"}),
    "a product of means": (lambda: Views(loss=lambda a, b: a.mean() * b.square().mean()), {}, {"chunks": 3}),
    "a branch in Python": (lambda: Views(loss=with_a_branch), {}, {"chunks": 2}),
    "negatives by chance": (lambda: Views(loss=negatives_by_chance), {}, {"chunks": 3}),
    "one micro-batch of two towers": (TwoTowers, {"loss_fn": first_of_outputs}, {"chunks": 1}),
    "a scale of all series": (Series, {"loss_fn": lambda out: out[0]}, {"chunks": 3, "balance": ["encoder.2"]}),
    "supervised": (Features, {"loss_fn": Supervised(), "reduction": "batch"}, {"chunks": 3, "schedule": "zero_bubble"}),
    "one micro-batch": (Features, {"loss_fn": Supervised(), "reduction": "batch"}, {"chunks": 1}),
    "a pair": (Features, {"loss_fn": a_pair, "reduction": "batch"}, {"chunks": 3}),
}


def batch_of(samples, seed):
    g = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 3, (samples,), generator=g)
    target = classes, torch.tensor([1.0, 2.0, 0.5]), [f"sample {i}" for i in range(samples)]
    return [torch.randn(samples, 12, generator=g, dtype=torch.float64) for _ in range(2)], target


def model_of(name):
    torch.manual_seed(0)
    kind, call, options = CASES[name]
    return kind().double(), copy.deepcopy(call), options


def pipe_of(model, **options):
    mesh, (args, _) = square_mesh(), batch_of(8, 0)
    return fxpipe.pipeline(
        model,
        mesh["pipe"],
        data_parallel=mesh["data"],
        example_args=tuple(args),
        progress=False,
        hardware="cpu",
        **options,
    )


def train(mesh, name):
    model, call, options = model_of(name)
    replica, pipe, results = square_mesh()["data"].get_local_rank(), pipe_of(model, **options), []
    loss_fn = call.get("loss_fn")
    more = [*loss_fn.parameters()] if isinstance(loss_fn, nn.Module) and pipe.needs_target else []
    optimizer = torch.optim.SGD([*pipe.parameters(), *more], 0.1, momentum=0.9)
    for step, samples in enumerate(UNEVEN):
        torch.manual_seed(step + 10 * replica)
        args, target = batch_of(samples[replica], 2 * step + replica)
        if "reduction" in call:
            call["target"] = target
        loss, out = pipe.forward_backward(*args, **call, return_outputs=True)
        gradients = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        gradients |= {f"loss {k}": p.grad.clone() for k, p in enumerate(more)}
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss, gradients, out, torch.rand(())))
    return results


def joined(first, second):
    return torch.cat([first, second]) if isinstance(first, torch.Tensor) else [*first, *second]


def train_plain(name):
    model, call, _ = model_of(name)
    loss_fn, results = call.get("loss_fn"), []
    more = [*loss_fn.parameters()] if isinstance(loss_fn, nn.Module) else []
    optimizer = torch.optim.SGD([*model.parameters(), *more], 0.1, momentum=0.9)
    for step, samples in enumerate(UNEVEN):
        torch.manual_seed(step)
        parts = [batch_of(samples[replica], 2 * step + replica) for replica in range(2)]
        (classes, weights, names), (other_classes, _, other_names) = (target for _, target in parts)
        target = joined(classes, other_classes), weights, joined(names, other_names)
        out = model(*map(joined, parts[0][0], parts[1][0]))
        loss = out if loss_fn is None else loss_fn(out, target) if "reduction" in call else loss_fn(out)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        gradients |= {f"loss {k}": p.grad.clone() for k, p in enumerate(more)}
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.detach(), gradients, out, torch.rand(())))
    return results


def own_outputs(out, samples, replica):
    """The plain model's outputs for the samples of a replica; what combines all samples is that of all replicas."""
    part = slice(0, samples[0]) if replica == 0 else slice(samples[0], None)
    if isinstance(out, dict):
        return {"a": out["a"][part].detach(), "b": out["b"][part].detach(), "number": out["number"]}
    if isinstance(out, tuple) and len(out) == 2:
        return out[1][part].detach().square().mean(), out[1][part].detach()
    return (out[0].detach(), out[1].detach(), out[2][part].detach()) if isinstance(out, tuple) else out.detach()


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_plain_model_on_the_samples_of_all_replicas(four_ranks, name):
    results, expected = four_ranks.run(train, name), train_plain(name)
    names = set()
    for rank, of_rank in enumerate(results):
        for step, (loss, gradients, out, drawn) in enumerate(of_rank):
            plain_loss, plain_gradients, plain_out, plain_drawn = expected[step]
            torch.testing.assert_close(loss, plain_loss)
            torch.testing.assert_close(gradients, {key: plain_gradients[key] for key in gradients})
            if rank % 2:  # of the last stage
                torch.testing.assert_close(out, own_outputs(plain_out, UNEVEN[step], rank // 2))
                torch.manual_seed(step + 10)
                assert drawn == (torch.rand(()) if rank == 3 else plain_drawn)
            names |= gradients.keys()
    assert names == expected[0][1].keys()


def test_only_a_temperature_is_trained_and_calls_are_accumulated(four_ranks):
    results = four_ranks.run(accumulate)
    torch.manual_seed(0)
    model = TwoTowers().double().requires_grad_(False)
    model.scale.requires_grad_()
    for seed in (1, 3):
        (first, _), (second, _) = batch_of(4, seed), batch_of(3, seed + 1)
        model(*map(joined, first, second))[0].backward()
    gradients = [one["scale"] for one in results if "scale" in one]
    assert len(gradients) >= 2
    for gradient in gradients:
        torch.testing.assert_close(gradient, model.scale.grad)


def accumulate(mesh):
    torch.manual_seed(0)
    model, replica = TwoTowers().double().requires_grad_(False), square_mesh()["data"].get_local_rank()
    model.scale.requires_grad_()
    pipe = pipe_of(model, chunks=2)
    first, second = (batch_of((4, 3)[replica], seed + replica)[0] for seed in (1, 3))
    with pipe.no_sync():
        pipe.forward_backward(*first, loss_fn=lambda out: out[0])
    pipe.forward_backward(*second, loss_fn=lambda out: out[0])
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def train_counted(mesh):
    torch.manual_seed(0)
    pipe, replica = pipe_of(Counted().double(), chunks=3), square_mesh()["data"].get_local_rank()
    (x, y), _ = batch_of((8, 5)[replica], replica)
    loss = pipe.forward_backward(x * (1 + 2 * replica) + replica, y)
    return loss, {name: p.grad for name, p in pipe.named_parameters()}


def test_labels_that_count_by_the_scale_of_all_samples(four_ranks):
    results = four_ranks.run(train_counted)
    torch.manual_seed(0)
    model, ((x, y), _), ((more, more_y), _) = Counted().double(), batch_of(8, 0), batch_of(5, 1)
    loss = model(torch.cat([x, more * 3 + 1]), torch.cat([y, more_y]))
    loss.backward()
    for of_rank, gradients in results:
        torch.testing.assert_close(of_rank, loss.detach())
        torch.testing.assert_close(gradients, {name: model.get_parameter(name).grad for name in gradients})


def against_trained_targets(out, target):
    rows, (center,) = target
    scores = F.normalize(out["a"], dim=-1) @ F.normalize(rows, dim=-1).T
    return F.cross_entropy(scores, torch.arange(len(scores))) + (out["b"] @ center).square().mean()


def trained_targets(seed, replica):
    """Inputs, targets of samples that require grad, and a target of all samples that does."""
    (x, y), _ = batch_of((4, 3)[replica], seed + replica)
    return (x, y), y[:, :8].clone().requires_grad_(), torch.ones(8, dtype=torch.float64, requires_grad=True)


def train_targets(mesh):
    torch.manual_seed(0)
    pipe, replica = pipe_of(Features().double(), chunks=2), square_mesh()["data"].get_local_rank()
    args, rows, center = trained_targets(1, replica)
    pipe.forward_backward(*args, target=(rows, [center]), loss_fn=against_trained_targets, reduction="batch")
    return rows.grad, center.grad


def test_targets_of_a_replica_get_their_gradients(four_ranks):
    results = four_ranks.run(train_targets)
    torch.manual_seed(0)
    model, parts = Features().double(), [trained_targets(1, replica) for replica in range(2)]
    ((first, rows, center), (second, other_rows, _)) = parts
    target = torch.cat([rows, other_rows]), [center]
    against_trained_targets(model(*map(joined, first, second)), target).backward()
    torch.testing.assert_close(results[1], (rows.grad, center.grad))
    torch.testing.assert_close(results[3], (other_rows.grad, center.grad))


# -- Failures and misuse ---------------------------------------------------------------------------------------------


def misuse(mesh):
    """Errors by name, and the loss of a step after each."""
    replica, (args, (classes, weights, names)) = square_mesh()["data"].get_local_rank(), batch_of(4, 1)
    is_last_of_second, errors = mesh.get_rank() == 3, {}
    torch.manual_seed(0)
    pipe, supervised = pipe_of(Features().double(), chunks=2), Supervised()

    def failing(out, target):
        return supervised(out, target) * (1 // (not is_last_of_second))

    def by_chance(out, target):
        return supervised(out, target) * (1 + replica)

    def weighed(out, target):
        return supervised(out, target), 4 + replica

    good = classes, weights, names
    cases = {
        "fails": (failing, good),
        "differs": (by_chance, good),
        "other counts": (weighed, good),
        "numbers": (supervised, (torch.arange(4), weights, names)),
        "weights": (supervised, (classes, weights + replica, names)),
        "parts": (supervised, (classes, weights, names) if replica else (classes, weights)),
    }
    losses = []
    for name, (loss_fn, target) in cases.items():
        errors[name] = raised(pipe.forward_backward, *args, target=target, loss_fn=loss_fn, reduction="batch")
        assert all(p.grad is None for p in pipe.parameters())
        losses.append(pipe.forward_backward(*args, target=good, loss_fn=supervised, reduction="batch").item())
        pipe.zero_grad()
    return errors, losses


def test_misuse_and_failures_end_all_ranks_and_the_next_step_works(four_ranks):
    texts = {
        "fails": "by zero",
        "differs": "replicas compute the loss of all their samples as",
        "other counts": "replicas compute the loss of all their samples as",
        "numbers": "let loss_fn number them",
        "weights": "not of samples and differs between replicas",
        "parts": "different parts on different replicas",
    }
    results = four_ranks.run(misuse)
    for errors, losses in results:
        for name, text in texts.items():
            kind, message, seconds = errors[name]
            assert issubclass(kind, (LossError, DistributedError, ZeroDivisionError)), name
            assert text in message, name
            assert seconds < 30
        assert losses == [results[0][1][0]] * len(texts)


# -- Streams ---------------------------------------------------------------------------------------------------------


CUTS = {"two towers": ["text.0"], "a pair": ["other.0"], "a scale of all series": ["encoder.2"]}


def stream_of(pipe, name, batches):
    optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
    call = CASES[name][1]
    targets = [target if "reduction" in call else None for _, target in batches]
    calls = [(tuple(args), {}, target) for (args, _), target in zip(batches, targets, strict=True)]
    return pipe.train_stream(calls, optimizer=optimizer, **call)


def stream(mesh, name, chunks):
    pipe = pipe_of(model_of(name)[0], chunks=chunks, schedule="pipedream", balance=CUTS[name])
    replica = square_mesh()["data"].get_local_rank()
    run = stream_of(pipe, name, [batch_of(n[replica], 2 * t + replica) for t, n in enumerate(UNEVEN)])
    return list(run), {key: p.detach().clone() for key, p in pipe.named_parameters()}


@pytest.mark.parametrize(
    ("name", "chunks"), [("two towers", 1), ("two towers", 2), ("a pair", 2), ("a scale of all series", 3)]
)
def test_a_stream_of_joint_losses_is_that_of_all_samples(four_ranks, name, chunks):
    results = four_ranks.run(stream, name, chunks)
    batches = []
    for t, (first, second) in enumerate(UNEVEN):
        (args, (classes, *rest)), (other, (more, *_)) = batch_of(first, 2 * t), batch_of(second, 2 * t + 1)
        batches.append(([*map(joined, args, other)], (joined(classes, more), *rest)))
    model, options = model_of(name)[0], {"schedule": "pipedream", "hardware": "cpu", "progress": False}
    with fxpipe.pipeline(
        model, ["cpu"] * 2, chunks=1, balance=CUTS[name], example_args=tuple(batches[0][0]), **options
    ) as pipe:
        losses = list(stream_of(pipe, name, batches))
    for of_rank, parameters in results:
        torch.testing.assert_close(of_rank, losses)
        torch.testing.assert_close(parameters, {key: model.get_parameter(key).detach() for key in parameters})
