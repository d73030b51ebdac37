"""Nodes of a graph: their information, shared by copies until one learns more, and their arguments by name."""

from __future__ import annotations

import ast
import operator
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxpipe
from fxpipe.errors import InternalError
from fxpipe.tracing.node_info import (
    NodeInfo,
    RandomDraws,
    container_of,
    named_arguments,
    number_of,
    opaque_call_of,
    state_of,
    value_read_of,
)
from fxpipe.tracing.verify.compared_sizes import run_deterministic_node
from fxpipe.tracing.verify.effects import running_statistics

TORCHS_OWN = {"val", "nn_module_stack", "stack_trace"}


def a_node() -> fx.Node:
    return fx.Graph().placeholder("x")


@pytest.mark.parametrize(
    ("accessor", "what"),
    [
        (state_of, "state of the thread"),
        (number_of, "number"),
        (value_read_of, "value that forward has read"),
        (opaque_call_of, "opaque call"),
    ],
)
def test_what_a_pass_expects_and_a_node_has_not_is_an_error_that_names_both(accessor, what):
    with pytest.raises(InternalError, match=f"the node x has no {what}"):
        accessor(a_node())


def test_a_node_that_is_added_beside_another_is_of_the_same_line_and_draws_nothing():
    beside = NodeInfo(source="model.py:3", module="block", rng=RandomDraws(), storages=frozenset({1})).beside()
    assert beside == NodeInfo(source="model.py:3", module="block")


def test_no_file_keeps_other_keys_in_the_meta_of_nodes():
    found = set()
    for path in pathlib.Path(fxpipe.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.Subscript(value=ast.Attribute(attr="meta"), slice=ast.Constant(value=str(key)))
                    | ast.Call(func=ast.Attribute(value=ast.Attribute(attr="meta")), args=[ast.Constant(str(key)), *_])
                    | ast.Compare(left=ast.Constant(str(key)), comparators=[ast.Attribute(attr="meta")])
                ):
                    found.add(key)
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="meta")), keywords=[_, *_] as keywords):
                    found.update(keyword.arg for keyword in keywords)
    assert found == TORCHS_OWN


@pytest.mark.parametrize(
    ("function", "order"),
    [
        (F.batch_norm, "input running_mean running_var weight bias training"),
        (torch.batch_norm, "input weight bias running_mean running_var training"),
        (F.instance_norm, "input running_mean running_var weight bias use_input_stats"),
        (torch.instance_norm, "input weight bias running_mean running_var use_input_stats"),
    ],
)
def test_running_statistics_of_norms_are_found_by_place(function, order):
    """Those of torch.instance_norm were taken to be its weight and bias."""
    graph = fx.Graph()
    *tensors, _ = order.split()
    nodes = {name: graph.placeholder(name) for name in tensors}
    norm = graph.call_function(function, (*nodes.values(), True))
    assert running_statistics(norm) == [nodes["running_mean"], nodes["running_var"]]
    assert {name: named_arguments(norm)[name] for name in tensors} == nodes


def test_arguments_are_those_given():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    loss = graph.call_function(F.mse_loss, (x,), {"target": y})
    assert named_arguments(loss) == {"input": x, "target": y}


def test_a_part_is_known_by_what_it_is_taken_of():
    graph = fx.Graph()
    values = graph.placeholder("values")
    assert container_of(graph.call_function(operator.getitem, (values, 0))) is values
    assert container_of(graph.call_function(operator.neg, (values,))) is None
    assert container_of(values) is None


def test_a_causal_mask_given_by_place_stays_without_dropout():
    """It was left out where halves of a batch are compared."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("query", "key", "value")]
    attention = graph.call_function(F.scaled_dot_product_attention, (*nodes, None, 0.5, True))
    query, key, value = (torch.randn(1, 4, 8) for _ in nodes)
    found = run_deterministic_node(attention, dict(zip(nodes, (query, key, value), strict=True)).__getitem__)
    assert torch.equal(found, F.scaled_dot_product_attention(query, key, value, is_causal=True))
