"""Gradients go to the other replicas as soon as they are complete, and their sums are those of all replicas."""

import copy
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.rank_models import DENSE_CUTS, Dense
from helpers.ranks import square_mesh
from torch import nn

import fxpipe
from fxpipe._torch.process_groups import ProcessGroupGloo
from fxpipe.distributed import replicas
from fxpipe.distributed.replicas import GradientReduction, Replicas, buckets_of
from fxpipe.errors import DistributedError, InternalError
from fxpipe.runtime.run import Run


def watch_reduction(mesh, schedule):
    """The actions of a rank in the third step, and the gradients that the reducer is given."""
    torch.manual_seed(0)
    events, mesh = [], square_mesh()
    perform, give = Run.perform, GradientReduction.give

    def noted(step, action):
        events.append(("begin", str(action)))
        perform(step, action)
        events.append(("end", str(action)))

    def noted_gradient(reduction, key, gradient):
        events.append(("give", key))
        give(reduction, key, gradient)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "perform", noted)
        patch.setattr(GradientReduction, "give", noted_gradient)
        x = torch.randn(8, 4)
        balance = DENSE_CUTS[4 if schedule == "interleaved_1f1b" else 2]
        pipe = fxpipe.pipeline(
            Dense(), mesh["pipe"], 4, data_parallel=mesh["data"], schedule=schedule, balance=balance,
            example_args=(x,), hardware="cpu", progress=False, check=False,
        )  # fmt: skip
        for _ in range(3):
            events.clear()
            pipe.forward_backward(x, target=x, loss_fn=F.mse_loss)
    return events


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_gradients_go_to_the_other_replicas_while_the_last_backward_runs(four_ranks, schedule):
    for rank, events in enumerate(four_ranks.run(watch_reduction, schedule)):
        kinds = [kind for kind, _ in events]
        places = [place for place, kind in enumerate(kinds) if kind == "give"]
        assert len(places) == 4, rank  # two blocks of weight and bias
        for place in places:  # within an action, not behind it
            assert kinds[:place].count("begin") == kinds[:place].count("end") + 1


def test_buckets_are_in_the_order_in_which_a_backward_completes_gradients(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 32)
    half = {"dtype": torch.float16}
    parameters = {
        ("c", 1): torch.ones(4), ("d", 1): torch.ones(4), ("e", 1): torch.ones(2, **half),
        ("a", 0): torch.ones(20), ("b", 0): torch.ones(2), ("f", 1): torch.ones(1, **half),
    }  # fmt: skip
    assert buckets_of(parameters) == [[("f", 1), ("e", 1)], [("d", 1), ("c", 1)], [("b", 0)], [("a", 0)]]


def test_sums_are_those_of_all_replicas_in_the_shapes_of_the_parameters(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 32)
    parameters = {
        ("a", 1): torch.ones(2, 3),
        ("b", 1): torch.ones(4),
        ("a", 0): torch.ones(2, 3),
        ("s", 0): torch.ones(()),
    }
    store, results = dist.HashStore(), [None, None]

    def replica(rank):
        group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        reduction = GradientReduction(group, parameters)
        for _ in range(2):
            reduction.begin()
            reduction.give(("s", 0), torch.tensor(float(rank), dtype=torch.float64))
            reduction.give(("b", 1), torch.full((4,), rank + 1.0, dtype=torch.bfloat16))
            reduction.give_rest({("a", 1): torch.arange(6.0).reshape(3, 2).t()})
            results[rank] = reduction.finish()

    threads = [threading.Thread(target=replica, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for sums in results:
        assert list(sums) == list(parameters)
        assert {gradient.dtype for gradient in sums.values()} == {torch.float32}  # of the parameters
        assert torch.equal(sums["s", 0], torch.tensor(1.0))
        assert torch.equal(sums["b", 1], torch.full((4,), 3.0))
        assert torch.equal(sums["a", 0], torch.zeros(2, 3))
        assert torch.equal(sums["a", 1], 2 * torch.arange(6.0).reshape(3, 2).t())


def test_a_gradient_of_another_shape_is_not_a_lost_connection():
    group = ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    reduction = GradientReduction(group, {("a", 0): torch.ones(2, 3)})
    reduction.begin()
    with pytest.raises(InternalError, match=r"shape \(3, 2\) .* shape \(2, 3\)"):
        reduction.give(("a", 0), torch.ones(3, 2))


def test_a_step_that_trains_other_parameters_sums_their_gradients():
    """A parameter that was frozen is left out, and one that is now in float64 is not summed in float32."""
    group = ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    ranks = SimpleNamespace(when_closed=[], generation=0, device_sums=None, data_parallel_group=lambda: group)
    own = Replicas(ranks)
    own.prepare_sum({("a", 0): torch.ones(2), ("b", 0): torch.ones(2)})
    before = own.reduction
    own.prepare_sum({("a", 0): torch.zeros(2), ("b", 0): torch.zeros(2)})
    assert own.reduction is before
    own.prepare_sum({("a", 0): torch.ones(2).double()})
    gradient = torch.full((2,), 1 / 3, dtype=torch.float64)
    own.reduction.begin().give(("a", 0), gradient)
    torch.testing.assert_close(own.reduction.finish(), {("a", 0): gradient})


def failed_while_units_were_exchanged(mesh):
    """Gradients after a stream in which replica 1 fails with the weights of a mini-batch that replica 0 has noted."""
    torch.manual_seed(0)
    mesh, model = square_mesh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    replica, x = mesh["data"].get_local_rank(), torch.randn(12, 4)
    own, plain = x.chunk(2)[replica], copy.deepcopy(model)

    def loss_fn(y, t):
        return ((y - t) ** 2).sum(), torch.tensor(1000.0 * y.numel())

    total, weight = loss_fn(plain(x), x)
    (total / weight).backward()
    pipe = fxpipe.pipeline(
        model, mesh["pipe"], 1, data_parallel=mesh["data"], schedule="pipedream", balance=["1"], example_args=(own,),
        hardware="cpu", progress=False, check=False,
    )  # fmt: skip
    optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=0.0)
    with pytest.MonkeyPatch.context() as patch:
        if replica == 1:
            patch.setattr(Replicas, "loss_of_union", interrupt)
        with pytest.raises((KeyboardInterrupt, DistributedError)):
            [*pipe.train_stream([(own, own)] * 3, loss_fn=loss_fn, optimizer=optimizer)]
    pipe.forward_backward(own, target=own, loss_fn=loss_fn)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
    return True


def interrupt(*_):
    raise KeyboardInterrupt


def test_replicas_divide_by_the_same_weight_after_a_failure(four_ranks):
    assert all(four_ranks.run(failed_while_units_were_exchanged))
