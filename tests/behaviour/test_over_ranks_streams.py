"""`train_stream` over processes: bit for bit that of one process, on all ranks, and an end for all in any case."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.contrastive import contrast
from helpers.delayed_updates import RULES, train_delayed
from helpers.layered import Layered
from helpers.rank_models import Dense, ScaledLoss
from helpers.ranks import raised, square_mesh
from helpers.residual_blocks import Faulty
from torch import nn

import fxpipe
from fxpipe.errors import ArgumentError, DistributedError, LossError, StateError
from fxpipe.optim import StageOptimizer

QUICK = {"progress": False, "check": False, "hardware": "cpu"}
SOON = 5.0  # seconds, of a test that has to end well before a timeout
WIDTH, BATCH = 4, 6
DROPOUT, BATCH_NORM = partial(nn.Dropout, 0.3), partial(nn.BatchNorm1d, WIDTH)


def blocks(count, extra=nn.Identity):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), extra()) for _ in range(count)))


def batches(count, fewer_in_last=0):
    generator = torch.Generator().manual_seed(1)
    sizes = [BATCH] * (count - 1) + [BATCH - fewer_in_last]
    return [(torch.randn(b, WIDTH, generator=generator), torch.randn(b, WIDTH, generator=generator)) for b in sizes]


def piped(model, devices, stages, schedule="pipedream", **options):
    options = {"balance": [str(j) for j in range(stages - 1)]} | QUICK | options
    return fxpipe.pipeline(model, devices, schedule=schedule, example_args=(torch.ones(BATCH, WIDTH),), **options)


def weighted(y, t):
    return ((y - t) ** 2 * (t > 0)).sum(), (t > 0).sum()


def own_part(mesh, batch):
    """Inputs for the rank of the first stage, targets for that of the last, and nothing for others."""
    first, last = mesh.get_local_rank() == 0, mesh.get_local_rank() == mesh.size() - 1
    return [(x if first else None, t if last else None) for x, t in batch] if first or last else ()


def trained(pipe, data, loss_fn=F.mse_loss, kind=torch.optim.AdamW, rate=1e-2, **options):
    """Losses, state, versions and applied updates of two streams."""
    optimizer = StageOptimizer(pipe, kind, lr=rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    losses = []
    torch.manual_seed(7)
    for _ in range(2):
        stream = pipe.train_stream(data, loss_fn=loss_fn, optimizer=optimizer, **options)
        for loss in stream:
            losses.append(loss.item())
            scheduler.step()
    after = torch.rand(()).item()  # the generator stands where it would
    assert all(parameter.grad is None for parameter in pipe.parameters())
    return losses, {k: v.clone() for k, v in pipe.state_dict().items()}, stream.versions_held, stream.applied, after


CASES = {
    "stashing": (blocks, (4, DROPOUT), {}, {}, F.mse_loss),
    "vertical sync": (blocks, (4, DROPOUT), {}, {"vertical_sync": True}, F.mse_loss),
    "recomputed": (blocks, (4, DROPOUT), {"checkpoint": "always"}, {}, F.mse_loss),
    "double buffering": (blocks, (4, DROPOUT), {"schedule": "pipedream_2bw", "chunks": 4}, {}, F.mse_loss),
    "few micro-batches": (blocks, (4, BATCH_NORM), {"schedule": "pipedream_2bw", "chunks": 2}, {}, F.mse_loss),
    "weighted losses": (blocks, (4,), {"schedule": "pipedream_2bw", "chunks": 4}, {}, weighted),
    "a loss of all samples": (blocks, (4,), {"chunks": 3, "checkpoint": "always"}, {"reduction": "batch"}, contrast),
    "skips": (Dense, (), {"balance": ["blocks.0", "blocks.1", "blocks.2"]}, {}, F.mse_loss),
}


def every_case(mesh, stages, names):
    results = {}
    for name in names:
        make, arguments, options, of_stream, loss_fn = CASES[name]
        torch.manual_seed(0)
        with piped(make(*arguments), mesh, stages, **options) as pipe:
            data = own_part(mesh, batches(7, fewer_in_last=1))
            results[name] = trained(pipe, data, loss_fn, **of_stream)
    return results


def test_a_stream_over_four_ranks_is_that_of_one_process(four_ranks):
    ranks = four_ranks.run(every_case, 4, [*CASES])
    for name, (make, arguments, options, of_stream, loss_fn) in CASES.items():
        torch.manual_seed(0)
        with oracle.closing(piped(make(*arguments), ["cpu"] * 4, 4, **options)) as pipe:
            losses, state, versions, applied, after = trained(pipe, batches(7, fewer_in_last=1), loss_fn, **of_stream)
        together = {}
        for rank, result in enumerate(ranks):
            assert result[name][0] == losses, name
            together |= result[name][1]
            assert result[name][2:] == ((versions[rank],), (applied[rank],), after), name
        assert {*together} == {*state}
        assert all(torch.equal(together[key], value) for key, value in state.items()), name


# -- Ends ------------------------------------------------------------------------------------------------------------


def leave(mesh, who, how):
    """A stream that some ranks leave after the second loss; returns the losses, the updates, and those of the next."""
    pipe = piped(blocks(2), mesh, 2)
    optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
    losses, applied = [], None
    stream = pipe.train_stream(batches(12), loss_fn=F.mse_loss, optimizer=optimizer)
    held = stream if how == "close" else None
    loop = iter(stream)
    del stream
    for loss in loop:
        losses.append(loss.item())
        if len(losses) == 2 and mesh.get_rank() in who:
            break
    del loop  # as where a loop is over the call itself: nobody holds the stream
    if held is not None:
        held.close()
        applied = held.applied
    again = pipe.forward_backward(*batches(1)[0][:1], target=batches(1)[0][1], loss_fn=F.mse_loss, optimizer=optimizer)
    return len(losses), applied, again.item()


@pytest.mark.parametrize("how", ["close", "break"])
@pytest.mark.parametrize(("who", "counts", "applied"), [((0, 1), (2, 2), 5), ((0,), (2, 5), 5), ((1,), (12, 2), 12)])
def test_who_has_the_inputs_ends_the_stream_for_all(two_ranks, who, counts, applied, how):
    (first, one, loss), (second, other, same) = two_ranks.run(leave, who, how)
    assert (first, second) == counts
    assert one == other == ((applied,) if how == "close" else None)
    assert loss == same


def fragile():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Faulty(where="forward"), nn.Linear(WIDTH, WIDTH)))


def failed(function):
    """The exception of a call, with its notes."""
    kind, text, seconds = raised(function)
    assert seconds < SOON
    return kind, text


def train(pipe, data, loss_fn=F.mse_loss, **options):
    """A stream of plain SGD."""
    optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
    return pipe.train_stream(data, loss_fn=loss_fn, optimizer=optimizer, **options)


def fail_in_stage(mesh):
    torch.manual_seed(0)
    pipe = piped(fragile(), mesh, 2)
    data = batches(9)
    data[5] = data[5][0] * 1e6, data[5][1]
    stream = train(pipe, data)
    kind, text = failed(lambda: list(stream))
    return kind, text, stream.applied, [loss.item() for loss in train(pipe, batches(4))]


def test_a_stage_that_raises_stops_the_others_and_all_say_what_was_applied(two_ranks):
    ours, theirs = two_ranks.run(fail_in_stage)
    assert ours[0] is DistributedError
    assert theirs[0] is ArithmeticError
    for text in (ours[1], theirs[1]):
        assert "too large" in text
        assert "of mini-batch 5 of the stream" in text
        assert "the stream was dropped; of the updates of its mini-batches, in order, stage 1 those of 5" in text
    assert "rank 1 has failed" in ours[1]
    assert f"stage 0 those of {ours[2][0]} had been made" in ours[1]
    assert ours[2][0] in (4, 5)
    assert theirs[2] == (5,)
    assert ours[3] == theirs[3]
    assert len(ours[3]) == 4


def fail_outside(mesh):
    rank, errors = mesh.get_rank(), []
    pipe = piped(blocks(2), mesh, 2)
    stream_of = partial(train, pipe)

    def raising(data):
        yield from data
        raise OSError("the disk is gone")

    def read():
        losses = stream_of(raising(batches(3)) if rank == 0 else batches(9))
        assert all(next(losses).dim() == 0 for _ in range(3))
        next(losses)

    def in_block():
        with stream_of(batches(9)) as losses:
            for k, _ in enumerate(losses):
                if rank == 1 and k == 2:
                    raise KeyError("mine")

    errors.append(failed(read))
    errors.append(failed(in_block))
    errors.append(failed(lambda: list(stream_of(batches(9) if rank == 0 else batches(4)))))
    errors.append(failed(lambda: list(stream_of(batches(3), lambda y, t: (y - t).detach().mean()))))
    errors.append(failed(lambda: list(stream_of([x for x, _ in batches(3)] if rank == 1 else batches(3)))))

    def evaluated():
        for _ in stream_of(batches(9)):
            pipe.train(rank == 1)

    errors.append(failed(evaluated))
    pipe.train()
    assert len(list(stream_of(batches(3)))) == 3
    return errors


def test_what_goes_wrong_on_one_rank_is_an_error_on_all(two_ranks):
    ours, theirs = two_ranks.run(fail_outside)
    for (mine, text), (other, same), (kind, on_rank, words) in zip(
        ours,
        theirs,
        [
            (OSError, 0, "raised for mini-batch 3 of the stream; the 3 before it have been applied"),
            (KeyError, 1, "mine"),
            (ArgumentError, 1, "batches of rank 1, which has the last stage, has ended after 4 mini-batches"),
            (LossError, 1, "does not require grad"),
            (TypeError, 1, "mse_loss"),
            (StateError, 1, "in different modes"),
        ],
        strict=True,
    ):
        assert issubclass((mine, other)[on_rank], kind)
        assert (mine, other)[1 - on_rank] is DistributedError
        assert words in text
        assert words in same


# -- Refused ---------------------------------------------------------------------------------------------------------


def refused(mesh):
    rank, texts = mesh.get_rank(), []
    model = blocks(2)
    model[1][0].weight = model[0][0].weight
    for options in ({}, {"param_groups": lambda name, p: {} if name.endswith("bias") else None}):
        pipe = piped(model, mesh, 2)
        optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1, **options)
        stream = pipe.train_stream(batches(2), loss_fn=F.mse_loss, optimizer=optimizer)
        texts.append(failed(stream.__next__)[1])
    pipe = piped(blocks(2), mesh, 2)
    optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
    texts.append(
        failed(lambda: pipe.train_stream([], loss_fn=F.mse_loss, optimizer=optimizer, vertical_sync=rank == 0))[1]
    )
    with pipe.train_stream(batches(9), loss_fn=F.mse_loss, optimizer=optimizer) as stream:
        next(stream)
        x, t = batches(1)[0]
        calls = (
            optimizer.step,
            lambda: pipe.forward_backward(x, target=t, loss_fn=F.mse_loss),
            lambda: fxpipe.distributed.clip_grad_norm_(pipe, 1.0),
            lambda: nn.utils.clip_grad_norm_(pipe.parameters(), 1.0),
        )
        for call in calls:
            texts.append(failed(call)[1])
        next(stream)
    return texts


def test_what_cannot_be_a_stream_over_ranks_is_refused_by_name(two_ranks):
    for tied, left_out, differing, *called in two_ranks.run(refused):
        assert "'0.0.weight' is used by stages 0 and 1" in tied
        assert "'0.0.weight' is used by stages of several ranks" in left_out
        assert "ranks differ in vertical_sync (rank 0: True; rank 1: False)" in differing
        assert all("in the middle of a stream" in text for text in called)


# -- Replicas --------------------------------------------------------------------------------------------------------


def mean_of_positive(y, t):
    return ((y - t) ** 2 * (t > 0)).sum() / (t > 0).sum()


SQUARED = partial(F.mse_loss, reduction="sum")
TWO_BW = {"schedule": "pipedream_2bw", "chunks": 3}
# Options of the pipe and of the stream, loss, the same of the union of mini-batches, rule of versions.
OVER_REPLICAS = {
    "stashing": ({}, {}, F.mse_loss, F.mse_loss, "stashing"),
    "vertical sync": ({}, {"vertical_sync": True}, F.mse_loss, F.mse_loss, "vertical sync"),
    "double buffering": (TWO_BW, {}, F.mse_loss, F.mse_loss, "2bw"),
    "recomputed": (TWO_BW | {"checkpoint": "always"}, {}, F.mse_loss, F.mse_loss, "2bw"),
    "sums": ({}, {"reduction": "sum"}, SQUARED, SQUARED, "stashing"),
    "weighted": ({}, {}, weighted, mean_of_positive, "stashing"),
    "weighted, double buffering": (TWO_BW, {}, weighted, mean_of_positive, "2bw"),
}
UNEVEN = ((6, 3), (6, 4), (2, 5), (6, 6), (1, 6), (4, 6), (6, 2))  # samples, by mini-batch and replica


def of_replicas(sizes=UNEVEN):
    """By replica, its mini-batches."""
    generator = torch.Generator().manual_seed(1)
    pairs = [
        [(torch.randn(b, WIDTH, generator=generator), torch.randn(b, WIDTH, generator=generator)) for b in each]
        for each in sizes
    ]
    return [[each[replica] for each in pairs] for replica in range(2)]


def of_union(data):
    return [tuple(torch.cat(parts) for parts in zip(*pairs, strict=True)) for pairs in zip(*data, strict=True)]


def in_square(model, **options):
    """A pipe of two stages and two replicas, and the number of this replica."""
    square = square_mesh()
    return piped(model, square["pipe"], 2, data_parallel=square["data"], **options), square["data"].get_local_rank()


def over_replicas(mesh):
    results = {}
    for name, (options, of_stream, loss_fn, _, _) in OVER_REPLICAS.items():
        torch.manual_seed(0)
        pipe, replica = in_square(blocks(2), **options)
        rate = 0.01 if "sum" in name else 0.1
        optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=rate, momentum=0.9)
        data = own_part(square_mesh()["pipe"], of_replicas()[replica])
        stream = pipe.train_stream(data, loss_fn=loss_fn, optimizer=optimizer, **of_stream)
        losses = [loss.item() for loss in stream]
        results[name] = losses, {k: v.clone() for k, v in pipe.state_dict().items()}, stream.applied
        results[name] += (stream.versions_held,)
        pipe.close()
    return results


def test_a_stream_of_replicas_is_that_of_their_mini_batches_together(four_ranks):
    ranks = four_ranks.run(over_replicas)
    for name, (_, _, _, loss_fn, rule) in OVER_REPLICAS.items():
        torch.manual_seed(0)
        plain, rate = blocks(2), 0.01 if "sum" in name else 0.1
        optimizer = lambda parameters, rate=rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9)  # noqa: E731
        want, _ = train_delayed([*plain], of_union(of_replicas()), loss_fn, optimizer, RULES[rule])
        state = plain.state_dict()
        for rank, result in enumerate(ranks):
            losses, own, applied, versions = result[name]
            assert losses == ranks[0][name][0], name
            assert losses == pytest.approx([loss.item() for loss in want], rel=1e-4), name
            torch.testing.assert_close(own, {key: state[key] for key in own}, msg=lambda text, n=name: f"{n}: {text}")
            assert all(torch.equal(value, ranks[rank % 2][name][1][key]) for key, value in own.items()), name
            assert (applied, versions) == ((7,), (2 if rule != "stashing" else 2 - rank % 2,)), name
        assert {key for result in ranks for key in result[name][1]} == {*state}


def random_replicas(mesh):
    pipe, replica = in_square(blocks(2, DROPOUT), schedule="pipedream_2bw", chunks=2)
    data = own_part(square_mesh()["pipe"], of_replicas([(4, 4)] * 5)[replica])
    return trained(pipe, data)[:2]


def test_replicas_draw_the_numbers_of_the_mini_batches_together(four_ranks):
    with oracle.closing(piped(blocks(2, DROPOUT), ["cpu"] * 2, 2, schedule="pipedream_2bw", chunks=4)) as pipe:
        losses, state, *_ = trained(pipe, of_union(of_replicas([(4, 4)] * 5)))
    for own, part in four_ranks.run(random_replicas):
        assert own == pytest.approx(losses, rel=1e-4)
        torch.testing.assert_close(part, {key: state[key] for key in part})


def left_gradients(pipe, data):
    loss_fn = ScaledLoss()
    optimizer = StageOptimizer(
        pipe, torch.optim.SGD, lr=0.1, param_groups=lambda name, p: None if name.endswith("bias") else {}
    )
    before = {name: p.clone() for name, p in pipe.named_parameters() if name.endswith("bias")}
    losses = [loss.item() for loss in pipe.train_stream(data, loss_fn=loss_fn, optimizer=optimizer)]
    assert all(torch.equal(pipe.get_parameter(name), value) for name, value in before.items())
    return losses, {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}, loss_fn.scale.grad


def left_gradients_of_replicas(mesh):
    pipe, replica = in_square(blocks(2))
    return left_gradients(pipe, of_replicas()[replica])


def test_gradients_that_no_update_takes_are_those_of_all_replicas(four_ranks):
    with oracle.closing(piped(blocks(2), ["cpu"] * 2, 2)) as pipe:
        losses, gradients, scale = left_gradients(pipe, of_union(of_replicas()))
    assert {*gradients} == {"0.0.bias", "1.0.bias"}
    for rank, (own, part, own_scale) in enumerate(four_ranks.run(left_gradients_of_replicas)):
        assert own == pytest.approx(losses, rel=1e-4)
        assert [*part] == [f"{rank % 2}.0.bias"]
        torch.testing.assert_close(part, {name: gradients[name] for name in part})
        if rank % 2:
            torch.testing.assert_close(own_scale, scale)


class Bags(
    Layered,
    bag=lambda: nn.EmbeddingBag(9, WIDTH, sparse=True, mode="sum"),
    norm=BATCH_NORM,
    seen=lambda: torch.zeros(()),
):
    """Sparse gradients, and buffers that forward changes."""

    def forward(self, ids):
        self.seen.add_(ids.float().mean())
        return self.norm(self.bag(ids))


class OfFirst(Layered, calls=lambda: 0):
    """A stage of the plain model, whose buffers change in every other call: in those for the first replica."""

    def forward(self, x):
        before, y = {name: buffer.clone() for name, buffer in self.stage.named_buffers()}, self.stage(x)
        for name, buffer in self.stage.named_buffers() if self.calls % 2 else ():
            buffer.data.copy_(before[name])  # which backward does not notice
        self.calls += 1
        return y


def bags(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(Bags(), nn.Linear(WIDTH, WIDTH))
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 9, (5, 2, 4, 3), generator=generator)
    square = square_mesh()
    replica = square["data"].get_local_rank()
    pipe = fxpipe.pipeline(
        model, square["pipe"], data_parallel=square["data"], schedule="pipedream", balance=["0"],
        example_args=(ids[0, 0],), **QUICK,
    )  # fmt: skip
    stream = train(pipe, [(each[replica], torch.ones(4, WIDTH)) for each in ids])
    return [loss.item() for loss in stream], pipe.state_dict()


def test_sparse_gradients_are_summed_and_buffers_are_those_of_the_first_replica(four_ranks):
    results = four_ranks.run(bags)
    torch.manual_seed(0)
    plain = nn.Sequential(OfFirst(stage=Bags()), nn.Linear(WIDTH, WIDTH))
    ids = torch.randint(0, 9, (5, 2, 4, 3), generator=torch.Generator().manual_seed(2))
    data = [(each.flatten(0, 1), torch.ones(8, WIDTH)) for each in ids]
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    losses, _ = train_delayed([*plain], data, F.mse_loss, optimizer, RULES["stashing"], chunks=2)
    want = {key.replace("stage.", ""): value for key, value in plain.state_dict().items()}
    for rank, (own, state) in enumerate(results):
        assert own == pytest.approx([loss.item() for loss in losses], rel=1e-4)
        torch.testing.assert_close(state, {name: want[name] for name in state})
        assert all(torch.equal(value, results[rank % 2][1][name]) for name, value in state.items())


class Single(Layered, linear=WIDTH):
    """Another graph for inputs in double precision, which give the same values."""

    def forward(self, x):
        return torch.tanh(self.linear(x.float()))


def dtypes_of_replicas():
    """The second replica needs another graph in the middle of the stream."""
    first, second = of_replicas()
    second[3:5] = [(x.double(), t) for x, t in second[3:5]]
    return first, second


def other_graphs_of_replicas(mesh):
    pipe, replica = in_square(nn.Sequential(Single(), Single()))
    return [loss.item() for loss in train(pipe, dtypes_of_replicas()[replica])], pipe.state_dict()


def test_another_graph_in_one_replica_begins_anew_in_all(four_ranks):
    results = four_ranks.run(other_graphs_of_replicas)
    torch.manual_seed(0)
    plain, union, want = nn.Sequential(Single(), Single()), of_union(dtypes_of_replicas()), []
    for part in (union[:3], union[3:5], union[5:]):
        losses, _ = train_delayed([*plain], part, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), RULES["stashing"])
        want += [loss.item() for loss in losses]
    for own, state in results:
        assert own == pytest.approx(want, rel=1e-4)
        torch.testing.assert_close(state, {name: plain.state_dict()[name] for name in state})


def ends_of_replicas(mesh):
    pipe, replica = in_square(blocks(2))
    optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
    first, rank = mesh.get_rank() % 2 == 0, mesh.get_rank()
    data = of_replicas([(4, 4)] * 9)[replica]
    results = []
    shorter = pipe.train_stream(data[:5] if replica and first else data, loss_fn=F.mse_loss, optimizer=optimizer)
    results.append((len([*shorter]), shorter.applied))
    left = pipe.train_stream(data, loss_fn=F.mse_loss, optimizer=optimizer)
    with left:
        count = 0
        for _ in left:
            count += 1
            if rank == 2 and count == 2:
                break
    results.append((count, left.applied))
    pipe.eval()
    with torch.no_grad():
        output = pipe(data[0][0])
    pipe.train()
    again = pipe.forward_backward(data[0][0], target=data[0][1], loss_fn=F.mse_loss)
    return results, again.item(), output, pipe.state_dict()


def test_a_stream_ends_with_the_first_replica_that_ends(four_ranks):
    results = four_ranks.run(ends_of_replicas)
    for rank, (((count, applied), (_, after)), again, output, state) in enumerate(results):
        assert (count, applied) == (5, (5,))
        assert after == (5,)
        assert again == results[0][1]
        assert (output is None) == (rank % 2 == 0)
        assert all(torch.equal(value, results[rank % 2][3][key]) for key, value in state.items())
    assert [counts[1][0] for counts, *_ in results] == [5, 5, 2, 5]


def failures_of_replicas(mesh):
    torch.manual_seed(0)
    rank, errors = mesh.get_rank(), []
    pipe, replica = in_square(fragile())
    data = of_replicas([(4, 4)] * 9)[replica]

    def streamed(data, *arguments, **options):
        return [loss.item() for loss in train(pipe, data, *arguments, **options)]

    def raising():
        yield from data[:3]
        raise OSError("the disk is gone")

    large = [*data[:5], (data[5][0] * 1e6, data[5][1]), *data[6:]] if replica else data
    errors.append(failed(lambda: streamed(large)))
    errors.append(failed(lambda: streamed(raising() if rank == 2 else data)))
    errors.append(failed(lambda: streamed(data, F.mse_loss if replica else weighted)))
    errors.append(failed(lambda: streamed(data, reduction=("mean", "sum")[replica])))
    with pipe.no_sync():
        errors.append(failed(lambda: streamed(data)))
        pipe.forward_backward(data[0][0], target=data[0][1], loss_fn=F.mse_loss)
    errors.append(failed(lambda: streamed(data)))
    pipe.zero_grad()
    losses = streamed(data)
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    if rank == 2:  # as an update that the others have not made
        errors.append(failed(lambda: streamed(raising())))
        next(pipe.parameters()).data.add_(1.0)
    else:
        errors.append(failed(lambda: streamed(data)))
    errors.append(failed(lambda: streamed(data)))
    x, t = data[0]
    errors.append(failed(lambda: pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)))
    pipe.load_state_dict(state)
    return errors, losses, len(streamed(data))


def test_what_fails_in_one_replica_stops_all_and_the_next_stream_works(four_ranks):
    results = four_ranks.run(failures_of_replicas)
    for rank, (errors, losses, count) in enumerate(results):
        large, read, kinds, reductions, unsynced, behind, *_, differing, in_step = errors
        assert large[0] is (ArithmeticError if rank == 3 else DistributedError)
        assert "of mini-batch 5 of the stream" in large[1]
        assert f"of the updates of its mini-batches, in order, stage {rank % 2} those of" in large[1]
        assert ("rank 1 of replica 1 has failed" in large[1]) == (rank != 3)
        assert read[0] is (OSError if rank == 2 else DistributedError)
        assert "the 3 before it have been applied" in read[1]
        assert "loss_fn returns (total, weight) on some replicas" in kinds[1]
        assert "ranks differ in reduction" in reductions[1]
        assert "train_stream within no_sync()" in unsynced[1]
        assert "train_stream behind forward_backward within no_sync()" in behind[1]
        for text in (differing[1], in_step[1]):
            assert "replicas have different weights of the stage of rank 0" in text
        assert losses == results[0][1]
        assert len(losses) == count == 9


def unequal_means(mesh):
    pipe, replica = in_square(blocks(2))
    ((x, t),) = of_replicas([(4, 4)])[replica]
    t = t if replica else torch.where(torch.arange(4)[:, None] < 1, t, 0.0)
    few = train(pipe, [(x, t)] * 3, lambda y, t: ((y - t) ** 2)[t != 0].mean())
    return failed(lambda: list(few))


def test_a_mean_over_other_numbers_of_elements_on_each_replica_is_refused(four_ranks):
    for kind, text in four_ranks.run(unequal_means):
        assert kind in (LossError, DistributedError)
        assert "LossError" in text or kind is LossError
