"""Arguments of nodes by name, also of functions that have no signature."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxpipe.tracing.node_arguments import container_of, named_arguments, named_arguments_and_defaults
from fxpipe.tracing.verify.effects import running_statistics
from fxpipe.tracing.verify.micro_batch_sizes import run_deterministic_node


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


def test_defaults_stand_for_what_is_not_given():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    loss = graph.call_function(F.mse_loss, (x,), {"target": y})
    assert named_arguments(loss) == {"input": x, "target": y}
    assert named_arguments_and_defaults(loss)["reduction"] == "mean"


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
