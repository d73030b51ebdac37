"""A request for a graph: what the user asks for, checked once, and handed to strategies and passes as it is."""

from __future__ import annotations

import pytest
from helpers.traced_models import x
from torch import fx, nn

from fxpipe import trace
from fxpipe.errors import ArgumentError, ArgumentTypeError


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
        trace(nn.Linear(6, 6), (x(),), tracer=tracer)
    accepted = "accepted are 'record' and a function from the model to a torch.fx.GraphModule (torch.fx.symbolic_trace"
    assert str(caught.value).startswith(f"{said}; {accepted}")
    remedy = "make a function of it: lambda m" if "Tracer" in said else "leave it out to "
    assert remedy in str(caught.value)
