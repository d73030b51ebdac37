"""Which modules train and which evaluate: a graph is that of one such mode, and so is a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import nn

from fxpipe.errors import ArgumentError


def evaluating(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that are in evaluation mode; "" is the model."""
    return tuple(name for name, module in model.named_modules() if not module.training)


@contextlib.contextmanager
def in_mode(model: nn.Module, evaluating: Collection[str] | None) -> Iterator[None]:
    """A block in which just these modules are in evaluation mode; None: those that are.

    The flags alone are set: `train()` may be a module's own, and do more, or less.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        if evaluating is not None:
            for name, module in model.named_modules():
                module.training = name not in evaluating
        yield
    except Exception as error:
        is_ours = isinstance(error, ArgumentError)  # says what to do by itself
        if not is_ours and any(module.training != was for module, was in before):
            error.add_note(
                "fxpipe: forward ran in the mode (train or eval) that the plan was made in, which is not the model's "
                "mode now; call the pipe first in that mode, or give it example_args that forward takes in both"
            )
        raise
    finally:
        for module, was in before:
            module.training = was
