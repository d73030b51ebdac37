"""The code of stages as it runs: as it is, or compiled by `torch.compile`.

A stage compiles at its first F, in its worker, since the compiler bakes in how many threads an operation may take. The
compiler takes one stage at a time; the others wait. Uneven micro-batches have two sizes, so a stage compiles twice for
a graph: torch makes the second one for any size. (Stages that take inputs may do so a third time, as torch tells apart
whether a tensor starts where its storage does, as the first micro-batch's part of an input.)

Where backward is split, B cannot ask for gradients inside of a compiled graph: such stages have taps (`tapped`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxpipe.rewriting.program import Stage
from fxpipe.runtime.tapped import Tapped

Code = Callable[..., tuple[Any, ...]]


def code_of(stage: Stage, options: Mapping[str, Any] | None) -> Code:
    """What to call. `options`: keywords of `torch.compile`; None: do not compile."""
    run: Any = stage.run
    if options is None:
        # Not `run` itself: fx's own call gives up the traceback of a failing builtin, and with it the node.
        return run.forward  # type: ignore[no-any-return]
    from fxpipe.rewriting.compiled_draws import for_compiler

    compiled: Code = torch.compile(for_compiler(run).forward, **options)
    return compiled if stage.taps is None else Tapped(stage, stage.taps, compiled)
