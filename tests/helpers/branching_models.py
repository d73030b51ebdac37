"""Models whose branches may run in several orders."""

import torch
from torch import nn


class Translation(nn.Module):
    """Both embeddings first, with dropout, as people write it. The decoder's is needed behind the encoder only."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.source, self.target = nn.Embedding(11, width), nn.Embedding(11, width)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(width, 11, bias=False)
        self.head.weight = self.target.weight
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, source, target):
        x, y = self.drop(self.source(source)), self.drop(self.target(target))
        mask = (source != 0)[:, :, None]
        for layer in self.encoder:
            x = x + self.drop(torch.tanh(layer(x)))
        for layer in self.decoder:
            y = y + self.drop(torch.tanh(layer(y))) + torch.where(mask, x, 0.0).mean(1, keepdim=True)
        return self.head(y)


class Towers(nn.Module):
    """Two towers in turns, with whatever `step` does in each."""

    def __init__(self, width: int = 6, depth: int = 3):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.head = nn.Linear(2 * width, 3)

    def step(self, layer, norm, x):
        return x + torch.tanh(layer(x))

    def forward(self, x, y):
        x, y = x * 1, y * 1
        for left, right, norm in zip(self.left, self.right, self.norms, strict=True):
            x, y = self.step(left, norm, x), self.step(right, nn.Identity(), y)
        return self.head(torch.cat([x, y], 1))


class Tied(Towers):
    """One layer everywhere: its gradients are added in the order of the model."""

    def step(self, layer, norm, x):
        return x + torch.tanh(self.left[0](x)) * 1.7


class Parts(Towers):
    def step(self, layer, norm, x):
        a, b = layer(x).chunk(2, 1)
        value, index = x.max(1, keepdim=True)
        return torch.cat([b, a * value + index], 1)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 11, (5, 7)), torch.randint(0, 11, (5, 4))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(7, 6), torch.randn(7, 6)
