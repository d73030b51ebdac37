"""Losses of two views of each sample, in which all samples of the batch meet."""

import torch
import torch.nn.functional as F


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
