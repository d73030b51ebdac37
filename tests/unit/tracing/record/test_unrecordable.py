"""What cannot be traced is refused by an error that names the module, the user's line and a remedy.

First what a recording refuses; then what no way can carry, and the error of all ways together.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import random
import re
import warnings
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layered import Layered
from helpers.traced_models import Forward, x
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fxpipe
from fxpipe import trace
from fxpipe.errors import ArgumentError, FxpipeError, TraceError
from fxpipe.tracing.guards import refuse_unguardable
from fxpipe.tracing.record.record_model import record
from fxpipe.tracing.record.unrecordable import CannotRecord
from fxpipe.tracing.traced import Traced


class Outer(Layered):
    def forward(self, x: Any) -> Any:
        return self.inner(x)


def recorded(model: nn.Module, *args: Any) -> Traced:
    """Recording alone, without another way to turn to."""
    traced = record(model, args, {})
    refuse_unguardable(traced)
    return traced


def refusal(forward: Any, **held: Any) -> CannotRecord:
    with pytest.raises(CannotRecord) as caught:
        recorded(Outer(inner=Forward(forward, **held)), x())
    return caught.value


def _swallowing(m, x):
    try:
        if m.lin(x).sum() > 0:
            return m.lin(x)
    except Exception:
        pass
    return x


def _noise(m, x):
    noise = torch.rand(6)
    return m.lin(x) if noise.sum() < 3 else m.lin(x) + noise


def _lot(m, x):
    keep = torch.rand(())
    return m.lin(x) * keep if keep < 2 else x


def _counted(m, x):
    m.n.add_(1)
    return m.lin(x) * int(m.n)


HIDDEN = "depends on the inputs and 'inner.lin.bias'"

READS: dict[str, tuple[Any, str]] = {
    "if": (lambda m, x: m.lin(x) if (m.lin(x) > -9).all() else x, rf"\(bool\) that {HIDDEN}"),
    "item": (lambda m, x: m.lin(x) * m.lin(x).max().item(), rf"\(item\) that {HIDDEN}"),
    "of a trained parameter": (
        lambda m, x: m.lin(x) * m.lin.weight.sum().item(), r"\(item\) that depends on 'inner.lin.weight'"
    ),
    "of a changed buffer": (_counted, r"\(int\) that depends on 'inner.n', which forward changes"),
    "of noise": (_noise, r"\(bool\) that depends on random numbers"),
    "of a lot that goes on": (_lot, r"\(bool\) that depends on random numbers"),
    "equal": (lambda m, x: m.lin(x) if torch.equal(m.lin(x), x) else m.lin(x) + 1, rf"\(equal\) that {HIDDEN}"),
    "a number from another function": (
        lambda m, x: m.lin(x) * torch.ops.aten._local_scalar_dense(m.lin(x).max()), r"\(local_scalar_dense",
    ),
    "swallowed": (_swallowing, rf"\(bool\) that {HIDDEN}"),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_reads_that_cannot_be_answered_before_a_step(name):
    forward, message = READS[name]
    error = refusal(forward, n=torch.ones(()))
    text = str(error)
    assert text.startswith("the model in module 'inner' reads the value of a tensor ")
    assert _matches(message, text), text
    assert "keep the decision in tensors (torch.where, masks), or take it outside forward" in text
    assert _names_line_of(forward, text), text
    assert error.modules == {"inner"}
    assert not error.is_final


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _names_line_of(forward: Any, text: str) -> bool:
    lines, first = inspect.getsourcelines(forward)
    return any(f"{__file__}:{number}" in text for number in range(first, first + len(lines)))


def _set(module, **values):
    for name, value in values.items():
        setattr(module, name, value)
    return 0


def _write_without_grad(m, x):
    with torch.no_grad():
        m.lin.weight.mul_(0.5)
    return m.lin(x)


def _write_by_out(m, x):
    with torch.no_grad():
        torch.mul(m.lin.weight, 2, out=m.lin.weight)
    return m.lin(x)


def _initialize(m, x):
    nn.init.zeros_(m.lin.weight)
    return m.lin(x)


_elsewhere = torch.ones(6)


def _jit(function):
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.trace(function, torch.ones(4, 6))


_scripted = _jit(lambda y: y * 2)
PARAMETER = (r"writes to the parameter 'inner.lin.weight'", "keep what forward changes in a buffer")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, _):
        return x * 2


REFUSED: dict[str, tuple[Any, str, str]] = {
    "parameter": (_write_without_grad, *PARAMETER),
    "parameter, by data": (lambda m, x: m.lin(x) + m.lin.weight.data.add_(1).sum() * 0, *PARAMETER),
    "parameter, by a view": (lambda m, x: m.lin(x) + m.lin.weight.detach()[0].mul_(2).sum() * 0, *PARAMETER),
    "parameter, by out": (_write_by_out, *PARAMETER),
    "parameter, by init": (_initialize, *PARAMETER),
    "parameter, data set": (
        lambda m, x: m.lin.weight.__setattr__("data", m.lin.weight * 2) or m.lin(x), "sets the attribute `.data`",
        "gives a new tensor",
    ),
    "parameter made": (lambda m, x: x * nn.Parameter(torch.ones(6)), "makes a parameter or a module", "in __init__"),
    "module made": (lambda m, x: nn.Linear(6, 6)(x), "makes a parameter or a module in forward", "make it in __init__"),
    "gradients switched on": (
        lambda m, x: m.lin(x) + _elsewhere.requires_grad_(), "uses a tensor that requires grad", "make it a parameter",
    ),
    "gradients asked for": (
        lambda m, x: _elsewhere.__setattr__("requires_grad", True) or m.lin(x), "sets the attribute `.requires_grad`",
        "a new tensor",
    ),
    "autograd.grad": (
        lambda m, x: torch.autograd.grad(F.dropout(m.lin(x)).sum(), m.lin.weight)[0], "runs autograd", "outside",
    ),
    "vmap": (
        lambda m, x: torch.vmap(lambda row: row * _elsewhere_with_grad)(x),
        "runs vmap, kept whole, which uses a tensor of its own", "as arguments",
    ),
    "func.jacrev": (lambda m, x: torch.func.jacrev(m.lin)(x), "transform of torch.func", ""),
    "tensor of a class": (lambda m, x: m.lin(x) + torch.FloatTensor([1.0] * 6), "unknown origin", "nor a compiled"),
    "traced function": (lambda m, x: _scripted(m.lin(x)) + 1, "unknown origin", "a compiled or scripted function"),
    "object": (lambda m, x: Doubled.apply(m.lin(x), object()), "passes a builtins.object", "a plain number first"),
}  # fmt: skip


# What keeping the module whole would not make right.
FINAL = frozenset(
    "parameter;parameter, by data;parameter, by a view;parameter, by out;parameter, by init;parameter, data set;"
    "parameter made;module made;gradients switched on;gradients asked for".split(";")
)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_module_line_and_remedy(name):
    forward, what, remedy = REFUSED[name]
    error = refusal(forward)
    text = str(error)
    assert text.startswith("the model in module 'inner")
    assert _matches(what, text), text
    assert remedy in text
    assert _names_line_of(forward, text), text
    assert error.is_final == (name in FINAL)
    assert bool(error.modules) == (name not in FINAL)


CHANGED: dict[str, tuple[Any, str]] = {
    "counter": (lambda m, x: _set(m, count=m.count + 1) + m.lin(x) * m.count, "attribute 'inner.count'"),
    "new attribute": (lambda m, x: _set(m, size=x.shape[1]) + m.lin(x), "attribute 'inner.size'"),
    "deleted attribute": (lambda m, x: m.__delattr__("count") or m.lin(x), "attribute 'inner.count'"),
    "list": (lambda m, x: m.log.append(1) or m.lin(x), "attribute 'inner.log'"),
    "nested": (lambda m, x: m.nested["a"][0].append(1) or m.lin(x), r"attribute \"inner.nested\['a'\]\[0\]\""),
    "private dict": (lambda m, x: m._cache.setdefault("key", 1) and m.lin(x), "attribute 'inner._cache'"),
    "queue": (lambda m, x: m.recent.append(x.shape) or m.lin(x), "attribute 'inner.recent'"),
    "training flag": (lambda m, x: m.lin.train(not m.lin.training) and m.lin(x), "attribute 'inner.lin.training'"),
    "submodule": (lambda m, x: _set(m, other=m.lin) + m.lin(x), "attribute 'inner.other'"),
    "python's random numbers": (
        lambda m, x: m.lin(x) * random.random(),
        "Python's or numpy's random numbers.*torch.rand",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_state_that_a_graph_cannot_carry(name):
    forward, message = CHANGED[name]
    held = {"count": 0, "log": [1], "nested": {"a": [[]]}, "_cache": {}, "recent": deque(maxlen=2), "n": torch.ones(6)}
    error = refusal(forward, **held)
    assert _matches(message, str(error)), error
    if "random numbers" in message:
        assert error.modules == {"inner"}
        return
    model = Outer(inner=Forward(forward, **held))
    if name in ("new attribute", "private dict"):  # which the first call makes, and no later one changes
        trace(model, (x(),))
        assert getattr(model.inner, "size", 6) == 6
        assert model.inner._cache in ({}, {"key": 1})
        return
    with pytest.raises(CannotRecord) as caught:
        trace(model, (x(),))
    assert str(caught.value) == str(error)


def test_attribute_set_to_what_it_was_is_no_change():
    trace(Forward(lambda m, x: _set(m, width=x.shape[1], on=True) + m.lin(x), width=6, on=True), (x(),))


def test_embedding_that_scales_its_weight_is_refused():
    with pytest.raises(TraceError, match="writes to the parameter 'weight'"):
        trace(nn.Embedding(5, 3, max_norm=0.5), (torch.tensor([1, 2]),))


def _made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(6, 6)


def _with_a_surrogate() -> nn.Module:
    model = nn.Sequential()
    model.add_module("b\ud800", nn.Linear(6, 6))
    return model


def _fully_sharded(module: nn.Module) -> nn.Module:
    """As after `fully_shard`, whose class of modules this one has; their parameters need processes."""
    module.__class__ = type("FSDPLinear", (FSDPModule, type(module)), {"__module__": FSDPModule.__module__})
    return module


MODELS: dict[str, tuple[Any, str]] = {
    "lazy": (lambda: nn.LazyLinear(6), "'inner.weight' is not initialized; call the model once"),
    "made in inference mode": (_made_in_inference_mode, "'inner.weight' was made in inference mode"),
    "scripted": (lambda: _jit(nn.Linear(6, 6)), "module 'inner' .*TorchScript.*the Python module"),
    "a name with a lone surrogate": (_with_a_surrogate, "lone surrogate in its name.*another name"),
    "a pipe": (lambda: fxpipe.pipeline(nn.Linear(6, 6), ["cpu"]), "'inner' .*is a pipe itself.*fxpipe.unwrap"),
    "fully sharded": (
        lambda: _fully_sharded(nn.Linear(6, 6)),
        "'inner' .*fully_shard.*as it was before.*data_parallel=",
    ),
    "wrapper": (lambda: nn.DataParallel(nn.Linear(6, 6)), "'inner' .*wrapper for several processes.*wrapped.module"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_recorded(name):
    make, message = MODELS[name]
    with pytest.raises(TraceError, match=r"Outer cannot be traced as it is") as caught:
        trace(Outer(inner=make()), (x(),))
    assert _matches(message, str(caught.value)), caught.value


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(TraceError) as caught:
        trace(nn.Sequential(nn.LazyLinear(6), _made_in_inference_mode()), (x(),))
    assert str(caught.value).count("\n- ") == 4


def test_unknown_containers():
    for holder in (lambda y: {y}, lambda y: lambda: y, lambda y: functools.partial(torch.add, y), lambda y: y.relu):
        with pytest.raises(TraceError, match=r"that holds tensors.*register_pytree_node"):
            record(Outer(inner=Forward(lambda m, x, holder=holder: (m.lin(x), holder(m.lin(x))))), (x(),), {})


def test_sparse_inputs_are_refused():
    with pytest.raises(ArgumentError, match=r"input args.* has the layout torch.sparse_coo.*to_dense"):
        trace(Forward(lambda m, x: torch.sparse.mm(x, m.lin.weight)), (x().to_sparse(),))


class OwnError(Exception):
    pass


def _raise(m, x):
    raise OwnError("no")


def test_what_the_model_raises_itself_gets_a_note():
    with pytest.raises(OwnError) as caught:
        trace(Outer(inner=Forward(_raise)), (x(),))
    assert not isinstance(caught.value, FxpipeError)
    assert "fxpipe: the model raised this in module 'inner' when it was run on the inputs to trace it" in (
        caught.value.__notes__
    )


def test_interrupt_passes_and_leaves_no_patch():
    def interrupted(m, x):
        raise KeyboardInterrupt

    before = nn.Module.__call__
    with pytest.raises(KeyboardInterrupt):
        trace(Forward(interrupted), (x(),))
    assert nn.Module.__call__ is before
    trace(nn.Linear(6, 6), (x(),))


def test_the_error_names_the_module():
    def forward(m, x):
        return torch.vmap(lambda row: row * _elsewhere_with_grad)(x)

    with pytest.raises(TraceError) as caught:
        trace(Outer(inner=Forward(forward)), (x(),))
    said = str(caught.value)
    assert "the model in module 'inner' runs vmap, kept whole, which uses a tensor of its own" in said
    assert "further on: the model in module 'inner' runs Forward, kept whole, which uses a tensor of its own" in said
    assert _names_line_of(forward, said)


_elsewhere_with_grad = nn.Parameter(torch.ones(6))


@pytest.mark.parametrize("kind", ["named tuple", "dataclass"])
def test_a_class_that_forward_defines_is_told(kind):
    """The error spoke of Python that goes over the samples."""

    def forward(m, x):
        if kind == "named tuple":
            return collections.namedtuple("Out", "h y")(x, m.lin(x))
        return dataclasses.make_dataclass("Out", ["h", "y"])(x, m.lin(x))

    with pytest.raises(TraceError, match=r"returns a Out, a class that forward defines anew.*define it outside"):
        trace(Forward(forward), (x(),), chunks=2)
