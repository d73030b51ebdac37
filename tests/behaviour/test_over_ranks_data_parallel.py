"""A pipe over 2 x 2 ranks trains as the plain model does on the mini-batches of both replicas together."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.rank_models import DENSE_CUTS, MIXED_CUTS, Dense, Mixed, ScaledLoss, padded_loss, token_loss, tokens
from helpers.ranks import raised, square_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

import fxpipe
import fxpipe.distributed
from fxpipe.errors import DistributedError, FxpipeError, LossError, StateError

QUICK = {"progress": False, "check": False, "hardware": "cpu"}


def pipe_of(model, x, **options):
    mesh = square_mesh()
    return fxpipe.pipeline(
        model, mesh["pipe"], data_parallel=mesh["data"], example_args=(x,), **QUICK | {"chunks": 3} | options
    )


def model_of(kind, steps):
    """A model, and by step, replica and call the mini-batches."""
    torch.manual_seed(0)
    if kind is Mixed:
        return Mixed(0.0), [[[tokens(*batch) for batch in calls] for calls in step] for step in steps], MIXED_CUTS
    batches = [[[(torch.randn(b, 4), torch.randn(b, 4)) for b, *_ in calls] for calls in step] for step in steps]
    return Dense(), batches, DENSE_CUTS


def train(mesh, kind, steps, loss_fn, stages, options):
    torch.manual_seed(mesh.get_rank())  # of which nothing is to be seen
    model, batches, cuts = model_of(kind, steps)
    replica = square_mesh()["data"].get_local_rank()
    if replica:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(1.0)  # all replicas begin with the values of the first
    pipe = pipe_of(model, batches[0][0][0][0], balance=cuts[stages], **options)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    results = []
    for step in batches:
        *first, (x, t) = step[replica]
        losses = []
        for args in first:
            with pipe.no_sync():
                losses.append(pipe.forward_backward(args[0], target=args[1], loss_fn=loss_fn))
        losses.append(pipe.forward_backward(x, target=t, loss_fn=loss_fn))
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        state = {key: value.clone() for key, value in pipe.state_dict().items()}
        results.append((torch.stack(losses), gradients, state))
    return results


def pair(loss_fn, out, t):
    value = loss_fn(out, t)
    return value if isinstance(value, tuple) else (value * len(out), len(out))


def add_plain_gradients(model, calls, loss_fn, chunks):
    """One call of all replicas. `calls`: their mini-batches."""
    parts = [
        (replica, *part)
        for replica, (x, t) in enumerate(calls)
        for part in zip(*(value.tensor_split(min(chunks, len(x))) for value in (x, t)), strict=True)
    ]
    weight = sum(pair(loss_fn, copy.deepcopy(model)(x), t)[1] for _, x, t in parts)
    loss = 0.0
    for replica, x, t in parts:
        before = copy.deepcopy(dict(model.named_buffers()))
        part = pair(loss_fn, model(x), t)[0] / weight
        part.backward()
        loss += part.detach()
        for name, buffer in model.named_buffers() if replica else ():
            buffer.copy_(before[name])
    return loss


def train_plain(kind, steps, loss_fn, chunks):
    """The plain model over the micro-batches of all replicas; buffers are those of the first."""
    model, batches, _ = model_of(kind, steps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    results = []
    for step in batches:
        losses = []
        for calls in zip(*step, strict=True):
            losses.append(add_plain_gradients(model, calls, loss_fn, chunks))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        results.append((torch.stack(losses), gradients, state))
    return results


# Steps of two replicas, each of one or two calls: (samples, length, seed).
UNEVEN = [[[(7, 5, 1)], [(4, 5, 2)]], [[(7, 5, 3)], [(4, 5, 4)]], [[(2, 5, 5)], [(9, 5, 6)]]]
OTHER_LENGTHS = [[[(7, 5, 1)], [(4, 5, 2)]], [[(3, 9, 3)], [(4, 5, 4)]], [[(7, 9, 5)], [(4, 9, 6)]]]
ACCUMULATED = [
    [[(7, 5, 1), (3, 5, 2)], [(4, 5, 3), (5, 5, 4)]],
    [[(6, 5, 5)], [(6, 5, 6)]],
    [[(7, 5, 7), (3, 5, 8), (2, 5, 9)], [(4, 5, 10), (5, 5, 11), (6, 5, 12)]],
]


CASES = {
    "1f1b": (Mixed, UNEVEN, token_loss, {"schedule": "1f1b"}),
    "zero bubble": (Mixed, UNEVEN, token_loss, {"schedule": "zero_bubble"}),
    "zbv": (Mixed, UNEVEN, token_loss, {"schedule": "zbv"}),
    "one micro-batch each": (Dense, UNEVEN, F.mse_loss, {"chunks": 1}),
    "a mean over tokens of different lengths": (Mixed, OTHER_LENGTHS, padded_loss, {}),
    "several calls": (Mixed, ACCUMULATED, token_loss, {}),
    "a mean over tokens of several calls": (Mixed, ACCUMULATED, padded_loss, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_replicas_of_unequal_mini_batches_train_as_the_plain_model_on_all_of_them(four_ranks, name):
    kind, steps, loss_fn, options = CASES[name]
    stages = 4 if name == "zbv" else 2
    results = four_ranks.run(train, kind, steps, loss_fn, stages, options)
    expected = train_plain(kind, steps, loss_fn, options.get("chunks", 3))
    names, keys = set(), set()
    for of_rank in results:
        for (losses, gradients, state), (plain_losses, plain_gradients, plain_state) in zip(
            of_rank, expected, strict=True
        ):
            torch.testing.assert_close(losses, plain_losses)
            torch.testing.assert_close(gradients, {key: plain_gradients[key] for key in gradients})
            torch.testing.assert_close(state, {key: plain_state[key] for key in state})
            names |= gradients.keys()
            keys |= state.keys()
    assert names == expected[0][1].keys()
    assert keys == expected[0][2].keys()
    for ours, theirs in zip(results[:2], results[2:], strict=True):
        for (_, gradients, state), (_, others, other_state) in zip(ours, theirs, strict=True):
            assert all(torch.equal(gradient, others[key]) for key, gradient in gradients.items())
            assert all(torch.equal(value, other_state[key]) for key, value in state.items())


def unequal_lengths(mesh, chunks):
    torch.manual_seed(0)
    model, replica = Mixed(0.0), square_mesh()["data"].get_local_rank()
    pipe = pipe_of(model, tokens(6, 5, 1)[0], chunks=chunks, balance=MIXED_CUTS[2])
    x, t = tokens(6, (5, 9)[replica], 2)
    error = raised(pipe.forward_backward, x, target=t, loss_fn=token_loss)
    assert all(p.grad is None for p in pipe.parameters())
    x, t = tokens(6, 5, 2)
    return error, pipe.forward_backward(x, target=t, loss_fn=token_loss).item()


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_mean_over_elements_of_which_replicas_have_unequal_numbers_is_refused(four_ranks, chunks):
    results = four_ranks.run(unequal_lengths, chunks)
    for (kind, text, _), loss in results:
        assert kind is LossError
        assert "1.8 times as much" in text
        assert "(total, weight)" in text
        assert loss == results[0][1]


# -- Random numbers --------------------------------------------------------------------------------------------------


def draw(mesh, seeds):
    mesh = square_mesh()
    replica = mesh["data"].get_local_rank()
    torch.manual_seed(0)
    x, t = tokens(12, 5, 1)
    pipe = pipe_of(Mixed(0.5), x, chunks=2, balance=MIXED_CUTS[2])
    torch.manual_seed(seeds[replica])
    part = slice(6 * replica, 6 * replica + 6)
    losses = [pipe.forward_backward(x[part], target=t[part], loss_fn=token_loss).item() for _ in range(2)]
    same = [pipe.forward_backward(x[:1], target=t[:1], loss_fn=token_loss, return_outputs=True)[1] for _ in range(2)]
    return losses, {name: p.grad for name, p in pipe.named_parameters()}, same


def test_replicas_draw_what_one_process_draws_for_their_micro_batches(four_ranks):
    x, t = tokens(12, 5, 1)
    pipe = fxpipe.pipeline(Mixed(0.5), ["cpu"] * 2, 4, example_args=(x,), balance=MIXED_CUTS[2], **QUICK)
    torch.manual_seed(3)
    losses = [pipe.forward_backward(x, target=t, loss_fn=token_loss).item() for _ in range(2)]
    for seeds in ((3, 3), (3, 7)):  # those of the first replica count
        results = four_ranks.run(draw, seeds)
        for own, _, _ in results:
            assert own == pytest.approx(losses, rel=1e-5)
        ours, theirs = results[1][2], results[3][2]  # on the ranks of the last stage, for the same sample
        assert not torch.equal(ours[0], theirs[0])
        assert not torch.equal(ours[0], ours[1])


# -- What the reducer does not sum, and when it does -----------------------------------------------------------------


class Winding(nn.Module):
    """Takes another way where it is told: a weight is used in another stage, another no longer, a buffer is kept."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.tied, self.first, self.second, self.third, self.unused = (nn.Linear(4, 4) for _ in range(5))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, ids, way=0):
        x = torch.tanh(self.first(self.tied(self.table(ids))))
        x = torch.tanh(self.second(x))
        if way == 0:
            x = x @ self.tied.weight
            self.seen += x.detach().sum(0)
        x = torch.tanh(self.third(x))
        return torch.tanh(self.first(x)) + self.seen if way else x


