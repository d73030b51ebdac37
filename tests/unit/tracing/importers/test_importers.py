"""Graphs made in other ways than by recording are the model all the same, or are refused: never silently another."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.traced_models import Forward, assert_same_as_model, x
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxpipe import trace
from fxpipe.errors import ArgumentError, ArgumentTypeError, TraceError
from fxpipe.tracing import Traced
from fxpipe.tracing.importers.symbolic_trace import (
    symbolic_graph,
    trace_by_function,
    trace_by_tracer,
    trace_symbolically,
)
from fxpipe.tracing.importers.torch_export import trace_by_export
from fxpipe.tracing.node_info import info, state_of
from fxpipe.tracing.record.record_model import input_leaves
from fxpipe.tracing.shapes.symbolic_shapes import add_shapes
from fxpipe.tracing.source_lines import UNKNOWN_LINE
from fxpipe.tracing.traced import CALL_OPS, attribute_tensor, call_node
from fxpipe.tracing.verify.equivalence import check_against_model

Way = Callable[..., Traced]
WAYS = {"export": trace_by_export, "fx": trace_symbolically}


def traced_by(way: Way, model: nn.Module, *args: Any, **kwargs: Any) -> Traced:
    """The graph with the passes that follow on any way of making it."""
    traced = way(model, args, kwargs)
    leaves = input_leaves(model, args, kwargs)[2]
    return check_against_model(add_shapes(traced, leaves), leaves, 2)


def functions(traced: Traced) -> str:
    return " ".join(str(n.target) for n in traced.nodes)


class Double(torch.autograd.Function):
    """Its backward is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 10


