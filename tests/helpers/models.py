"""Models of the kinds that people have, small: U-Net, tied GPT, ResNet, two branches, several outputs in a dict."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from helpers.layered import Layered


class UNet(nn.Module):
    """Skips over the whole depth."""

    def __init__(self, width: int = 4, depth: int = 3):
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList()
        last = 3
        for w in widths:
            self.down.append(nn.Sequential(nn.Conv2d(last, w, 3, padding=1), nn.GroupNorm(2, w), nn.ReLU()))
            last = w
        self.middle = nn.Conv2d(last, last, 3, padding=1)
        self.up = nn.ModuleList(
            nn.Conv2d(last + w, w, 3, padding=1) for last, w in zip([last, *widths[:0:-1]], widths[::-1], strict=True)
        )
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for conv, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = F.relu(conv(torch.cat([x, skip], 1)))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).split(d, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """The embedding is the head's weight."""

    def __init__(self, vocabulary: int = 17, width: int = 16, layers: int = 3, heads: int = 2, dropout: float = 0.1):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    """Batch norm and in-place ReLU."""

    def __init__(self, width: int = 4, blocks: int = 3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class TwoBranch(nn.Module):
    """Two inputs, by position and by keyword; branches that meet; a shared module; a frozen and an unused parameter."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.left, self.right = nn.Linear(6, width), nn.Linear(6, width)
        self.shared = nn.Linear(width, width)
        self.join = nn.Linear(2 * width, 4)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(width))

    def forward(self, x, *, other, scale=1.0):
        a = self.shared(torch.tanh(self.left(x))) * self.frozen
        b = self.shared(torch.sigmoid(self.right(other)))
        return self.join(torch.cat([a * scale, b], -1))


class DictOut(Layered, encode=(6, 8), decode=(8, 6), classify=(8, 3), average=lambda: torch.zeros(8)):
    """Nested input, several outputs, a buffer of its own that forward sets anew."""

    def forward(self, batch):
        hidden = torch.relu(self.encode(batch["x"]))
        if self.training:
            self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        out = {"logits": self.classify(hidden - self.average), "none": None, "width": hidden.shape[1]}
        out["pair"] = (self.decode(hidden), batch["extras"][0] * 2)
        return out


def _mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def _tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _dict_loss(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"], target) + output["pair"][0].pow(2).mean()


@dataclass(frozen=True)
class Case:
    """A model with what it takes to train it."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]  # number of samples -> args, kwargs
    target: Callable[[int], torch.Tensor]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    tied: tuple[str, ...] = ()  # weights that several stages may use: sums over stages may differ in the last bit


CASES = (
    Case("unet", UNet, lambda b: ((torch.randn(b, 3, 16, 16),), {}), lambda b: torch.randn(b, 1, 16, 16), _mse),
    Case(
        "gpt",
        GPT,
        lambda b: ((torch.randint(0, 17, (b, 7)),), {}),
        lambda b: torch.randint(0, 17, (b, 7)),
        _tokens,
        ("tokens.weight",),
    ),
    Case(
        "resnet",
        ResNet,
        lambda b: ((torch.randn(b, 3, 8, 8),), {}),
        lambda b: torch.randint(0, 5, (b,)),
        F.cross_entropy,
    ),
    Case(
        "two_branch",
        TwoBranch,
        lambda b: ((torch.randn(b, 6),), {"other": torch.randn(b, 6), "scale": 2.0}),
        lambda b: torch.randn(b, 4),
        _mse,
        ("shared.weight", "shared.bias"),
    ),
    Case(
        "dict",
        DictOut,
        lambda b: (({"x": torch.randn(b, 6), "extras": [torch.randn(b, 2), None, 3]},), {}),
        lambda b: torch.randint(0, 3, (b,)),
        _dict_loss,
    ),
)
BY_NAME = {case.name: case for case in CASES}


class TiedAtBothEnds(nn.Module):
    """Dropout, a running buffer, a weight in the first and the last stage, and a skip past the middle one."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.mix, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = F.dropout(self.tokens(ids), 0.1, self.training)
        skip = self.mix(x)
        x = self.inner(skip.flatten(0, 1)).view_as(skip)
        return self.head(self.norm(x + skip))


def token_loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


def tokens(batch: int) -> list[torch.Tensor]:
    """Inputs and targets for `TiedAtBothEnds`."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 11, (batch, 5), generator=generator) for _ in range(2)]


class WithLoss(nn.Module):
    """Takes its loss by itself: a mean over the tokens that count."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(20, width), nn.Linear(width, width), nn.Linear(width, 20)

    def forward(self, ids, labels):
        logits = self.head(torch.relu(self.layer(self.embedding(ids))))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def ids_and_labels(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs for `WithLoss`."""
    ids = torch.randint(0, 20, (batch, length))
    return ids, ids.masked_fill(torch.rand(batch, length) < 0.3, -100)
