"""Models made at random, cut at random, run at random: always the plain model."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import hypothesis
import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from every_cut import EveryCut, loss_of
from torch import nn

BATCH = 5  # in 3 chunks: 2, 2, 1

OPERATIONS = (
    "linear", "tied", "frozen", "relu", "relu_", "add", "add_", "mul_", "skip", "cat", "view", "transpose", "chunk",
    "norm", "embedding", "unused", "detach", "count", "average", "keep", "size", "mask", "slice", "slice_", "no_grad",
    "max", "dropout", "contiguous", "out",
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    name: str
    one: int  # which of the values so far, counted from the last
    two: int


class Random(nn.Module):
    """Does the operations one after another; each value is [b, 4]."""

    def __init__(self, operations: tuple[Operation, ...]):
        super().__init__()
        self.operations = operations
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in operations)
        self.tied = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.embedding = nn.Embedding(3, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("kept", torch.zeros(4))
        for layer, operation in zip(self.layers, operations, strict=True):
            layer.requires_grad_(operation.name != "frozen")

    def forward(self, x, ids):
        values = [self.tied(x * 1), x, self.layers[0](x * 1)]
        length, mask, outputs = x.shape[0], None, []
        for layer, operation in zip(self.layers, self.operations, strict=True):
            v, w = (values[-1 - k % len(values)] for k in (operation.one, operation.two))
            match operation.name:
                case "linear" | "frozen":
                    v = layer(v * 1)
                case "tied":
                    v = self.tied(v * 1)
                case "relu":
                    v = torch.relu(v) * 1
                case "relu_":
                    v.relu_()
                case "add":
                    v = v + w
                case "add_":
                    v += w
                case "mul_":
                    v.mul_(0.5)
                case "skip":
                    v = values[0] + v
                case "cat":
                    v = torch.cat([v, w], 1)[:, 2:6]
                case "view":
                    v = v.view(length, 2, 2).view(-1, 4)
                case "transpose":
                    v = v.t()[[1, 0, 3, 2]].t() if operation.two % 2 else v.t().t()
                case "chunk":
                    a, b = v.chunk(2, 1)
                    v = torch.cat([b, a * 2], 1)
                case "norm":
                    v = self.norm(v * 1)
                case "embedding":
                    v = v + self.embedding(ids)
                case "unused":
                    layer(v * 1)
                case "detach":
                    v = v.detach()
                case "count":
                    self.count.add_(1)
                    v = v + self.count.clone()
                case "average":
                    self.average.mul_(0.5).add_(v.detach().mean(0))
                    v = v - self.average.clone()
                case "keep":
                    v = v + self.kept
                    self.kept = w.detach().sum(0)
                case "size":
                    v = v / v.new_ones(length, 1).sum(1, keepdim=True) + x.shape[1]
                case "mask":
                    mask = ids > 0 if mask is None else ~mask
                    v = v * mask[:, None] + ids[:, None]
                case "slice":
                    v = v[:, :3]
                    v = F.pad(v, (0, 1))
                case "slice_":
                    v[:, operation.two % 4] = 0
                    v[..., ::2] += w[..., 1::2]
                case "no_grad":
                    with torch.no_grad():
                        v = w * 2 + v
                case "max":
                    value, index = v.max(1)
                    v = v + value[:, None] * index[:, None]
                case "dropout":
                    v = F.dropout(v * 1, 0.5, self.training)
                case "contiguous":
                    v = v[:, :3].contiguous()
                    v = torch.cat([v, w[:, :1]], 1)
                case "out":
                    outputs.append(v * 2)
            values.append(v)
        return values[-1] + self.layers[-1](x * 1), tuple(outputs)


operations = st.builds(Operation, st.sampled_from(OPERATIONS), st.integers(0, 6), st.integers(0, 6))


def runs(model: nn.Module, *args: torch.Tensor) -> bool:
    """Does torch itself carry it out? It refuses some writes to what backward needs."""
    try:
        model = copy.deepcopy(model)
        loss_of(model(*[a.clone() for a in args])).backward()
    except RuntimeError:
        return False
    return True


# What is asked of any model, in any step.
ANY_MODEL_AND_STEP = {
    "program": st.lists(operations, min_size=2, max_size=12).map(tuple),
    "chunks": st.sampled_from([1, 3]),
    "schedule": st.sampled_from(["drop-in", "1f1b", "gpipe"]),
    "checkpoint": st.sampled_from(["never", "except_last", "always"]),
}


def random_model(program: tuple[Operation, ...]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs, if torch itself carries it out."""
    torch.manual_seed(0)
    model, args = Random(program), (torch.randn(BATCH, 4), torch.tensor([0, 1, 2, 1, 0]))
    hypothesis.assume(runs(model, *args))
    return model, args


@hypothesis.given(
    **ANY_MODEL_AND_STEP,
    data=st.data(),
)
@hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))
def test_any_model_in_any_stages_is_the_plain_model(program, data, chunks, schedule, checkpoint):
    model, args = random_model(program)
    # What order the sums of many views of one tensor have, autograd decides late; so a tolerance for all.
    names = tuple(name for name, _ in model.named_parameters())
    cuts = EveryCut(model, *args, loose=names)
    hypothesis.assume(cuts.allowed)
    places = data.draw(st.sets(st.sampled_from(cuts.allowed), min_size=1, max_size=4))
    cuts.check((0, *sorted(places)), chunks, schedule, checkpoint, seed=len(program))