WAYS = [
    [(0, 0), (0, 0)],
    [(0,), (0,)],
    [(0,), (1,)],
    [(1, 0), (0, 1)],
    [(1,), (1,)],
    [(0,), (0,)],
]  # by step, replica and call
SIZES = (4, 2)  # samples of the replicas


def winding_batch(step, replica, call):
    g = torch.Generator().manual_seed(100 * step + 10 * replica + call)
    size = SIZES[replica]
    return torch.randint(0, 5, (size,), generator=g), torch.randn(size, 4, generator=g)


def gradients_of(named_parameters):
    return {name: None if p.grad is None else p.grad.clone().to_dense() for name, p in named_parameters}


def wind(mesh):
    replica = square_mesh()["data"].get_local_rank()
    torch.manual_seed(0)
    model, loss_fn = Winding(), ScaledLoss()
    pipe = pipe_of(model, winding_batch(0, 0, 0)[0], chunks=2, balance=["first"])
    results = []
    for step, ways in enumerate(WAYS):
        for call, way in enumerate(ways[replica]):
            x, t = winding_batch(step, replica, call)
            with contextlib.nullcontext() if call == len(ways[replica]) - 1 else pipe.no_sync():
                loss = pipe.forward_backward(x, way, target=t, loss_fn=loss_fn)
        scale = loss_fn.scale.grad
        results.append((loss, gradients_of(pipe.named_parameters()), None if scale is None else scale.clone()))
        pipe.zero_grad()
        loss_fn.zero_grad()
    return results, pipe.state_dict()["seen"].clone() if "seen" in pipe.state_dict() else None


