"""What nodes were seen to write to."""

from __future__ import annotations

import copy

import torch
from helpers.layered import Layered
from torch import nn

import fxpipe
from fxpipe.tracing import trace


class Hidden(Layered, linear=4, mean=lambda: torch.zeros(4), var=lambda: torch.ones(4)):
    """Has running statistics in buffers, whose versions stay."""

    def forward(self, x):
        y = torch.native_batch_norm(self.linear(x), None, None, self.mean, self.var, True, 0.1, 1e-5)[0]
        return y + self.mean


def test_a_write_that_no_version_shows():
    model = Hidden()
    x = torch.randn(8, 4)
    traced = trace(model, (x,), out_dims=0)  # the statistics are those of a micro-batch
    effects = traced.effects
    (mean,) = [n for n in traced.graph.nodes if n.op == "get_attr" and n.target == "mean"]
    assert any(effects.alias[mean] in written for written in effects.written_classes)
    plain = copy.deepcopy(model)
    with fxpipe.pipeline(model, ["cpu", "cpu"], 2, example_args=(x,), out_dims=0) as pipe:
        for _ in range(2):
            outputs = pipe(x)
            want = torch.cat([plain(part) for part in x.chunk(2)])
            torch.testing.assert_close(outputs, want)
            torch.testing.assert_close(model.mean, plain.mean)
            torch.testing.assert_close(model.var, plain.var)


def test_what_is_returned_is_alive_behind_the_last_node():
    class Two(nn.Module):
        def forward(self, x):
            h = x * 2
            return h, h + 1

    traced = trace(Two(), (torch.randn(4, 2),))
    effects, count = traced.effects, len(traced.nodes)
    x, h, y = (next(n for n in traced.graph.nodes if n.op == "placeholder"), *traced.nodes)
    assert [effects.last[node] for node in (x, h, y)] == [0, count, count]
