"""A model run by a pipe in each of its ways, compared with the plain model in each: right, or refused."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError
from helpers.case_steps import set_options
from helpers.oracle import accumulate_gradients, assert_same_gradients, closing

WAYS: dict[str, dict[str, str]] = {  # options of each
    "drop-in": {"schedule": "1f1b", "checkpoint": "never"},
    "drop-in, recomputed": {"schedule": "1f1b", "checkpoint": "always"},
    "forward_backward": {"schedule": "1f1b", "checkpoint": "never"},
    "forward_backward, recomputed": {"schedule": "1f1b", "checkpoint": "always"},
    "forward_backward, split": {"schedule": "zero_bubble", "checkpoint": "never"},
    "train_stream": {"schedule": "pipedream_2bw", "checkpoint": "never"},
}
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def train(pipe: Any, way: str, x: torch.Tensor, target: torch.Tensor, loss_fn: Loss) -> None:
    """Adds the gradients of one mini-batch to a pipe's model."""
    if way.startswith("drop-in"):
        loss_fn(pipe(x), target).backward()
    elif way.startswith("forward_backward"):
        pipe.forward_backward(x, target=target, loss_fn=loss_fn)
    else:  # an update of a step of 1, taken back
        before = [p.detach().clone() for p in pipe.parameters()]
        optimizer = fxpipe.optim.StageOptimizer(pipe, torch.optim.SGD, lr=1.0)
        list(pipe.train_stream([((x,), target)], optimizer=optimizer, loss_fn=loss_fn))
        with torch.no_grad():
            for p, old in zip(pipe.parameters(), before, strict=True):
                p.grad = old - p
                p.copy_(old)


def outcome(
    make: Callable[[], nn.Module],
    make_inputs: Callable[[int], torch.Tensor],
    loss_fn: Loss = F.mse_loss,
    *,
    stages: int = 2,
    ways: Sequence[str] = tuple(WAYS),
    **options: Any,
) -> str:
    """Trains a step in each way, and compares the gradients with those of the plain model in a loop over micro-batches.

    Args:
        make: the model, equal each time.
        make_inputs: from a seed, equal each time.

    Returns:
        "right", or the messages of fxpipe's errors, one for each way if they differ.
    """
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    plain = make()
    workers = ["cpu"] * stages
    try:
        pipe: Any = fxpipe.pipeline(model, workers, 2, example_args=(make_inputs(0),), progress=False, **options)
    except FxpipeError as error:
        return str(error)
    results: dict[str, None] = {}
    with closing(pipe):
        for seed, way in enumerate(ways):
            set_options(pipe, **WAYS[way])
            x, parts = make_inputs(seed), make_inputs(seed).tensor_split(2)
            target = torch.linspace(-1, 1, x.shape[0] * 8).view(-1, 8)
            for one in (pipe, plain):
                one.zero_grad()
            try:
                train(pipe, way, x, target, loss_fn)
            except FxpipeError as error:
                results[str(error)] = None
                continue
            accumulate_gradients(plain, list(zip(parts, target.tensor_split(2), strict=True)), loss_fn)
            if way == "train_stream":  # which does not show that there is no gradient
                for p in plain.parameters():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            assert_same_gradients(pipe, plain, loose=[name for name, _ in plain.named_parameters()])
            results["right"] = None
    return " / ".join(results)