def test_sparse_gradients_other_graphs_and_parameters_of_the_loss_are_summed_over_replicas(four_ranks):
    results = four_ranks.run(wind)
    torch.manual_seed(0)
    model, loss_fn = Winding(), ScaledLoss()
    for step, ways in enumerate(WAYS):
        seen = model.seen.clone()
        after = seen
        for call in range(len(ways[0])):
            total = 0.0
            before = after
            for replica in range(2):
                x, t = winding_batch(step, replica, call)
                model.seen = before.clone()
                for part, target in zip(x.tensor_split(2), t.tensor_split(2), strict=True):
                    loss = loss_fn(model(part, ways[replica][call]), target) * len(part) / sum(SIZES)
                    loss.backward()
                    total += loss.detach()
                after = model.seen if replica == 0 else after
        model.seen = after
        expected = gradients_of(model.named_parameters())
        for rank, (of_rank, _) in enumerate(results):
            loss, gradients, scale = of_rank[step]
            torch.testing.assert_close(loss, total)
            for name, gradient in gradients.items():
                assert (gradient is None) == (expected[name] is None), name
                torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}")
            if rank % 2:
                torch.testing.assert_close(scale, loss_fn.scale.grad)
        model.zero_grad()
        loss_fn.zero_grad()
    seen = [value for _, value in results if value is not None]
    assert len(seen) == 2
    for value in seen:
        torch.testing.assert_close(value, model.seen)


class TableTwice(Layered, table=lambda: nn.Embedding(5, 4, sparse=True), last=4):
    """Uses a table with sparse gradients as a weight, too, where it is told."""

    def forward(self, ids, way=0):
        x = self.table(ids)
        return self.last(torch.tanh(x @ self.table.weight.t()) @ self.table.weight if way else x)


