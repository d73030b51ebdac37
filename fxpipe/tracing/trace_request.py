"""`TraceRequest`: the arguments of `fxpipe.trace`, as one value for all strategies and passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.tracing.dynamic_sizes import DynamicDims
from fxpipe.tracing.record.opaque_call import LEAF_MODULE_REASON
from fxpipe.utils.units import with_article

RECORD = "record"
TracerOption = str | Callable[[nn.Module], fx.GraphModule]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """A model, its example inputs, and the user's options."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]  # flattened inputs
    tracer: TracerOption
    leaf_modules: Mapping[str, str]  # paths of the modules to keep whole, with the reason
    in_dims: Any
    out_dims: Any
    chunks: int
    is_compared: bool
    seed: int  # seed of the random numbers that forward draws and reads
    dynamic: DynamicDims  # dimensions besides the batch whose size may vary
    is_whole: bool = False  # is the mini-batch the only micro-batch? Then nothing is split or combined.
    is_for_one_size: bool = False  # may the graph hold for the example's number of samples only?
    may_overwrite: bool = False  # see `RecordingOptions`


def requested_leaf_modules(model: nn.Module, leaf_modules: Sequence[str | type[nn.Module]]) -> dict[str, str]:
    """Returns the paths of the modules to keep whole, with the reason. Raises `ArgumentError` for unknown modules."""
    modules = {path: module for path, module in model.named_modules() if path}
    whole: dict[str, str] = {}
    for asked in leaf_modules:
        matching = [
            path for path, m in modules.items() if (isinstance(m, asked) if isinstance(asked, type) else path == asked)
        ]
        if not matching:
            known = ", ".join([*modules][:8]) + (", ..." if len(modules) > 8 else "")
            raise ArgumentError(
                f"leaf_modules: {type(model).__name__} has no module {asked!r}; expected names ({known}) or classes "
                "of its modules"
            )
        whole |= dict.fromkeys(matching, LEAF_MODULE_REASON)
    return {path: why for path, why in whole.items() if not any(path.startswith(f"{p}.") for p in whole)}


def check_tracer(tracer: Any) -> TracerOption:
    """Returns `tracer`, or raises if it is not a tracer."""
    accepted = (
        f"accepted are {RECORD!r} and a function from the model to a torch.fx.GraphModule (torch.fx.symbolic_trace, or "
        "one that calls torch.export.export: docs/tracing.md)"
    )
    if isinstance(tracer, fx.Tracer) or (isinstance(tracer, type) and issubclass(tracer, fx.Tracer)):
        raise ArgumentTypeError(
            f"tracer is a torch.fx.Tracer; {accepted}; make a function of it: lambda m: fx.GraphModule(m, "
            "MyTracer().trace(m))"
        )
    if isinstance(tracer, str) and tracer != RECORD:
        raise ArgumentError(f"tracer={tracer!r} is unknown; {accepted}; leave it out to have the model recorded")
    if not isinstance(tracer, str) and not callable(tracer):
        raise ArgumentTypeError(f"tracer is {with_article(tracer)}; {accepted}; leave it out to record the model")
    known: TracerOption = tracer
    return known
