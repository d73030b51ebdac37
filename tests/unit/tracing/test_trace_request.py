"""A request for a graph: what the user asks for, checked once, and handed to strategies and passes as it is."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.traced_models import x
from torch import fx, nn

from fxpipe.errors import ArgumentError, ArgumentTypeError
from fxpipe.tracing.trace_request import TraceRequest

DEFAULTS: dict[str, Any] = {
    "tracer": "record",
    "leaf_modules": (),
    "in_dims": None,
    "out_dims": None,
    "chunks": 2,
    "is_compared": True,
    "seed": 0,
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU())


def request(module: nn.Module, **options: Any) -> TraceRequest:
    return TraceRequest.of(module, (x(),), {}, **{**DEFAULTS, **options})


@pytest.mark.parametrize(
    ("tracer", "error", "said"),
    [
        ("export", ArgumentError, "tracer='export' is unknown"),
        ("fx", ArgumentError, "tracer='fx' is unknown"),
        ("auto", ArgumentError, "tracer='auto' is unknown"),
        (3, ArgumentTypeError, "tracer is an int"),
        (fx.Tracer, ArgumentTypeError, "tracer is a torch.fx.Tracer"),
        (fx.Tracer(), ArgumentTypeError, "tracer is a torch.fx.Tracer"),
    ],
)
def test_another_tracer_is_refused_with_what_there_is(tracer, error, said):
    with pytest.raises(error) as caught:
        request(model(), tracer=tracer)
    accepted = "accepted are 'record' and a function from the model to a torch.fx.GraphModule (torch.fx.symbolic_trace"
    assert str(caught.value).startswith(f"{said}; {accepted}")
    remedy = "make a function of it: lambda m" if "Tracer" in said else "leave it out to "
    assert remedy in str(caught.value)