class Everything(nn.Module):
    """Tied weights, buffers, constants, random numbers, in-place functions, states of the thread, sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.tied, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.tied.weight = self.lin.weight
        self.drop, self.relu = nn.Dropout(0.5), nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros(()))
        self.constant, self.listed = torch.ones(6), [torch.ones(6) * 2]

    def forward(self, x: torch.Tensor, scale: int = 3, mask: torch.Tensor | None = None) -> dict[str, Any]:
        with torch.no_grad():
            frozen = self.lin(x) * scale
        with torch.autocast("cpu", torch.bfloat16):
            rough = self.tied(x)
        y = self.drop(self.relu(self.norm(self.tied(x) + 1))) + frozen + rough.float()
        y = y + self.constant + self.listed[0] + torch.tensor([1.0, 2.0]).sum()
        self.calls.add_(1)
        y = y + torch.arange(x.shape[0], device=x.device)[:, None] + torch.full((x.shape[0], 1), 2.0)
        if mask is not None:
            y = y * mask
        return {"rows": y.view(x.shape[0] * 2, -1), "part": y.reshape(-1)[: x.shape[0] * 2], "none": None}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("training", [True, False])
def test_graph_is_the_model_at_sizes_it_has_never_seen(way: Way, training: bool) -> None:
    traced = traced_by(way, Everything().train(training), x())
    for samples in (2, 3, 7):
        assert_same_as_model(traced, x(samples))


def test_export_of_one_sample_is_for_all_sizes() -> None:
    traced = traced_by(trace_by_export, Everything().eval(), x(1))
    assert_same_as_model(traced, x(5))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_names_and_sources_are_the_models(way: Way) -> None:
    traced = traced_by(way, Everything(), x())
    attributes = {n.target for n in traced.graph.nodes if n.op == "get_attr"}
    assert {"lin.weight", "lin.bias", "tied.bias", "norm.weight", "calls", "constant"} <= attributes
    assert "tied.weight" not in attributes  # one tensor, one name
    norm = next(n for n in traced.nodes if n.target is F.batch_norm)
    assert info(norm).module == "norm"
    assert "test_importers.py" in info(norm).source
    assert info(next(n for n in traced.nodes if n.target is F.dropout)).is_random
    assert {state_of(n).grad for n in traced.nodes} == {True, False}
    assert "test_importers.py" in str(traced)
    assert f"traced by {traced.tracer}" in str(traced)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tracing_leaves_no_trace(way: Way) -> None:
    model = Everything()
    before = {name: (id(t), t.clone(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    attributes = {name: dict(m.__dict__) for name, m in model.named_modules()}
    given = x()
    dice, filters, call = torch.get_rng_state(), list(warnings.filters), nn.Module.__call__
    traced_by(way, model, given)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0], name
        assert torch.equal(tensor, before[name][1]), name
        assert tensor.grad is None
    assert all(m.__dict__ == attributes[name] for name, m in model.named_modules())
    assert torch.equal(torch.get_rng_state(), dice)
    assert warnings.filters == filters
    assert nn.Module.__call__ is call
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_functions_are_looked_through() -> None:
    scripted = torch.jit.trace(lambda t: t.sin() * 2, x())
    model = Forward(lambda m, a: scripted(m.lin(a)))
    found = trace(model, (x(),))  # for a compiler torch runs the Python they were made from
    assert found.why[0].startswith("by the general paths of libraries: the model uses a tensor of unknown origin")
    assert_same_as_model(found, x(7))
    assert_same_as_model(traced_by(trace_by_export, model, x()), x(7))


def test_transforms_are_refused_and_leave_nothing_open() -> None:
    model = Forward(lambda m, a: torch.func.vmap(lambda row: row.sum() * row)(m.lin(a)))
    with pytest.raises(TraceError, match=r"transform of torch\.func .*\.py:\d+"):
        trace_by_export(model, (x(),), {})
    assert torch._C._functorch.peek_interpreter_stack() is None


def test_export_keeps_buffers_that_forward_sets() -> None:
    def forward(m: Forward, a: torch.Tensor) -> torch.Tensor:
        m.mean = m.mean * 0.9 + a.detach().mean(0) * 0.1
        return m.lin(a) * m.mean

    traced = trace_by_export(Forward(forward, mean=torch.zeros(6)), (x(),), {})
    assert list(traced.assigned) == ["mean"]
    assert_same_as_model(traced, x())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_constant_that_changes_is_refused(way: Way) -> None:
    listed = [torch.zeros(6)]

    def forward(m: Forward, a: torch.Tensor) -> torch.Tensor:
        listed[0].add_(1)
        return m.lin(a) + listed[0]

    with pytest.raises((TraceError, RuntimeError)):
        traced_by(way, Forward(forward), x())


def test_export_that_loses_a_backward_is_refused() -> None:
    with pytest.raises(TraceError, match=r"gradient of 'lin\.weight'.*autograd\.Function.*tracer='record'"):
        trace(Forward(lambda m, a: Double.apply(m.lin(a))), (x(),), tracer="export")


def test_export_that_loses_a_hook_is_refused() -> None:
    def forward(m: Forward, a: torch.Tensor) -> torch.Tensor:
        y = m.lin(a)
        y.register_hook(lambda gradient: gradient * 3)
        return y

    with pytest.raises(TraceError, match="hook"):
        trace_by_export(Forward(forward), (x(),), {})


def test_export_that_loses_an_attribute_is_refused() -> None:
    def forward(m: Forward, a: torch.Tensor) -> torch.Tensor:
        m.last = m.lin(a).detach()
        return m.lin(a)

    with pytest.raises(TraceError, match=r"changes 'last'.*register_buffer"):
        trace(Forward(forward), (x(),), tracer="export")


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
        first, second = (x, x[:, :3])
        if isinstance(second, torch.Tensor):  # a proxy is none
            first = self.lin(first)
        return OrderedDict(y=first, z=first[:, :5] @ x[:, :5].mT if type(x) is torch.Tensor else first @ second)


def test_a_symbolic_graph_that_raises_is_refused() -> None:
    with pytest.raises(TraceError, match=r"the graph that 'fx' made raises, and the model does not: RuntimeError"):
        trace_symbolically(Skips(), (x(),), {})


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_models_own_error_is_the_models_own(way: Way) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        way(nn.Linear(5, 5), (x(),), {})


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_output_has_the_models_structure(way: Way) -> None:
    class Ordered(nn.Module):
        def forward(self, x: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
            return OrderedDict(b=x * 2, a=x + 1)

    traced = traced_by(way, Ordered(), x())
    assert_same_as_model(traced, x(7))


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor | None = None
    factor: int = 3


class Paired(nn.Module):
    """Dataclasses in and out, among other trees."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, pairs: list[Pair], *, more: dict[str, Pair], scale: float = 2.0) -> tuple[Pair, dict[str, Any]]:
        y = self.lin(pairs[0].first) * pairs[0].factor + more["a"].first * scale
        return Pair(y, pairs[0].first), {"pair": Pair(y + 1, factor=4), "none": None}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_dataclasses_go_in_and_out(way: Way) -> None:
    def inputs(samples: int) -> tuple[Any, Any]:
        return ([Pair(x(samples))],), {"scale": 3.0, "more": {"a": Pair(x(samples), None, 5)}}

    model = Paired()
    args, kwargs = inputs(4)
    traced = traced_by(way, model, *args, **kwargs)
    args, kwargs = inputs(7)
    have, want = ran(traced, args, kwargs), model(*args, **kwargs)
    assert type(have[0]) is Pair
    assert type(have[1]["pair"]) is Pair
    assert have[1]["pair"].factor == 4
    for mine, models in ((have[0].first, want[0].first), (have[0].second, want[0].second)):
        torch.testing.assert_close(mine, models)
    torch.testing.assert_close(have[1]["pair"].first, want[1]["pair"].first)


