"""A rank that fails, hangs or is gone: an error on all ranks that names it, soon, and a pipe whose next step works."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.ranks import Ranks, raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

import fxpipe
from fxpipe.errors import ArgumentError, DistributedError, FxpipeError, StateError
from fxpipe.optim import StageOptimizer

QUICK = {"progress": False, "check": False, "hardware": "cpu"}
SOON = 5.0  # seconds, of a test that has to end well before a timeout


def pipe_on(mesh, timeout=30.0, **options):
    torch.manual_seed(0)
    options = {"example_args": (torch.ones(8, 4),), "balance": ["first"], "timeout": timeout} | QUICK | options
    return fxpipe.pipeline(Picky(), mesh, 4, **options)


class Picky(Layered, first=4, second=4):
    def forward(self, x):
        return self.second(refuse_large(torch.tanh(self.first(x))))


@fxpipe.leaf
def refuse_large(x):
    if (x > 0.999).any():
        raise OverflowError("too large")
    return x


def fail_in_stage(mesh):
    pipe = pipe_on(mesh)
    x, t = torch.ones(8, 4), torch.zeros(8, 4)
    x[5] = 1e4
    result = raised(pipe.forward_backward, x, target=t, loss_fn=F.mse_loss)
    assert all(p.grad is None for p in pipe.parameters())
    return result, pipe.forward_backward(torch.ones(8, 4), target=t, loss_fn=F.mse_loss).item()


def test_a_rank_that_raises_stops_the_others_with_its_line_and_the_next_step_works(two_ranks):
    (ours, loss), (theirs, other) = two_ranks.run(fail_in_stage)
    assert {ours[0], theirs[0]} == {DistributedError, OverflowError}
    text = ours[1] if ours[0] is DistributedError else theirs[1]
    assert "has failed" in text
    assert "OverflowError: too large" in text
    assert "micro-batch 2, forward, node" in text
    assert "test_over_ranks_failures.py:" in text
    assert loss == other
    assert max(ours[2], theirs[2]) < SOON


def fail_to_record(mesh):
    pipe, kinds = fxpipe.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, 2, **QUICK), []
    for x in (torch.ones(8, 4), torch.ones(8, 3, 4)):  # the first makes the plan
        vars(pipe.model[1]).update({"forward": None} if mesh.get_rank() else {})
        kinds.append(raised(pipe.forward_backward, x, target=x, loss_fn=F.mse_loss)[0])
        vars(pipe.model[1]).pop("forward", None)
        assert pipe.forward_backward(x, target=x, loss_fn=F.mse_loss) > 0
    return kinds


def test_a_graph_that_one_rank_cannot_record_is_recorded_again_by_all(two_ranks):
    assert two_ranks.run(fail_to_record) == [[DistributedError] * 2, [TypeError] * 2]


def call_differently(mesh):
    pipe = pipe_on(mesh)
    x, t = torch.ones(8, 4), torch.zeros(8, 4)
    results = []
    if mesh.get_rank() == 0:
        results.append(raised(pipe.forward_backward, x, target=t, loss_fn=F.mse_loss))
    else:
        with torch.no_grad():
            results.append(raised(pipe, x))
    if mesh.get_rank() == 0:
        pipe.eval()
    results.append(raised(pipe.forward_backward, x, target=t, loss_fn=F.mse_loss))
    pipe.eval()
    results.append(raised(pipe.forward_backward, None if pipe.needs_inputs else x, target=t, loss_fn=F.mse_loss))
    results.append(raised(pipe.forward_backward, x[:0], target=t[:0], loss_fn=F.mse_loss))
    results.append(raised(pipe.forward_backward, x, target=t[:3], loss_fn=F.mse_loss))
    assert pipe.forward_backward(x, target=t, loss_fn=F.mse_loss) > 0
    return [(issubclass(kind, FxpipeError), text) for kind, text, _ in results]


def test_misuse_is_an_error_on_all_ranks(two_ranks):
    results = two_ranks.run(call_differently)
    for answers in results:
        assert all(is_ours for is_ours, _ in answers)
        for (_, text), words in zip(
            answers,
            [
                "rank 0 calls forward_backward, and rank 1 calls the pipe",
                "train() and eval()",
                "rank 0 has the first stage and needs the inputs, but was given no tensor",
                "no samples",
                "target holds a tensor of shape (3, 4)",
            ],
            strict=True,
        ):
            assert words in text


def differ(mesh):
    rank = mesh.get_rank()
    x = torch.ones(8, 4)

    def pipe(model=None, **options):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model
        return fxpipe.pipeline(model, mesh, **{"example_args": (x,), "timeout": 20.0, "chunks": 2} | QUICK | options)

    wide = nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4 + rank, 4))
    results = [
        raised(pipe, chunks=2 + rank),
        raised(pipe, wide),
        raised(pipe, schedule="gpipe" if rank else "1f1b"),
        raised(pipe, outputs="some" if rank else "last"),
        raised(pipe, stages_per_device=0),
    ]
    assert pipe().needs_target is (rank == 1)
    return [text for _, text, _ in results]


def test_ranks_that_differ_are_named_with_the_field(two_ranks):
    for texts in two_ranks.run(differ):
        for text, words in zip(
            texts, ["chunks", "model", "schedule", "outputs='some'", "stages_per_device"], strict=True
        ):
            assert words in text
        assert texts[0].startswith("ranks differ in chunks (rank 0: 2; rank 1: 3): give all ranks the same")
        assert "ranks differ in schedule (rank 0: '1f1b'; rank 1: 'gpipe')" in texts[2]
        assert "1.weight float32[4, 5]" in texts[1]


def refused_devices(mesh):
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "pipe"))
    alone = dist.new_group([0])
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(8, 4)
    errors = [raised(fxpipe.pipeline, model, square, 2)]
    if mesh.get_rank() == 1:
        errors.append(raised(fxpipe.pipeline, model, alone, 2))
    pipe = fxpipe.pipeline(model, square["pipe"], 2, example_args=(x,), **QUICK)
    loss = pipe.forward_backward(x, target=x, loss_fn=F.mse_loss).item()
    again = fxpipe.pipeline(model, dist.group.WORLD, 2, example_args=(x,), **QUICK)
    assert again.forward_backward(x, target=x, loss_fn=F.mse_loss) == loss
    if mesh.get_rank() == 0:
        pipe.close()
    kind, text, _ = raised(pipe.forward_backward, x, target=x, loss_fn=F.mse_loss)
    assert kind is (DistributedError if mesh.get_rank() else StateError)
    assert "closed" in text
    return [(issubclass(kind, ArgumentError), text) for kind, text, _ in errors]


def test_a_pipe_takes_one_dimension_of_a_mesh_that_its_process_is_in(two_ranks):
    results = two_ranks.run(refused_devices)
    assert 'devices=mesh["pipe"]' in results[0][0][1]
    assert all(is_argument for errors in results for is_argument, _ in errors)


def plan_of_three_stages(mesh):
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.ones(8, 4)
    plan = fxpipe.plan(model, 3, example_args=(x,), progress=False, hardware="cpu")
    kind, text, _ = raised(fxpipe.pipeline, model, mesh, 2, example_args=(x,), plan=plan, progress=False)
    pinned = {str(k): 0 for k in range(3)}
    options = {"example_args": (x,), "pin": pinned, "progress": False, "hardware": "cpu"}
    return issubclass(kind, ArgumentError), text, raised(fxpipe.pipeline, model, mesh, 2, **options)[:2]


def test_a_plan_for_another_number_of_ranks_is_refused(two_ranks):
    for is_argument, text, (kind, pinned) in two_ranks.run(plan_of_three_stages):
        assert is_argument
        assert "plan has 3 stages, but devices has 2 entries" in text
        assert kind is ArgumentError
        assert "the plan has stages for 1 devices, but the process group has 2 ranks: start 1" in pinned


def test_outputs_and_timeout_are_for_processes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ArgumentError, match=r"timeout=3\.0 is for a pipe over processes"):
        fxpipe.pipeline(model, ["cpu"] * 2, timeout=3.0)
    with pytest.raises(ArgumentError, match="outputs='all' is for a pipe over processes"):
        fxpipe.pipeline(model, ["cpu"] * 2, outputs="all")


# -- Ranks that hang, or are gone: these processes are used up -------------------------------------------------------


def hang(mesh, seconds):
    pipe = pipe_on(mesh, timeout=1.0)
    x, t = torch.ones(8, 4), torch.zeros(8, 4)
    pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)

    def slow(out, target):
        time.sleep(seconds)
        return F.mse_loss(out, target)

    return raised(pipe.forward_backward, x, target=t, loss_fn=slow)


def die(mesh):
    pipe = pipe_on(mesh, timeout=30.0)
    x, t = torch.ones(8, 4), torch.zeros(8, 4)
    pipe.forward_backward(x, target=t, loss_fn=F.mse_loss)
    calls = []

    def loss_fn(out, target):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), 9)
        return F.mse_loss(out, target)

    return raised(pipe.forward_backward, x, target=t, loss_fn=loss_fn)


def call_alone(mesh):
    """What the rank of the first stage gets that calls alone: a step, an evaluation, a stream, a record."""
    errors = []
    fxpipe.distributed.failures.GRACE_SECONDS = 0.2
    for call in (
        lambda pipe: pipe.forward_backward(torch.ones(8, 4), target=torch.zeros(8, 4), loss_fn=F.mse_loss),
        torch.no_grad()(lambda pipe: pipe(torch.ones(8, 4))),
        lambda pipe: next(
            pipe.train_stream(
                [(torch.ones(8, 4), torch.zeros(8, 4))], loss_fn=F.mse_loss, optimizer=StageOptimizer(pipe, SGD, lr=0.1)
            )
        ),
        lambda pipe: pipe.gather_last_step(),
    ):
        pipe = pipe_on(mesh, timeout=0.5, schedule="pipedream" if len(errors) == 2 else "1f1b")
        errors.append(raised(call, pipe) if mesh.get_rank() == 0 else None)
        dist.barrier()  # of the process group; the pipe has one of its own
        pipe.close()
    return errors


def test_a_rank_that_does_not_call_is_an_error_after_the_timeout():
    with Ranks(2) as ranks:
        for kind, text, seconds in ranks.run(call_alone)[0]:
            assert kind is DistributedError
            assert "rank 1 does not answer" in text
            assert seconds < SOON


def come_alone(mesh):
    return raised(pipe_on, mesh, timeout=1.0) if mesh.get_rank() == 0 else None


def test_a_rank_that_hangs_is_named_after_the_timeout_and_one_that_is_gone_at_once():
    with Ranks(2) as ranks:
        (kind, text, seconds), late = ranks.run(hang, 5.0)
        assert kind is DistributedError
        assert "rank 1 does not answer" in text
        assert "after 0F1 it waited for the result of 1B0 (stage 1, micro-batch 0) of rank 1" in text
        assert seconds < 4.9
        assert late[0] is DistributedError
        assert "rank 0 has given up" in late[1]
        (kind, text, _), _ = ranks.run(come_alone)
        assert kind is DistributedError
        assert "rank 1 of 2 has not come in 1 s" in text
        (_, (kind, text, seconds)), _ = ranks.try_run(die, but=(1,))
        assert kind is DistributedError
        assert "rank 1 is gone: its process has ended" in text
        assert "it waited for the result of 1B" in text
        assert seconds < 10