def sparse_here_and_dense_there(mesh):
    replica = square_mesh()["data"].get_local_rank()
    torch.manual_seed(0)
    model, (ids, t) = TableTwice(), winding_batch(0, replica, 0)
    pipe = pipe_of(model, ids, chunks=2, balance=["table"])
    results = []
    for ways in ((0, 1), (1, 1), (0, 0)):
        pipe.forward_backward(ids, ways[replica], target=t, loss_fn=F.mse_loss)
        results.append(gradients_of(pipe.named_parameters()))
        pipe.zero_grad()
    return results


def test_a_gradient_that_is_sparse_on_one_replica_and_dense_on_another_is_summed(four_ranks):
    results = four_ranks.run(sparse_here_and_dense_there)
    torch.manual_seed(0)
    model = TableTwice()
    for step, ways in enumerate(((0, 1), (1, 1), (0, 0))):
        model.zero_grad()
        for replica, way in enumerate(ways):
            ids, t = winding_batch(0, replica, 0)
            (F.mse_loss(model(ids, way), t) * len(ids) / sum(SIZES)).backward()
        expected = gradients_of(model.named_parameters())
        for of_rank in results:
            torch.testing.assert_close(of_rank[step], {name: expected[name] for name in of_rank[step]})


class OwnLoss(Layered, emb=lambda: nn.Embedding(11, 8), hidden=8, head=(8, 11)):
    """Takes the loss itself, a mean over the tokens that are not 0, and returns it beside its output."""

    def forward(self, ids, labels):
        out = self.head(torch.tanh(self.hidden(self.emb(ids))))
        return {"loss": F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=0), "out": out}


def padded_tokens(batch, length, seed):
    ids, labels = tokens(batch, length, seed)
    return ids, torch.where(torch.arange(length) < torch.arange(1, batch + 1)[:, None], labels, 0)


def train_own_loss(mesh, steps):
    replica = square_mesh()["data"].get_local_rank()
    torch.manual_seed(0)
    ids, labels = padded_tokens(*steps[0][0])
    mesh = square_mesh()
    pipe = fxpipe.pipeline(
        OwnLoss(), mesh["pipe"], 2, data_parallel=mesh["data"], example_args=(ids, labels), balance=["hidden"], **QUICK
    )
    results = []
    for step in steps:
        loss = pipe.forward_backward(*padded_tokens(*step[replica]), loss_fn=lambda out: out["loss"])
        results.append((loss, gradients_of(pipe.named_parameters())))
        pipe.zero_grad()
    return results


def test_a_loss_of_the_model_itself_is_that_of_the_tokens_of_all_replicas(four_ranks):
    steps = [[(6, 7, 1), (3, 7, 2)], [(5, 7, 3), (8, 7, 4)]]
    results = four_ranks.run(train_own_loss, steps)
    torch.manual_seed(0)
    model = OwnLoss()
    for number, step in enumerate(steps):
        model.zero_grad()
        batches = [padded_tokens(*batch) for batch in step]
        loss = model(*(torch.cat(parts) for parts in zip(*batches, strict=True)))["loss"]
        loss.backward()
        expected = gradients_of(model.named_parameters())
        for of_rank in results:
            own, gradients = of_rank[number]
            torch.testing.assert_close(own, loss.detach())
            torch.testing.assert_close(gradients, {name: expected[name] for name in gradients})


# -- Clipping, optimizers, state -------------------------------------------------------------------------------------


def clip(mesh, max_norm, norm_type):
    replica = square_mesh()["data"].get_local_rank()
    model, batches, cuts = model_of(Mixed, UNEVEN)
    pipe = pipe_of(model, batches[0][0][0][0], balance=cuts[2])
    x, t = batches[0][replica][0]
    pipe.forward_backward(x, target=t, loss_fn=token_loss)
    norm = fxpipe.distributed.clip_grad_norm_(pipe, max_norm, norm_type)
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters()}
    first = next(pipe.parameters())
    first.grad = torch.full_like(first, float("inf")) if mesh.get_rank() % 2 else first.grad
    error = raised(fxpipe.distributed.clip_grad_norm_, pipe, 1.0, error_if_nonfinite=True)
    with pipe.no_sync():
        pipe.forward_backward(x, target=t, loss_fn=token_loss)
    return norm, gradients, error, raised(fxpipe.distributed.clip_grad_norm_, pipe, 1.0)


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.1, 2.0), (0.05, float("inf"))])
def test_the_norm_of_gradients_is_that_of_the_plain_model_on_every_rank(four_ranks, max_norm, norm_type):
    results = four_ranks.run(clip, max_norm, norm_type)
    model, *_ = model_of(Mixed, UNEVEN)
    gradients = train_plain(Mixed, UNEVEN[:1], token_loss, 3)[0][1]
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    for own, clipped, (kind, text, _), unsynced in results:
        torch.testing.assert_close(own, norm)
        assert torch.equal(own, results[0][0])
        torch.testing.assert_close(clipped, {name: dict(model.named_parameters())[name].grad for name in clipped})
        assert kind is RuntimeError
        assert "gradients of all ranks is inf" in text
        assert unsynced[0] is StateError
        assert "within no_sync()" in unsynced[1]