def ran(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a graph, in the model's structure."""
    leaves = input_leaves(traced.model, args, kwargs)[2]
    values: dict[fx.Node, Any] = {node: leaves[place] for place, node in traced.placeholders.items()}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            values[node] = attribute_tensor(traced, node)
        elif node.op in CALL_OPS:
            values[node] = call_node(node, values.__getitem__)
    return pytree.tree_unflatten([values[o] if isinstance(o, fx.Node) else o for o in traced.outputs], traced.out_spec)


def test_inputs_by_name_come_in_any_order() -> None:
    class Named(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - b * 2

    a, b = x(), x()
    traced = traced_by(trace_by_export, Named(), b=b, a=a)
    torch.testing.assert_close(ran(traced, (), {"b": b, "a": a}), a - b * 2)


def test_hooks_on_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    model[0].register_forward_hook(lambda *_: None)
    for way in WAYS.values():
        with pytest.raises(TraceError, match=r"module '0' .* has the hook"):
            way(model, (x(),), {})


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_decision_on_a_value_names_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    model = Forward(lambda m, a: m.lin(a) if a.sum() > 0 else a)
    with pytest.raises(TraceError, match=r"torch\.export does not take the model: .*test_importers\.py:\d+") as caught:
        trace_by_export(model, (x(),), {})
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    with pytest.raises(TraceError, match=r"symbolic tracing .*test_importers\.py:\d+"):
        trace_symbolically(Decides(), (x(),), {})
    assert capfd.readouterr() == ("", "")  # a way that fails is silent: another may do


def test_blocks_that_decide_at_run_time_are_refused() -> None:
    def forward(m: Forward, a: torch.Tensor) -> torch.Tensor:
        return torch.cond(a.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (m.lin(a),))

    with pytest.raises(TraceError, match=r"'cond' \(at .*torch\.where"):
        trace_by_export(Forward(forward), (x(),), {})


def test_symbolic_tracing_keeps_a_custom_backward_in_a_module() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(x)

    traced = traced_by(trace_symbolically, nn.Sequential(nn.Linear(6, 6), Doubled(), nn.ReLU()), x())
    assert_same_as_model(traced, x(7))


def test_a_module_that_needs_values_is_recorded_whole() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dim() != 2:
                raise ValueError
            return self.lin(x) * len(x.shape)

    traced = traced_by(trace_symbolically, nn.Sequential(Picky(), nn.ReLU(), nn.BatchNorm1d(6)), x())
    assert all(n.op in ("call_function", "call_method") for n in traced.nodes)
    assert [info(n).module for n in traced.nodes if n.target is F.relu] == ["1"]  # the failed trace leaves no scope
    assert_same_as_model(traced, x(7))


class Shallow(fx.Tracer):
    """Keeps the modules of the user's choice."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Sequential)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.inner = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.lin(x)) + x


@pytest.mark.parametrize("tracer", [Shallow, Shallow()])
def test_a_tracer_of_the_users(tracer: Any) -> None:
    model = Around()
    traced = traced_by(lambda *given: trace_by_tracer(given[0], tracer, *given[1:]), model, x())
    assert traced.tracer == "Shallow"
    assert "tanh" in functions(traced)
    assert [info(n).module for n in traced.nodes if n.target is F.linear] == ["lin", "inner.0"]
    assert_same_as_model(traced, x(7))


@pytest.mark.parametrize("make", [fx.symbolic_trace, lambda m: torch.export.export(m, (x(),)).module()])
def test_a_function_of_the_users(make: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    traced = trace_by_function(model, make, (x(),), {})
    assert traced.tracer == make.__qualname__
    assert_same_as_model(traced, x())


def test_a_function_that_gives_no_graph_of_the_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    with pytest.raises(ArgumentTypeError, match=r"gives a Sequential; expected a torch\.fx\.GraphModule"):
        trace_by_function(model, lambda m: m, (x(),), {})
    with pytest.raises(ArgumentError, match=r"has a '0\.weight' of its own; trace the model itself, not a copy"):
        trace_by_function(model, lambda m: fx.symbolic_trace(copy.deepcopy(m)), (x(),), {})


def test_a_graph_module_as_the_model() -> None:
    traced = trace(fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6), nn.ReLU())), (x(),))
    assert_same_as_model(traced, x(7))


def test_a_graph_without_inputs_can_be_printed() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Sequential(nn.ReLU()))
    text = str(symbolic_graph(model))
    assert "F.linear(in_0, 0.weight, 0.bias)" in text
    assert "2.0" in text
    assert "1(linear)" in text  # asks for sizes, which are not known


def test_symbolic_tracing_leaves_other_threads_alone() -> None:
    other, results, stop = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), [], threading.Event()
    given = x()
    want = other(given)

    def run() -> None:
        while not stop.is_set():
            results.append(torch.equal(other(given), want))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            symbolic_graph(nn.Sequential(*(nn.Linear(6, 6) for _ in range(20))))
    finally:
        stop.set()
        thread.join()
    assert results
    assert all(results)


def test_the_line_of_a_function_inside_torchs_modules_is_unknown_and_not_shown() -> None:
    traced = trace(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (x(),), tracer="export")
    assert {info(node).source for node in traced.nodes} == {UNKNOWN_LINE}
    assert UNKNOWN_LINE not in str(traced)
