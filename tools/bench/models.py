"""The models of the benchmark, each as a plain module and as the Sequential of its layers that torchgpipe needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embed(nn.Module):
    """Tokens, batch x length, to vectors, batch x length x width."""

    def __init__(self, tokens: int, length: int, width: int):
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Attention(nn.Module):
    """Causal attention behind a layer norm, with a way around it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.projection(attention.transpose(1, 2).reshape(batch, length, width))


class Perceptron(nn.Module):
    """Two linear layers behind a layer norm, with a way around them."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """A decoder-only transformer. Its head is not tied to its embedding, since torchgpipe refuses shared parameters."""

    def __init__(self, tokens: int = 1024, length: int = 128, width: int = 256, depth: int = 5, heads: int = 8):
        super().__init__()
        self.embed = Embed(tokens, length, width)
        halves = ((Attention(width, heads), Perceptron(width)) for _ in range(depth))
        self.blocks = nn.ModuleList(itertools.chain.from_iterable(halves))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    """Group norm instead of batch norm: all contestants then compute the same loss."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.GroupNorm(4, channels_out), nn.ReLU()
    )


class UNet(nn.Module):
    """Two convolutions on each depth of both ways, and a skip over all that is deeper."""

    def __init__(self, channels: int = 3, widths: tuple[int, ...] = (24, 48, 96, 128), classes: int = 4):
        super().__init__()
        depths = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(
            nn.ModuleList([convolution(i, o), convolution(o, o)])
            for i, o in itertools.pairwise((channels, *widths[:-1]))
        )
        self.bottom = nn.ModuleList([convolution(*depths[-1]), convolution(widths[-1], widths[-1])])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, here, 2, stride=2) for here, below in reversed(depths))
        self.up = nn.ModuleList(
            nn.ModuleList([convolution(2 * here, here), convolution(here, here)]) for here, _ in reversed(depths)
        )
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for first, second in self.down:
            x = second(first(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for layer in self.bottom:
            x = layer(x)
        for grow, (first, second) in zip(self.grow, self.up, strict=True):
            x = second(first(torch.cat([grow(x), skips.pop()], dim=1)))
        return self.head(x)


# ---- the same layers for torchgpipe, which cuts between the members of a Sequential ----


def gpt_as_sequential(model: GPT) -> nn.Sequential:
    return nn.Sequential(model.embed, *model.blocks, model.norm, model.head)


def unet_as_sequential(model: UNet) -> nn.Sequential:
    """Skips are declared, and each pair has a namespace of its own."""
    from torchgpipe.skip import Namespace, pop, skippable, stash

    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", x)
            return x

    @skippable(pop=["skip"])
    class PopAndConcatenate(nn.Module):
        def forward(self, x: Tensor) -> Any:
            skip = yield pop("skip")
            return torch.cat([x, skip], dim=1)

    namespaces = [Namespace() for _ in model.down]
    layers: list[nn.Module] = []
    for (first, second), namespace in zip(model.down, namespaces, strict=True):
        layers += [first, second, Stash().isolate(namespace), nn.MaxPool2d(2)]
    layers += model.bottom
    for grow, (first, second), namespace in zip(model.grow, model.up, reversed(namespaces), strict=True):
        layers += [grow, PopAndConcatenate().isolate(namespace), first, second]
    return nn.Sequential(*layers, model.head)


# ---- what is run ----


@dataclass(frozen=True)
class Workload:
    """A model with a mini-batch to train it on; every contestant gets a copy of the model."""

    name: str
    model: nn.Module
    input: Tensor
    target: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    as_sequential: Callable[[Any], nn.Sequential]


def sequence_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def make_gpt(batch: int) -> Workload:
    tokens = torch.randint(1024, (batch, 128 + 1))
    return Workload("gpt", GPT(), tokens[:, :-1], tokens[:, 1:], sequence_loss, gpt_as_sequential)


def make_unet(batch: int) -> Workload:
    image, classes = torch.randn(batch, 3, 64, 64), torch.randint(4, (batch, 64, 64))
    return Workload("unet", UNet(), image, classes, F.cross_entropy, unet_as_sequential)


WORKLOADS: dict[str, Callable[[int], Workload]] = {"gpt": make_gpt, "unet": make_unet}
