"""A model with skips, and published bubble rates."""

import functools
from typing import Any

import torch
from torch import nn

import fxpipe
from fxpipe.planning.plans import Plan

# Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241 (ICLR 2024): the times of table 4, and the bubble
# rates of table 5 that follow from them. Both as the authors keep them beside the program that made them:
# github.com/sail-sg/zero-bubble-pipeline-parallelism, megatron/core/pipeline_parallel/efficiency.py, commit f68d3879.
# Of 1F1B-I only the inputs stand there; its rates are what that program prints. ZB-1p has the rates of ZB-H1 in the
# table. (ZB-2p is left out: its schedules come from a search.)
#
# devices, micro-batches, layers, milliseconds of F, B, W and sending; bubble rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2
TABLE_5 = [
    (8, 24, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083),
    (8, 32, 24, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837),
    (8, 64, 24, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444),
    (8, 24, 32, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323, 0.0698),
    (8, 32, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045, 0.0559),
    (8, 64, 32, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554, 0.0294),
    (16, 48, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397, 0.0672),
    (16, 64, 48, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088, 0.0516),
    (16, 128, 48, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576, 0.0266),
    (32, 96, 64, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1493, 0.1421, 0.0641),
    (32, 128, 64, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1164, 0.1106, 0.0490),
    (32, 256, 64, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0624, 0.0594, 0.0257),
]


class Skipping(nn.Module):
    """A tied weight, and two values that go past their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        y = self.a(x).relu()
        z = self.c(self.b(y).relu()) + x
        return self.head(z * y)


CUT = [2, 2, 2, 3]


@functools.cache
def skipping(**options: Any) -> Plan:
    ids = torch.zeros(8, 5, dtype=torch.long)
    return fxpipe.plan(
        Skipping(), 4, example_args=(ids,), **{"chunks": 4, "balance": CUT, "hardware": "h100"} | options
    )