def zero_redundancy(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script, which torch.distributed.optim uses
        from torch.distributed.optim import ZeroRedundancyOptimizer
    mesh = square_mesh()
    replica = mesh["data"].get_local_rank()
    model, batches, cuts = model_of(Mixed, UNEVEN)
    pipe = pipe_of(model, batches[0][0][0][0], balance=cuts[2])
    optimizer = ZeroRedundancyOptimizer(
        pipe.parameters(), optimizer_class=torch.optim.Adam, process_group=mesh["data"].get_group(), lr=0.1
    )
    for step in batches:
        x, t = step[replica][0]
        optimizer.zero_grad()
        pipe.forward_backward(x, target=t, loss_fn=token_loss)
        optimizer.step()
    return {name: p.detach() for name, p in pipe.named_parameters()}, len(optimizer.optim.state)


def test_the_state_of_the_optimizer_is_sharded_over_replicas(four_ranks):
    results = four_ranks.run(zero_redundancy)
    model, batches, _ = model_of(Mixed, UNEVEN)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in batches:
        optimizer.zero_grad()
        add_plain_gradients(model, [calls[0] for calls in step], token_loss, 3)
        optimizer.step()
    names = set()
    for own, _ in results:
        for name, value in own.items():
            torch.testing.assert_close(value, dict(model.named_parameters())[name].detach(), rtol=1e-4, atol=1e-5)
        names |= own.keys()
    assert names == dict(model.named_parameters()).keys()
    for rank in range(2):
        assert results[rank][1] + results[rank + 2][1] == len(results[rank][0])
        assert results[rank][1] > 0


def save_and_evaluate(mesh, folder):
    mesh = square_mesh()
    replica = mesh["data"].get_local_rank()
    model, batches, cuts = model_of(Mixed, UNEVEN)
    pipe = pipe_of(model, batches[0][0][0][0], balance=cuts[2])
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)

    def step():
        x, t = batches[0][replica][0]
        loss = pipe.forward_backward(x, target=t, loss_fn=token_loss).item()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step()
    dcp.save(pipe.state_dict(), checkpoint_id=folder)
    losses, outputs = [step()], None
    dcp_state = pipe.state_dict()
    dcp.load(dcp_state, checkpoint_id=folder)
    pipe.load_state_dict(dcp_state)
    losses.append(step())
    if replica:  # the other one does not evaluate
        pipe.eval()
        with torch.no_grad():
            outputs = pipe(batches[1][0][0][0])
        pipe.train()
    step()
    return losses, outputs


