"""Equal calls run once on fake tensors, and the shapes are those of running each."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.models import BY_NAME, CASES
from helpers.traced_shapes import shapes, traced
from torch import fx, nn

from fxpipe import trace
from fxpipe.tracing.node_info import info
from fxpipe.tracing.shapes import symbolic_run
from fxpipe.tracing.shapes.symbolic_run import NodeCache
from fxpipe.tracing.traced import Traced


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """Names of the nodes that were run on fake tensors."""
    names: list[str] = []

    def counted(node: fx.Node, values: Any) -> Any:
        names.append(node.name)
        return run(node, values)

    run = symbolic_run.run_node_without_grad
    monkeypatch.setattr(symbolic_run, "run_node_without_grad", counted)
    return names


def told(result: Traced) -> list[str]:
    return [f"{n.name} {info(n).shapes} {info(n).number}" for n in result.graph.nodes]


class Blocks(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.ReLU()) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).view(x.shape[0], -1)
        return x


class Masked(Blocks):
    """Two inputs, whose batch symbols turn out to be equal where they meet."""

    def forward(self, x, mask):
        return super().forward(x * mask)


@pytest.mark.parametrize(("kind", "inputs"), [(Blocks, [(4, 6)]), (Masked, [(4, 6), (4, 1)])])
def test_equal_blocks_are_run_once(runs, kind, inputs):
    inputs = tuple(map(torch.randn, inputs))
    trace(kind(1), inputs)
    first = len(runs)
    trace(kind(20), inputs)
    assert len(runs) == 2 * first


@pytest.mark.parametrize("name", BY_NAME)
def test_symbolic_shapes_are_those_of_running_each_call(name, monkeypatch):
    (case,) = [case for case in CASES if case.name == name]
    model, (args, kwargs) = case.make(), case.inputs(4)
    ours = told(trace(model, args, kwargs))
    monkeypatch.setattr(NodeCache, "key", lambda self, node, values: None)
    assert ours == told(trace(model, args, kwargs))


def test_strides_tell_calls_apart():
    result = traced(lambda lin, x: [t.stride(0) * lin(x)[:, :1] for t in (lin(x), lin(x).T.contiguous().T)], out_dims=0)
    assert [str(info(n).number) for n in result.graph.nodes if n.target == "stride"] == []  # folded: 6 and 1
    assert [n.args[0] if isinstance(n.args[0], int) else n.args[1] for n in result.nodes if "mul" in n.name] == [6, 1]


def changing(change: Any) -> Any:
    """The same function on alike values, of which one is then used with its new sizes, the other with its old ones."""

    def forward(lin, x):
        first, second = lin(x), lin(x)
        change(first)
        return first.sum(-1), second.sum(-1), change(second).sum(-1), second.sum(-1)

    return forward


@pytest.mark.parametrize(
    ("change", "made"),
    [
        (lambda t: t.unsqueeze_(1), ["float32[b, 1]", "float32[b]", "float32[b, 1]", "float32[b, 1]"]),
        (lambda t: t.t_(), ["float32[6]", "float32[b]", "float32[6]", "float32[6]"]),
    ],
)
def test_sizes_changed_in_place(change, made):
    result = traced(changing(change), out_dims=(0, 0, 0, 0) if "b, 1" in made[0] else ("stack", 0, "stack", "stack"))
    assert shapes(result) == made


def test_sizes_that_depend_on_values_differ_from_call_to_call():
    def forward(lin, x):
        first, second = (lin(x) > 0), (lin(x) > 0.5)
        return first.nonzero(), second.nonzero(), lin(x)

    result = traced(forward, out_dims=("stack", "stack", 0))
    assert shapes(result) == ["int64[u0, 2]", "int64[u1, 2]", "float32[b, 6]"]


def test_calls_are_not_kept_for_the_process():
    """Torch's own cache of fake calls would keep each of them, and its symbols, for ever."""

    def objects() -> int:
        trace(Blocks(4), (torch.randn(4, 6),))
        gc.collect()
        return len(gc.get_objects())

    objects()  # makes what there is once in a process
    assert objects() - objects() > -200
