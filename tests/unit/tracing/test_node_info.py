"""Nodes of a graph: their information, shared by copies until one learns more, and their arguments by name."""

from __future__ import annotations

import ast
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxpipe
from fxpipe.tracing.node_info import NodeInfo, RandomDraws, named_arguments
from fxpipe.tracing.verify.compared_sizes import run_deterministic_node
from fxpipe.tracing.verify.effects import running_statistics


def test_a_node_that_is_added_beside_another_is_of_the_same_line_and_draws_nothing():
    beside = NodeInfo(source="model.py:3", module="block", rng=RandomDraws(), storages=frozenset({1})).beside()
    assert beside == NodeInfo(source="model.py:3", module="block")


def test_no_file_keeps_information_in_the_meta_of_nodes():
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
    assert found == set()


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


def test_a_causal_mask_given_by_place_stays_without_dropout():
    """It was left out where halves of a batch are compared."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("query", "key", "value")]
    attention = graph.call_function(F.scaled_dot_product_attention, (*nodes, None, 0.5, True))
    query, key, value = (torch.randn(1, 4, 8) for _ in nodes)
    found = run_deterministic_node(attention, dict(zip(nodes, (query, key, value), strict=True)).__getitem__)
    assert torch.equal(found, F.scaled_dot_product_attention(query, key, value, is_causal=True))
