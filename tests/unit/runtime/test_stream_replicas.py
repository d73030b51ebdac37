"""Streams, also with replicas of stages, come to the same bits as delayed updates, in any order of workers."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive import contrast
from helpers.delayed_updates import RULES, rounds_of_replicas, rule_of_replicas, train_delayed
from helpers.oracle import closing
from helpers.plan_hardware import hardware, narrow_then_wide
from helpers.residual_blocks import WIDTH, Block, Faulty, Rows, assert_same, batches, blocks, momentum, sgd, train
from helpers.tried_orders import InterleavedExecutor, JitteredExecutor
from torch import nn

import fxpipe
from fxpipe.cluster import Link
from fxpipe.optim import StageOptimizer
from fxpipe.runtime.stream import StageWeights

QUICK = {"progress": False}
REPLICAS = [(2, 1), (1, 2), (3, 1), (2, 1, 1), (1, 3, 1), (2, 3), (3, 2, 1), (2, 2), (3,)]


def piped(model, replicas, schedule="pipedream", chunks="auto", executor=None, **options):
    """A block of the model for each stage, with so many replicas."""
    n = len(replicas)
    planning = {"balance": [str(j) for j in range(n - 1)]} if n > 1 else {}
    example = {"example_args": (torch.ones(6, WIDTH),)}
    plan = fxpipe.plan(model, n, chunks=chunks, schedule=schedule, **planning, **example, **QUICK)
    plan = replace(plan, replica_devices=tuple(("cpu",) * count for count in replicas))
    pipe = fxpipe.pipeline(model, ["cpu"] * sum(replicas), chunks, plan=plan, schedule=schedule, **QUICK, **options)
    if executor is not None:
        pipe._fxpipe.engine.executor.close()
        pipe._fxpipe.engine.executor = executor
    return closing(pipe)


def simple_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def delayed(plain, data, replicas, optimizer=momentum, loss_fn=F.mse_loss):
    """Weight stashing, each mini-batch as a whole."""
    rule = rule_of_replicas(replicas)
    return train_delayed([*plain], data, loss_fn, optimizer, rule, replicas=replicas, rounds=replicas)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_stream_comes_to_the_weights_of_delayed_updates_by_rounds(replicas):
    """Also where the last round has fewer mini-batches than replicas."""
    plain, count = blocks(len(replicas)), 4 * max(replicas) + 5
    data = batches(count)
    with piped(copy.deepcopy(plain), replicas) as pipe:
        stream, losses = train(pipe, data)
        want, _ = delayed(plain, data, replicas)
        assert torch.equal(torch.stack(losses), torch.stack(want))
        assert_same(pipe, plain)
        assert stream.applied == (count,) * len(replicas)
        assert stream.versions_held == tuple(pipe.plan.weight_versions(j) for j in range(len(replicas)))


@pytest.mark.parametrize(("replicas", "seed"), [((2, 1), 0), ((2, 1), 1), ((2, 3), 2), ((1, 1, 1), 3)])
def test_bits_do_not_depend_on_which_replica_is_first(replicas, seed):
    plain, data = blocks(len(replicas)), batches(15)
    delayed(plain, data, replicas)
    for executor in (InterleavedExecutor(seed), JitteredExecutor([torch.device("cpu")] * sum(replicas), seed)):
        with piped(blocks(len(replicas)), replicas, executor=executor) as pipe:
            train(pipe, data)
            assert_same(pipe, plain)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2)])
def test_with_vertical_sync_all_stages_have_the_rounds_of_the_one_with_most_replicas(replicas):
    plain, data, most = blocks(2), batches(14), max(replicas)
    flight = replicas[0] * (1 + -(-replicas[1] // replicas[0]))

    def rule(n, j, t):
        return max(0, t // most * most + 1 - flight) // most

    with piped(copy.deepcopy(plain), replicas) as pipe:
        _, losses = train(pipe, data, vertical_sync=True)
        want, _ = train_delayed([*plain], data, F.mse_loss, momentum, rule, 1, replicas, (most, most))
        assert torch.equal(torch.stack(losses), torch.stack(want))
        assert_same(pipe, plain)


@pytest.mark.parametrize(("replicas", "chunks"), [((2, 1), 3), ((1, 2), 4), ((3, 2), 4), ((3, 2), 6)])
def test_double_buffering_shares_each_mini_batch_among_the_replicas(replicas, chunks):
    """Turns go on through the stream: with 4 micro-batches the next mini-batch begins with another replica of three."""
    plain, data = blocks(2), batches(7)
    with piped(copy.deepcopy(plain), replicas, "pipedream_2bw", chunks) as pipe:
        stream, losses = train(pipe, data)
        want, _ = train_delayed([*plain], data, F.mse_loss, momentum, RULES["2bw"], chunks, replicas)
        assert torch.equal(torch.stack(losses), torch.stack(want))
        assert_same(pipe, plain)
        assert stream.versions_held == (2, 2)


@pytest.mark.parametrize(("replicas", "chunks"), [((2, 1), 4), ((1, 3), 2), ((3, 2), 4)])
def test_replicas_wait_for_the_loss_of_all_samples(replicas, chunks):
    """They share mini-batches, or take several in a round, with as many of these in flight as without cuts."""
    plain, data, rounds = blocks(2), batches(9), rounds_of_replicas(replicas, chunks)
    with piped(copy.deepcopy(plain), replicas, chunks=chunks, executor=InterleavedExecutor(3)) as pipe:
        _, losses = train(pipe, data, loss_fn=contrast, reduction="batch")
        arguments = contrast, momentum, rule_of_replicas(rounds), chunks, replicas, rounds
        want, _ = train_delayed([*plain], data, *arguments, joint=True)
        assert torch.equal(torch.stack(losses), torch.stack(want))
        assert_same(pipe, plain)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("replicas", [(2, 1), (1, 3), (2, 2)])
def test_batch_norm_sees_the_mini_batches_in_order(replicas, checkpoint):
    plain, data = blocks(2, lambda: nn.BatchNorm1d(WIDTH)), batches(11)
    with piped(copy.deepcopy(plain), replicas, checkpoint=checkpoint) as pipe:
        train(pipe, data)
        delayed(plain, data, replicas)
        assert_same(pipe, plain)


def test_deferred_batch_norm_counts_mini_batches_and_has_their_statistics():
    plain, data = blocks(2, lambda: nn.BatchNorm1d(WIDTH)), batches(6, size=8)
    states = []
    for replicas in ((1, 1), (3, 2)):
        options = {"chunks": 4, "deferred_batch_norm": True}
        with piped(copy.deepcopy(plain), replicas, "pipedream_2bw", **options) as pipe:
            train(pipe, data, StageOptimizer(pipe, torch.optim.SGD, lr=0.0))
            states.append(dict(pipe.named_buffers()))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, msg=name)
        assert "tracked" not in name or value == 6


def test_weighted_losses_are_divided_mini_batch_by_mini_batch():
    def weighted(y, t):
        weights = (t > 0).float()
        return ((y - t) ** 2 * weights).sum(), weights.sum()

    plain, data = blocks(2), batches(9)
    with piped(copy.deepcopy(plain), (2, 3)) as pipe:
        _, losses = train(pipe, data, StageOptimizer(pipe, torch.optim.SGD, lr=0.1), weighted)
        want, _ = delayed(plain, data, (2, 3), simple_sgd, lambda y, t: weighted(y, t)[0] / weighted(y, t)[1])
        torch.testing.assert_close(torch.stack(losses), torch.stack(want))
        for have, parameter in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have, parameter)


def test_parameters_of_the_loss_and_those_without_an_optimizer_get_the_gradients_of_all_mini_batches():
    data, head = batches(8), nn.Linear(WIDTH, WIDTH)
    sums = []
    for replicas in ((1, 1), (2, 3)):
        own = copy.deepcopy(head)
        with piped(blocks(2), replicas) as pipe:
            groups = {"param_groups": lambda name, p: None if name == "0.linear.bias" else {}}
            optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.0, **groups)
            train(pipe, data, optimizer, lambda y, t, own=own: F.mse_loss(own(y), t))
            sums.append([own.weight.grad, own.bias.grad, pipe.get_parameter("0.linear.bias").grad])
    for have, want in zip(*sums, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize(("seed", "schedule"), [(0, "pipedream"), (1, "pipedream_2bw"), (2, "pipedream")])
def test_losses_are_taken_in_the_order_of_the_stream(seed, schedule):
    """A loss may draw random numbers, or count; so replicas of the last stage do not take theirs as they come."""
    data, chunks, results = batches(8), 1 if schedule == "pipedream" else 2, []
    for replicas in ((1, 1), (1, 3)):
        order = []

        def noisy(y, t, order=order):
            if len(t) == 6 // chunks:  # else it verifies a mini-batch, whenever that has ended
                order.append(float(t.sum()))
            return F.mse_loss(y + torch.randn_like(y), t)

        executor = JitteredExecutor([torch.device("cpu")] * sum(replicas), seed)
        with piped(blocks(2), replicas, schedule, chunks, executor) as pipe:
            torch.manual_seed(5)
            _, losses = train(pipe, data, StageOptimizer(pipe, torch.optim.SGD, lr=0.0), noisy)
            results.append((losses, order))
    assert results[0] == results[1]
    with piped(blocks(2), (1, 3), schedule, chunks, InterleavedExecutor(seed)) as pipe:
        torch.manual_seed(5)
        assert train(pipe, data, StageOptimizer(pipe, torch.optim.SGD, lr=0.0), noisy)[1] == results[0][0]


@pytest.mark.parametrize(("replicas", "in_flight"), [((1, 1), 4), ((2, 1), 7)])
def test_a_learning_rate_that_changes_in_the_loop_is_that_of_the_last_mini_batch_of_a_round(replicas, in_flight):
    """Of mini-batches that are read from then on: some are in flight when the first loss comes."""
    plain, data = blocks(2), batches(13)
    with piped(copy.deepcopy(plain), replicas) as pipe:
        optimizer = sgd(pipe)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _loss in pipe.train_stream(data, loss_fn=F.mse_loss, optimizer=optimizer):
            scheduler.step()
        rates = [0.1 * 0.5 ** max(0, t - in_flight + 1) for t in range(13)]
        of_stages = iter(([*rates[1::2], rates[12]] if replicas == (2, 1) else rates, rates))

        def with_rates(parameters):
            own, optimizer = iter(next(of_stages)), momentum(parameters)
            optimizer.register_step_pre_hook(lambda opt, args, kwargs: opt.param_groups[0].update(lr=next(own)))
            return optimizer

        delayed(plain, data, replicas, with_rates)
        assert_same(pipe, plain)


# -- Ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "count"), [*(((3, 2), n) for n in (0, 1, 2, 4)), ((1, 1, 1, 1), 1), ((1, 1, 1, 1), 2)]
)
def test_a_stream_that_ends_within_a_round_is_updated_by_the_mean_of_what_came(replicas, count):
    """Also with too few mini-batches to fill the stages."""
    plain, data = blocks(len(replicas)), batches(count) if count else []
    with piped(copy.deepcopy(plain), replicas) as pipe:
        stream, losses = train(pipe, iter(data))
        assert len(losses) == count
        assert stream.applied == ((count,) * len(replicas) if count else ())
        delayed(plain, data, replicas)
        assert_same(pipe, plain)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 3)])
def test_another_shape_ends_the_rounds_before_it(replicas):
    """In the middle of a round: then turns of replicas and rounds do not begin together any more."""
    plain = nn.Sequential(Rows(), Rows())
    short, long = batches(7), [(torch.randn(6, 2, WIDTH), torch.randn(6, 2, WIDTH)) for _ in range(10)]
    with piped(copy.deepcopy(plain), replicas) as pipe:
        _, losses = train(pipe, [*short, *long, *short], StageOptimizer(pipe, torch.optim.SGD, lr=0.1))
        want = []
        for part in (short, long, short):
            want += delayed(plain, part, replicas, simple_sgd)[0]
        assert torch.equal(torch.stack(losses), torch.stack(want))
        assert_same(pipe, plain)


@pytest.mark.parametrize("bad", range(4, 7))
def test_an_exception_in_a_replica_drops_the_stream_and_leaves_a_pipe_that_trains(bad):
    model = nn.Sequential(nn.Sequential(Faulty(where="forward"), Block()), Block())
    with piped(model, (3, 1)) as pipe:
        optimizer = StageOptimizer(pipe, torch.optim.SGD, lr=0.1)
        data = batches(14)
        data[bad] = (data[bad][0] * 1e4, data[bad][1])
        with pytest.raises(ArithmeticError, match="too large") as caught:
            train(pipe, data, optimizer)
        assert f"of mini-batch {bad} of the stream" in caught.value.__notes__[0]
        assert "stage 0 of 2 on cpu" in caught.value.__notes__[0]
        plain = copy.deepcopy(fxpipe.unwrap(pipe))
        train(pipe, batches(7), optimizer)
        delayed(plain, batches(7), (3, 1), simple_sgd)
        assert_same(pipe, plain)


def test_replicas_that_the_first_mini_batch_is_planned_for_have_enough_in_flight():
    """Nothing is known of them before it is read."""
    model, x = narrow_then_wide(), torch.randn(24, 4)
    options = {"balance": "pipedream", "hardware": hardware(Link(1e8)), "schedule": "pipedream", **QUICK}
    with fxpipe.pipeline(model, ["cpu"] * 4, **options) as pipe:
        stream, losses = train(pipe, [(x, x)] * 12, StageOptimizer(pipe, torch.optim.SGD, lr=0.01))
        assert pipe.plan.replicas == (3, 1)
        assert (len(losses), stream.applied) == (12, (12, 12))


def test_an_update_writes_elsewhere_only_while_an_older_version_is_needed():
    p = nn.Parameter(torch.ones(3))
    weights, memory = StageWeights({"p": p}), p.data_ptr()
    first = weights.at(0)[id(p)]
    weights.begin_update(1)  # nobody needs version 0 any more
    with torch.no_grad():
        p.mul_(2)
    weights.end_update()
    assert p.data_ptr() == memory
    assert first[0] == 2
    view = weights.at(1)[id(p)]
    loss = (view * view).sum()
    weights.begin_update(1)
    with torch.no_grad():
        p.mul_(2)
    weights.end_update()
    assert p.data_ptr() != memory
    loss.backward()  # what it has saved is as it was
    assert torch.equal(view.grad, torch.full((3,), 4.0))
    assert torch.equal(weights.at(1)[id(p)], torch.full((3,), 2.0))
    assert torch.equal(weights.at(2)[id(p)], torch.full((3,), 4.0))
    assert weights.most_held == 2


# -- Also without replicas ---------------------------------------------------------------------------------------------


def test_a_stream_that_has_ended_holds_nothing():
    data = batches(5)
    inputs = [weakref.ref(x) for x, _ in data]
    with piped(blocks(3), (1, 1, 1)) as pipe:
        assert len(train(pipe, iter(data))[1]) == len(data)
        del data
        gc.collect()
        assert all(ref() is None for ref in inputs)


def test_an_interrupt_while_a_mini_batch_is_read_drops_the_stream_and_leaves_a_pipe_that_trains():
    def source():
        yield from batches(4)
        raise KeyboardInterrupt

    with piped(blocks(3), (1, 1, 1)) as pipe:
        with pytest.raises(KeyboardInterrupt):
            train(pipe, source())
        stream, losses = train(pipe, batches(4))
        assert len(losses) == 4
        assert stream.applied == (4, 4, 4)


def test_gradients_from_before_count_in_the_first_update_and_inputs_get_theirs():
    """As of an optimizer that steps without zero_grad; an input that requires grad has its gradient behind its loss."""
    plain, ((x, t),) = blocks(3), batches(1)
    bias = plain[0].linear.bias
    with piped(copy.deepcopy(plain), (1, 1, 1)) as pipe:
        own = pipe.get_parameter("0.linear.bias")
        own.grad = torch.ones_like(own)
        want = torch.autograd.grad(F.mse_loss(plain(x), t), bias)[0]
        x.requires_grad_()
        train(pipe, [(x, t)], StageOptimizer(pipe, torch.optim.SGD, lr=1.0))
        torch.testing.assert_close(own, bias - 1 - want)
        assert x.grad is not None