def test_checkpoints_are_those_of_one_model_and_a_replica_evaluates_by_itself(four_ranks, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = four_ranks.run(save_and_evaluate, str(tmp_path))
        model, batches, _ = model_of(Mixed, UNEVEN)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    model.load_state_dict(state)
    expected = add_plain_gradients(model, [calls[0] for calls in batches[0]], token_loss, 3)
    for losses, _ in results:
        assert losses[0] == losses[1] == pytest.approx(expected.item(), rel=1e-5)
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.testing.assert_close(results[3][1], model.eval()(batches[1][0][0][0]).detach(), rtol=1e-4, atol=1e-5)
    assert [outputs is None for _, outputs in results] == [True, True, True, False]


# -- Failures and misuse ---------------------------------------------------------------------------------------------


def fail_in_one_replica(mesh, where):
    replica = square_mesh()["data"].get_local_rank()
    model, batches, cuts = model_of(Mixed, UNEVEN)
    pipe = pipe_of(model, batches[0][0][0][0], balance=cuts[2], timeout=30.0)
    x, t = batches[0][replica][0]
    before = pipe.forward_backward(x, target=t, loss_fn=token_loss).item()
    gradients = [p.grad.clone() for p in pipe.parameters()]
    calls = []

    def loss_fn(out, target):
        calls.append(1)
        if replica == 1 and len(calls) == 2:
            raise ValueError("boom")
        return token_loss(out, target)

    def hook(gradient):
        raise ValueError("boom")

    handle = None
    if where == "loss":
        error = raised(pipe.forward_backward, x, target=t, loss_fn=loss_fn)
    else:
        handle = next(iter(pipe.parameters())).register_hook(hook) if mesh.get_rank() == 2 else None
        error = raised(pipe.forward_backward, x, target=t, loss_fn=token_loss)
    assert all(map(torch.equal, gradients, [p.grad for p in pipe.parameters()]))
    if handle is not None:
        handle.remove()
    pipe.zero_grad()
    after = pipe.forward_backward(x, target=t, loss_fn=token_loss).item()
    assert all(map(torch.equal, gradients, [p.grad for p in pipe.parameters()]))
    return error, before, after


@pytest.mark.parametrize("where", ["loss", "hook"])
def test_a_rank_that_fails_in_one_replica_stops_all_and_the_next_step_works(four_ranks, where):
    results = four_ranks.run(fail_in_one_replica, where)
    failed = 3 if where == "loss" else 2
    for rank, ((kind, text, seconds), before, after) in enumerate(results):
        assert kind is (ValueError if rank == failed else DistributedError)
        if rank != failed:
            assert f"rank {failed - 2} of replica 1 has failed" in text
            assert "ValueError: boom" in text
        assert seconds < 10
        assert before == after == results[0][1]


def misuse(mesh):
    mesh = square_mesh()
    replica = mesh["data"].get_local_rank()
    x = torch.randn(4, 4)
    errors = [
        raised(fxpipe.pipeline, Dense(), mesh, 2),
        raised(fxpipe.pipeline, Dense(), mesh["pipe"], 2, data_parallel=mesh),
        raised(fxpipe.pipeline, Dense(), mesh["pipe"], 2, data_parallel=mesh["pipe"]),
        raised(fxpipe.pipeline, Dense(), mesh["pipe"], 2, data_parallel=4),
        raised(fxpipe.pipeline, Dense(), ["cpu"] * 2, 2, data_parallel=mesh["data"]),
        raised(pipe_of, Dense(), x, schedule=("1f1b", "gpipe")[replica]),
        raised(pipe_of, nn.parallel.DistributedDataParallel(Dense(), process_group=mesh["data"].get_group()), x),
    ]
    sharded = Dense()
    fully_shard(sharded, mesh=mesh["data"])
    errors.append(raised(pipe_of, sharded, x))
    pipe = pipe_of(Dense(), x)
    with pipe.no_sync() if replica else contextlib.nullcontext():
        errors.append(raised(pipe.forward_backward, x, target=x, loss_fn=F.mse_loss))
    reduction = ("mean", "sum")[replica]
    errors.append(raised(pipe.forward_backward, x, target=x, loss_fn=F.mse_loss, reduction=reduction))
    next(pipe.parameters()).requires_grad_(replica == 0)
    errors.append(raised(pipe.forward_backward, x, target=x, loss_fn=F.mse_loss))
    next(pipe.parameters()).requires_grad_(True)
    assert pipe.forward_backward(x, target=x, loss_fn=F.mse_loss) > 0
    return [(issubclass(kind, FxpipeError), text) for kind, text, _ in errors]


def test_misuse_of_replicas_is_an_error_on_all_ranks(four_ranks):
    words = [
        'give devices=mesh["pipe"], data_parallel=mesh["data"]',
        "data_parallel is a mesh of 2 dimensions",
        "data_parallel has rank",
        "data_parallel is an int",
        "is for a pipe over processes",
        "ranks differ in schedule (rank 0 of replica 0, rank 1 of replica 0: '1f1b'; ",
        "give model.module",
        "fully_shard",
        "within no_sync() and without",
        "different values of reduction",
        "train different parameters",
    ]
    for errors in four_ranks.run(misuse):
        for (is_ours, text), word in zip(errors, words, strict=True):
            assert is_ours
            assert word in text
