"""A training script of torchgpipe, before and after: a U-Net, whose skips have to be declared for torchgpipe.

    python examples/from_torchgpipe.py                              two CPU workers
    python examples/from_torchgpipe.py --devices cuda:0,cuda:1      two GPUs

`train_with_torchgpipe` is the script before: the model is an `nn.Sequential` whose layers stash and pop skips,
and it is cut by layers. It needs torchgpipe. `train_with_fxpipe` is the script after: the model is a
module with a plain `forward`. Both start with the same weights and use the same images. The script prints their losses
and the losses of the plain model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe

BATCH, SIZE, WIDTH, CHUNKS = 8, 32, 16, 4
TOLERANCE = 1e-4


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.ReLU())


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy images, and a mask of their bright areas."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        mask = F.interpolate(torch.rand(BATCH, 1, 4, 4, generator=generator), SIZE).gt(0.5).float()
        yield mask + 0.5 * torch.randn(BATCH, 3, SIZE, SIZE, generator=generator), mask


# ---- before ----


def train_with_torchgpipe(devices: list[str], steps: int) -> list[float]:
    from torchgpipe import GPipe
    from torchgpipe.skip import pop, skippable, stash

    @skippable(stash=["skip"])
    class Down(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = convolution(3, WIDTH)

        def forward(self, x):
            x = self.layer(x)
            yield stash("skip", x)
            return F.max_pool2d(x, 2)

    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = convolution(WIDTH, WIDTH)

        def forward(self, x):
            return F.interpolate(self.layer(x), scale_factor=2)

    @skippable(pop=["skip"])
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = convolution(2 * WIDTH, WIDTH)

        def forward(self, x):
            skip = yield pop("skip")
            return self.layer(torch.cat([skip, x], dim=1))

    torch.manual_seed(0)
    model = nn.Sequential(Down(), Middle(), Up(), nn.Conv2d(WIDTH, 1, 1))
    # By hand, and for two devices: balance_by_time runs single layers, which fails for layers with skips.
    model = GPipe(model, balance=[2, 2], devices=devices, chunks=CHUNKS, checkpoint="except_last")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for image, mask in batches(steps):
        output = model(image.to(model.devices[0]))
        loss = F.binary_cross_entropy_with_logits(output, mask.to(model.devices[-1]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- after ----


class UNet(nn.Module):
    """The same layers in the same order; the skip is a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.down = convolution(3, WIDTH)
        self.middle = convolution(WIDTH, WIDTH)
        self.up = convolution(2 * WIDTH, WIDTH)
        self.head = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        x = F.interpolate(self.middle(F.max_pool2d(skip, 2)), scale_factor=2)
        return self.head(self.up(torch.cat([skip, x], dim=1)))


def train_with_fxpipe(devices: list[str], steps: int) -> list[float]:
    torch.manual_seed(0)
    example = next(batches(1))[0]
    pipe = fxpipe.pipeline(UNet(), devices, chunks=CHUNKS, checkpoint="except_last", example_args=(example,))
    print(f"{pipe.plan}\n")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    losses = []
    for image, mask in batches(steps):
        loss = pipe.forward_backward(image, target=mask, loss_fn=F.binary_cross_entropy_with_logits)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    pipe.close()
    return losses


def train_plainly(device: str, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = UNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for image, mask in batches(steps):
        loss = F.binary_cross_entropy_with_logits(model(image.to(device)), mask.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cpu,cpu", help="a device for each stage, with commas (default: cpu,cpu)")
    parser.add_argument("--steps", type=int, default=12, help="training steps (default: 12)")
    options = parser.parse_args()
    devices = options.devices.split(",")

    losses = {"fxpipe": train_with_fxpipe(devices, options.steps), "plain": train_plainly(devices[0], options.steps)}
    try:
        losses["torchgpipe"] = train_with_torchgpipe(devices, options.steps)
    except ImportError:
        print("torchgpipe is not installed: pip install --no-build-isolation --no-deps torchgpipe")
    rows = [(step, *row) for step, row in enumerate(zip(*losses.values(), strict=True))]
    print(tabulate(rows, headers=("step", *losses), floatfmt=".6f"))
    difference = max(abs(values[0] - value) for values in zip(*losses.values(), strict=True) for value in values)
    print(f"largest difference: {difference:.1e}")
    assert difference < TOLERANCE, "they do not train alike"


if __name__ == "__main__":
    main()
