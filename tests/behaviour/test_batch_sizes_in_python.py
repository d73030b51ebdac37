"""Numbers that forward makes of the batch size: right at every size, or refused, whatever size it was planned on."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError

NUMBERS: dict[str, Any] = {
    "// 2 * 2": lambda x: x.shape[0] // 2 * 2,
    "// 4 * 4": lambda x: x.shape[0] // 4 * 4,
    "minus the rest": lambda x: x.size(0) - x.shape[0] % 4,
    "& ~1": lambda x: x.shape[0] & ~1,
    "~~": lambda x: ~(~x.shape[0]) // 2 * 2,
    ">> <<": lambda x: x.shape[0] >> 1 << 1,
    "min": lambda x: min(x.shape[0], 4),
    "bit_length": lambda x: 1 << (x.shape[0].bit_length() - 1),
    "ceil": lambda x: math.ceil(x.shape[0] / 2) * 2,
    "real": lambda x: x.shape[0].real // 2 * 2,
    "text": lambda x: int(f"{x.shape[0]}") // 2 * 2,
    "range": lambda x: len(range(x.shape[0])) // 2 * 2,
    "list": lambda x: len([0] * x.shape[0]) & ~1,
    "percent": lambda x: int("%d" % x.shape[0]) // 2 * 2,  # noqa: UP031
    "len // 2 * 2": lambda x: len(x) // 2 * 2,
    "len & ~1": lambda x: len(x) & ~1,
    "len min": lambda x: min(len(x), 4),
    "len bit_length": lambda x: 1 << (len(x).bit_length() - 1),
    "len range": lambda x: len(range(0, len(x), 2)) * 2,
    "len log2": lambda x: 2 ** int(math.log2(len(x))),
    "len branch": lambda x: 4 if len(x) > 3 else len(x),
}


class Cutting(nn.Module):
    """Treats the first samples in another way than the rest."""

    def __init__(self, number: Any):
        super().__init__()
        self.before, self.after, self.number = nn.Linear(6, 6), nn.Linear(6, 6), number

    def forward(self, x):
        h, n = torch.tanh(self.before(x)), self.number(x)
        return self.after(torch.cat([h[:n] * 2, h[n:] * 3]))


@pytest.mark.parametrize("name", NUMBERS)
def test_first_samples_are_right_or_refused_at_other_batch_sizes(name):
    torch.manual_seed(0)
    model = Cutting(NUMBERS[name])
    try:
        pipe = fxpipe.pipeline(
            copy.deepcopy(model),
            devices=["cpu", "cpu"],
            chunks=2,
            example_args=(torch.randn(8, 6),),
            profile_budget=0.0,
            progress=False,
        )
    except FxpipeError:
        return
    with pipe:
        for size in (8, 7, 3):
            x = torch.randn(size, 6)
            try:
                have = pipe(x)
            except FxpipeError:
                continue
            torch.testing.assert_close(have, model(x))
