"""Losses of two views of each sample, in which all samples of the batch meet, and models of two views."""

import torch
import torch.nn.functional as F
from torch import nn

from helpers.layered import Layered

WIDTH = 12


def off_diagonal(x):
    return x.flatten()[:-1].view(len(x) - 1, len(x) + 1)[:, 1:].flatten()


def nt_xent(a, b):
    z = F.normalize(torch.cat([a, b]), dim=-1)
    scores = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    places = torch.arange(len(z), device=z.device)
    return F.cross_entropy(scores, (places + len(a)) % len(z))


def vicreg(a, b):
    def covariance(z):
        z = z - z.mean(0)
        return off_diagonal(z.T @ z / (len(z) - 1)).square().sum() / z.shape[1]

    def variance(z):
        return F.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean()

    return 25 * F.mse_loss(a, b) + 25 * (variance(a) + variance(b)) + covariance(a) + covariance(b)


def barlow_twins(a, b):
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (a, b))
    c = a.T @ b / len(a)
    return (torch.diagonal(c) - 1).square().sum() + 0.005 * off_diagonal(c).square().sum()


def contrast(a, b):
    return F.cross_entropy(F.normalize(a, dim=-1) @ b.T, torch.arange(len(a))) + a.std()


def with_a_branch(a, b):
    """Which of the two is taken depends on all samples, and changes from batch to batch."""
    scores = a @ b.T
    return F.cross_entropy(scores if scores.max() < 0.4 else scores.tanh(), torch.arange(len(a)))


def negatives_by_chance(a, b):
    others = b[torch.randint(0, len(b), (len(a), 3))]
    scores = torch.cat([(a * b).sum(1, keepdim=True), (a[:, None] * others).sum(2)], 1)
    similar = a @ b.T
    noise = F.dropout(similar, 0.5).mean() + (similar * torch.randn_like(similar)).mean()
    return F.cross_entropy(scores, torch.zeros(len(a), dtype=torch.long)) + noise


def tower(width=WIDTH):
    return nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 8))


class TwoTowers(Layered, image=tower, text=tower, scale=lambda: nn.Parameter(torch.tensor(1.0))):
    """CLIP: each image against each text. Returns the similarities as well."""

    def forward(self, x, y):
        u, v = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
        scores = u @ v.t() * self.scale.exp()
        places = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, places) + F.cross_entropy(scores.t(), places)) / 2, scores, u


class Views(Layered, encoder=tower):
    """Two views of each sample, compared by a function."""

    def forward(self, x, y):
        return self.loss(self.encoder(x), self.encoder(y))


class Features(Layered, one=tower, other=tower):
    """Two towers whose loss is taken outside of the model."""

    def forward(self, x, y):
        return {"a": self.one(x), "b": self.other(y), "number": 3}
