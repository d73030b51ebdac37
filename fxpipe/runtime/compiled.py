"""The code of stages as it runs: as it is, or compiled by `torch.compile`.

A stage compiles at its first F, in its worker, since the compiler bakes in how many threads an operation may take; one
stage at a time, while others may run. Uneven micro-batches have two sizes, so a stage compiles twice for a graph: torch
makes the second one for any size. Stages that take inputs may do so a third time, as torch tells apart whether a tensor
starts where its storage does, as the first micro-batch's part of an input.

Where backward is split, B cannot ask for gradients inside of a compiled graph: such stages have taps (`tapped`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch._functorch import config as functorch

from fxpipe.rewriting.program import Stage
from fxpipe.runtime.tapped import Tapped
from fxpipe.turns import one_at_a_time

Code = Callable[..., tuple[Any, ...]]


def code_of(stage: Stage, options: Mapping[str, Any] | None) -> Code:
    """What to call. `options`: keywords of `torch.compile`; None: do not compile."""
    run: Any = stage.run
    if options is None:
        # Not `run` itself: fx's own call gives up the traceback of a failing builtin, and with it the node.
        return run.forward  # type: ignore[no-any-return]
    from fxpipe.rewriting.compiled_draws import for_compiler

    compiled: Code = torch.compile(for_compiler(run).forward, **options)
    in_turn = InTurn(compiled, len(stage.attributes))
    return in_turn if stage.taps is None else Tapped(stage, stage.taps, in_turn)


class InTurn:
    """Compiled code that compiles while no other does."""

    def __init__(self, code: Code, attributes: int):
        self._code, self._attributes = code, attributes
        self._seen: set[Hashable] = set()

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        # Attributes stay as they are, or the graph is another; `requires_grad` alone may change.
        kind = (
            torch.is_grad_enabled(),
            *(a.requires_grad for a in args[: self._attributes] if isinstance(a, torch.Tensor)),
            *map(_kind_of, args[self._attributes :]),
        )
        if kind in self._seen:
            return self._code(*args)
        # Backward, too: else it would be compiled when it first runs.
        with one_at_a_time, functorch.patch(force_non_lazy_backward_lowering=True):
            made = self._code(*args)
        self._seen.add(kind)
        return made


def _kind_of(value: Any) -> Any:
    """What the compiler tells apart."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    strides = value.stride() if value.layout == torch.strided else None
    return value.dtype, value.shape, strides, value.requires_grad, strides is None or value.storage_offset() == 0
