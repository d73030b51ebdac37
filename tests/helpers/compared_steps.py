"""A pipe next to its plain model over several steps: each is the plain model's, or a clear error of fxpipe."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError
from helpers.devices import on_cpu, workers
from helpers.oracle import assert_same_gradients, assert_same_state

WAYS = ("drop-in", "forward_backward", "micro_batches", "train_stream")
RATE = 0.1  # learning rate of a stream


def refusal_of(
    build: Callable[[], nn.Module],
    inputs: Callable[[int], tuple[Any, ...]],
    way: str = "drop-in",
    steps: int = 3,
    **options: Any,
) -> str:
    """Compares steps of a pipe with those of its plain model. Returns the error's text if fxpipe refuses one, else "".

    Args:
        build: makes the model, whose output is one tensor with the samples in dimension 0.
        inputs: number of the step -> inputs; called for each of both.
        way: one of `WAYS`. A stream has one stage, so that it is plain training.
        options: of `fxpipe.pipeline`.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    try:
        if way == "train_stream":
            _compare_stream(*models, inputs, steps, options)
        else:
            _compare_steps(*models, inputs, way, steps, options)
    except FxpipeError as error:
        return str(error)
    return ""


def _compare_steps(
    ours: nn.Module, plain: nn.Module, inputs: Callable[[int], tuple[Any, ...]], way: str, steps: int, options: Any
) -> None:
    names = [name for name, _ in plain.named_parameters()]
    with fxpipe.pipeline(ours, ["cpu", "cpu"], **{"chunks": 2, **options}) as pipe:
        for step in range(steps):
            for model in (ours, plain):
                model.zero_grad()
            args, own_args = inputs(step), inputs(step)
            want = plain(*args)
            target = torch.ones_like(want)
            F.mse_loss(want, target).backward()
            for have in _outputs(pipe, own_args, target, way):
                torch.testing.assert_close(have, want)
            assert_same_gradients(ours, plain, loose=names)
            assert_same_state(ours, plain, exact=False)
            if way != "micro_batches":
                torch.testing.assert_close(_tensors(own_args), _tensors(args))


def _outputs(pipe: Any, args: tuple[Any, ...], target: torch.Tensor, way: str) -> Iterator[torch.Tensor]:
    """Runs a step forward and backward; yields its output."""
    if way == "drop-in":
        output = pipe(*args)
        yield output.detach().clone()
        F.mse_loss(output, target).backward()
    elif way == "forward_backward":
        yield pipe.forward_backward(*args, target=target, loss_fn=F.mse_loss, return_outputs=True)[1]
    else:
        parts = [[arg.chunk(2)[i] if isinstance(arg, torch.Tensor) else arg for arg in args] for i in range(2)]
        calls = list(zip(map(tuple, parts), target.chunk(2), strict=True))
        yield torch.cat(pipe.forward_backward(micro_batches=calls, loss_fn=F.mse_loss, return_outputs=True)[1])


def _compare_stream(
    ours: nn.Module, plain: nn.Module, inputs: Callable[[int], tuple[Any, ...]], steps: int, options: Any
) -> None:
    with torch.no_grad():
        target = torch.ones_like(plain(*inputs(0)))
    with fxpipe.pipeline(ours, ["cpu"], schedule="pipedream", **options) as pipe:
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=RATE)
        own = torch.optim.SGD(plain.parameters(), lr=RATE)
        batches = ((inputs(step), target) for step in range(steps))
        for step, loss in enumerate(pipe.train_stream(batches, optimizer=optimizer, loss_fn=F.mse_loss)):
            own.zero_grad()
            want = F.mse_loss(plain(*inputs(step)), target)
            want.backward()
            own.step()
            torch.testing.assert_close(loss, want.detach())
        assert_same_state(ours, plain, exact=False)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def assert_trains(
    model: nn.Module,
    batches: Sequence[Any],
    chunks: int = 2,
    *,
    check: Any = None,
    lr: float = 1e-5,
    evaluates: bool = False,
    **options: Any,
) -> int:
    """Compares steps of a pipe with those of its plain model over the same micro-batches.

    Every second step is one of `forward_backward`. Returns the number of graphs that training took.

    Args:
        batches: a tensor or a tuple of tensors for each step.
        check: called with the pipe before the first step.
        lr: learning rate.
        evaluates: whether outputs in evaluation are compared, too.
    """
    plain = copy.deepcopy(model)
    batches = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    names = [name for name, _ in plain.named_parameters()]
    with fxpipe.pipeline(model, workers(2), chunks, **{"example_args": _clones(batches[0]), **options}) as pipe:
        if check is not None:
            check(pipe)
        optimizers = [torch.optim.SGD(one.parameters(), lr) for one in (plain, pipe)]
        for step, batch in enumerate(batches):
            for optimizer in optimizers:
                optimizer.zero_grad()
            parts, losses = [], []
            for part in zip(*(t.tensor_split(chunks) for t in batch), strict=True):
                parts.append(plain(*part))
                losses.append(mean_square(parts[-1]) * (len(part[0]) / len(batch[0])))
                losses[-1].backward()
            if step % 2:
                have = pipe.forward_backward(*_clones(batch), loss_fn=mean_square)
            else:
                output = on_cpu(pipe(*_clones(batch)))
                torch.testing.assert_close(output, torch.cat(parts))
                have = mean_square(output)
                have.backward()
            torch.testing.assert_close(on_cpu(have), sum(losses))
            assert_same_gradients(pipe, plain, loose=names)
            assert_same_state(pipe, plain, exact=False)
            for optimizer in optimizers:
                optimizer.step()
        graphs = len(pipe._fxpipe.graphs)
        with torch.no_grad():
            for batch in batches if evaluates else ():
                torch.testing.assert_close(on_cpu(pipe.eval()(*_clones(batch))), plain.eval()(*batch))
        return graphs


def _clones(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.clone() for tensor in tensors)


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
