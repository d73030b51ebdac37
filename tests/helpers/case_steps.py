"""Steps of a case of `models`, on a pipe and on the plain model, compared."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import fxpipe
from helpers import devices
from helpers.models import BY_NAME
from helpers.oracle import assert_same_gradients, assert_same_state, draw_seed, train_step

BATCH = 6  # in 4 chunks: 2, 2, 1, 1


def case_and_pipe(name: str, workers: int, chunks: int, **options: Any) -> Any:
    """The case, its plain model, and a pipe of a copy of that on so many workers."""
    case = BY_NAME[name]
    torch.manual_seed(1)
    plain = case.make()
    args, kwargs = case.inputs(BATCH)
    pipe = fxpipe.pipeline(
        copy.deepcopy(plain), devices.workers(workers), chunks, example_args=args, example_kwargs=kwargs, **options
    )
    skip_random_numbers_of_devices(pipe)
    return case, plain, pipe


def skip_random_numbers_of_devices(pipe: Any) -> None:
    """Skips a test that draws random numbers on devices: those of the plain model, on the CPU, are others."""
    if draws_random_numbers(pipe) and devices.is_simulated():
        pipe.close()
        pytest.skip("random numbers of a device are not those of the CPU")


def set_options(pipe: Any, **settings: Any) -> None:
    """Another schedule or checkpoint mode for a planned pipe: planning takes longer than the steps of a test."""
    pipe._fxpipe.settings = dataclasses.replace(pipe._fxpipe.settings, **settings)


def draws_random_numbers(pipe: Any) -> bool:
    return bool(pipe._fxpipe.first.program.is_random)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def assert_training_steps(case: Any, plain: Any, pipe: Any, modes: Any, chunks: int) -> None:
    """Steps of `forward_backward` in these (schedule, checkpoint) equal those of the plain model, bit for bit.

    With the schedule "drop-in" the pipe is called, and equals the plain model to a tolerance: the loss of the whole
    mini-batch divides once, those of micro-batches each.
    """
    optimizers = [optimizer_of(plain), optimizer_of(pipe)]
    for step, (schedule, checkpoint) in enumerate(modes):
        is_drop_in = schedule == "drop-in"
        set_options(pipe, checkpoint=checkpoint, **{} if is_drop_in else {"schedule": schedule})
        args, kwargs = case.inputs(BATCH)
        target = case.target(BATCH)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.manual_seed(step)
        seed = draw_seed(draws_random_numbers(pipe))
        order = "gpipe" if is_drop_in or schedule == "gpipe" else "1f1b"  # in which a stage sums gradients
        want = train_step(plain, args, kwargs, target, case.loss, chunks=chunks, order=order, seed=seed, batch=BATCH)
        torch.manual_seed(step)
        if is_drop_in:
            target = pytree.tree_map_only(torch.Tensor, devices.last_device(pipe), target)
            loss = case.loss(pipe(*args, **kwargs), target)
            loss.backward()
            have = loss.detach()
        else:
            have = pipe.forward_backward(*args, target=target, loss_fn=case.loss, **kwargs)
        torch.testing.assert_close(have.cpu(), want)
        assert not have.requires_grad
        assert_same_gradients(pipe, plain, case.tied, exact=not is_drop_in)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(pipe, plain, exact=not (case.tied or is_drop_in))
        if case.tied and not is_drop_in:  # else the last bit of one step is a difference in the next
            plain.load_state_dict(pipe.state_dict())
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))


def assert_evaluation(case: Any, plain: Any, pipe: Any) -> None:
    """Evaluation gives the outputs of the plain model, and leaves parameters and buffers as they are."""
    plain.load_state_dict(pipe.state_dict())
    args, kwargs = case.inputs(BATCH)
    for model in (plain, pipe):
        model.eval()
    with torch.no_grad():
        want, have = plain(*args, **kwargs), devices.on_cpu(pipe(*args, **kwargs))
    assert pytree.tree_structure(want) == pytree.tree_structure(have)
    for w, h in zip(pytree.tree_leaves(want), pytree.tree_leaves(have), strict=True):
        torch.testing.assert_close(h, w)
    assert_same_state(pipe, plain)
    for model in (plain, pipe):
        model.train()
