"""The models of the published experiments, in plain PyTorch: none knows of pipelines.

The transformer is the one of `tools/bench/models.py`, ResNet-50 that of `examples/tutorial_split_size.py`.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REPOSITORY = Path(__file__).resolve().parents[3]


def load_script(path: str) -> ModuleType:
    """Imports a script of the repository that is in no package."""
    name = Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# ---- U-Net (B, C) of torchgpipe's benchmarks (arXiv 2004.09910, section 5) ----


def convolutions(channels_in: int, between: int, channels_out: int, number: int) -> nn.Sequential:
    """So many convolutions, each with dropout, instance norm and a leaky ReLU."""
    widths = [channels_in, *[between] * (number - 1), channels_out]
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.Dropout2d(0.1), nn.InstanceNorm2d(o), nn.LeakyReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images, batch x 3 x size x size, to scores of one class. `blocks` is the paper's B, `channels` its C."""

    def __init__(self, blocks: int = 5, channels: int = 64, depth: int = 5):
        super().__init__()
        widths = [channels * 2**d for d in range(depth)]
        self.down = nn.ModuleList(convolutions(i, o, o, blocks) for i, o in itertools.pairwise([3, *widths]))
        self.bottom = convolutions(widths[-1], 2 * widths[-1], widths[-1], blocks)
        self.up = nn.ModuleList(convolutions(2 * w, w // 2, w // 2, blocks) for w in reversed(widths))
        self.head = nn.Conv2d(channels // 2, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x)


# ---- ResNet-101 (He et al., 2015, arXiv 1512.03385, table 1) ----


class ResNet(nn.Module):
    """The ResNet of the tutorial's example, with so many blocks in each of its four layers."""

    def __init__(self, blocks: tuple[int, int, int, int] = (3, 4, 23, 3), classes: int = 1000):
        super().__init__()
        example = load_script("examples/tutorial_split_size.py")
        self.stem = example.ResNet50().stem
        widths = (64, 128, 256, 512)
        self.layers = nn.ModuleList(
            example.layer(i, width, number, stride=1 if width == 64 else 2)
            for i, width, number in zip((64, 256, 512, 1024), widths, blocks, strict=True)
        )
        self.head = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


# ---- AmoebaNet-D (L, D) (Real et al., 2018, arXiv 1802.01548; sizes as in GPipe, arXiv 1811.06965, table 1) ----
#
# A cell has two inputs, the outputs of the two cells before it, each brought to its width: states 0 and 1. Five times
# it adds up two states, each behind an operation, to a further state. Some states, side by side, are its output.

Operation = Callable[[int, int], nn.Module]  # of (width, stride)


def relu_conv_norm(
    i: int, o: int, size: int | tuple[int, int] = 1, stride: int | tuple[int, int] = 1
) -> list[nn.Module]:
    height, width = (size, size) if isinstance(size, int) else size
    conv = nn.Conv2d(i, o, (height, width), stride, padding=(height // 2, width // 2), bias=False)
    return [nn.ReLU(), conv, nn.BatchNorm2d(o)]


def identity(width: int, stride: int) -> nn.Module:
    return nn.Identity()  # both kinds of cells have it where nothing is halved


def convolution_1x1(width: int, stride: int) -> nn.Module:
    return nn.Sequential(*relu_conv_norm(width, width, stride=stride))


def convolution_3x3(width: int, stride: int) -> nn.Module:
    narrow = width // 4
    return nn.Sequential(
        *relu_conv_norm(width, narrow), *relu_conv_norm(narrow, narrow, 3, stride), *relu_conv_norm(narrow, width)
    )


def convolution_1x7_7x1(width: int, stride: int) -> nn.Module:
    narrow = width // 4
    return nn.Sequential(
        *relu_conv_norm(width, narrow),
        *relu_conv_norm(narrow, narrow, (1, 7), (1, stride)),
        *relu_conv_norm(narrow, narrow, (7, 1), (stride, 1)),
        *relu_conv_norm(narrow, width),
    )


def average_3x3(width: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def maximum_2x2(width: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def maximum_3x3(width: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


# For each of the five sums, two states and what they go through. What a cell hands on is as in the reference program in
# TensorFlow; with it the numbers of parameters are GPipe's.
NORMAL: tuple[tuple[int, Operation], ...] = (
    (1, convolution_1x1), (1, maximum_3x3), (1, identity), (0, convolution_1x7_7x1), (0, convolution_1x1),
    (0, convolution_1x7_7x1), (2, maximum_3x3), (2, identity), (1, average_3x3), (5, convolution_1x1),
)  # fmt: skip
REDUCTION: tuple[tuple[int, Operation], ...] = (
    (0, maximum_2x2), (0, maximum_3x3), (2, identity), (1, convolution_3x3), (2, convolution_1x7_7x1),
    (2, maximum_3x3), (3, identity), (1, maximum_2x2), (2, average_3x3), (3, convolution_1x1),
)  # fmt: skip
NORMAL_OUTPUT, REDUCTION_OUTPUT = (0, 3, 4, 6), (4, 5, 6)


class HalvedSize(nn.Module):
    """Half the height and width: every other pixel for one half of the channels, those between for the other."""

    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.even = nn.Conv2d(channels_in, channels_out // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out - channels_out // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return self.norm(torch.cat([self.even(x), self.odd(F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1)))], dim=1))


class Cell(nn.Module):
    """A cell of `width`; a reduction halves height and width."""

    def __init__(self, channels: tuple[int, int], width: int, reduces: bool, follows_reduction: bool):
        """`channels`: of the output of the cell before the last, and of the last one."""
        super().__init__()
        before, last = channels
        self.last = nn.Sequential(*relu_conv_norm(last, width))
        self.before: nn.Module = nn.Identity()
        if follows_reduction:
            self.before = HalvedSize(before, width)
        elif before != width:
            self.before = nn.Sequential(*relu_conv_norm(before, width))
        table = REDUCTION if reduces else NORMAL
        self.sources = [source for source, _ in table]
        self.operations = nn.ModuleList(make(width, 2 if reduces and source < 2 else 1) for source, make in table)
        self.output = REDUCTION_OUTPUT if reduces else NORMAL_OUTPUT

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.last(last), self.before(before)]
        pairs = zip(self.operations, self.sources, strict=True)
        for (first, a), (second, b) in zip(pairs, pairs, strict=True):
            states.append(first(states[a]) + second(states[b]))
        return torch.cat([states[number] for number in self.output], dim=1)


class AmoebaNetD(nn.Module):
    """Images, batch x 3 x size x size, to scores. `layers`: normal cells, GPipe's L; `filters`: its D."""

    def __init__(self, layers: int = 18, filters: int = 256, classes: int = 1000):
        super().__init__()
        width = filters // 4
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width))
        self.cells = nn.ModuleList()
        channels, follows_reduction = (width, width), False
        for reduces in cell_kinds(layers):
            width *= 2 if reduces else 1
            cell = Cell(channels, width, reduces, follows_reduction)
            self.cells.append(cell)
            channels, follows_reduction = (channels[1], width * len(cell.output)), reduces
        self.head = nn.Linear(channels[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(F.adaptive_avg_pool2d(last, 1).flatten(1))


def cell_kinds(layers: int) -> Iterator[bool]:
    """Whether each cell is a reduction: two in the stem, then three times normal cells with a reduction between."""
    normal = [False] * (layers // 3)
    return itertools.chain([True, True], normal, [True], normal, [True], normal)
