"""U-Nets of libraries, trained as pipelines and as plain models: their skips become portals.

    python examples/unets.py diffusion      diffusers' UNet2DConditionModel learns to separate noise from images
    python examples/unets.py medical        monai's U-Net in three dimensions learns to find bright areas of a volume

They need `pip install diffusers` and `pip install monai`. Both are small; larger models need the same lines.
The script prints the plan with its portals, and the losses of the pipeline and of the plain model (same weights and
data).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe

BATCH = 8
TOLERANCE = 1e-3  # micro-batches sum gradients in another order, and training amplifies rounding

Inputs = dict[str, Tensor]


class Diffusion:
    """Noise is added to images, its amount depends on a time step, and the model predicts the noise."""

    def make_model(self) -> nn.Module:
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=24,
            attention_head_dim=8,
            norm_num_groups=8,
        )

    def make_batch(self, generator: torch.Generator) -> tuple[Inputs, Tensor]:
        images = torch.rand(BATCH, 4, 1, 1, generator=generator).expand(-1, -1, 16, 16)
        noise = torch.randn(images.shape, generator=generator)
        step = torch.randint(1000, (BATCH,), generator=generator)
        share = torch.cos(step / 1000 * torch.pi / 2)[:, None, None, None]
        text = torch.randn(BATCH, 6, 24, generator=generator)
        return {
            "sample": share * images + (1 - share**2).sqrt() * noise,
            "timestep": step,
            "encoder_hidden_states": text,
        }, noise

    def loss(self, output: Any, noise: Tensor) -> Tensor:
        return F.mse_loss(output.sample, noise)


class Medical:
    """Noisy volumes with bright areas, and a mask of these areas."""

    def make_model(self) -> nn.Module:
        from monai.networks.nets import UNet

        sizes = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1}
        return UNet(spatial_dims=3, in_channels=1, out_channels=1, norm="instance", **sizes)

    def make_batch(self, generator: torch.Generator) -> tuple[Inputs, Tensor]:
        bright = F.interpolate(torch.rand(BATCH, 1, 4, 4, 4, generator=generator), 16).gt(0.6).float()
        return {"x": bright + 0.5 * torch.randn(bright.shape, generator=generator)}, bright

    def loss(self, output: Tensor, bright: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, bright)


TASKS: dict[str, Callable[[], Any]] = {"diffusion": Diffusion, "medical": Medical}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--devices", default="cpu,cpu,cpu", help="a device for each stage (default: cpu,cpu,cpu)")
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch (default: 4)")
    parser.add_argument("--steps", type=int, default=8, help="training steps (default: 8)")
    options = parser.parse_args()
    devices, task = options.devices.split(","), TASKS[options.task]()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = task.make_model()
    plain = copy.deepcopy(model).to(devices[0])
    inputs, target = task.make_batch(generator)
    pipe = fxpipe.pipeline(model, devices, options.chunks, example_kwargs=inputs)
    print(f"{pipe.plan}\n")
    print(f"values that skip a stage, and go through portals: {len(pipe.plan.portals)}\n")

    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    rows = []
    for step in range(options.steps):
        inputs, target = task.make_batch(generator)
        loss = pipe.forward_backward(**inputs, target=target, loss_fn=task.loss)
        optimizer.step()
        optimizer.zero_grad()

        plain_loss = task.loss(plain(**{name: x.to(devices[0]) for name, x in inputs.items()}), target.to(devices[0]))
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        rows.append((step, loss.item(), plain_loss.item()))
    print(tabulate(rows, headers=("step", "loss, fxpipe", "loss, plain"), floatfmt=".6f"))
    difference = max(abs(a - b) for _, a, b in rows)
    print(f"largest difference in {len(rows)} steps: {difference:.1e}")
    assert difference < TOLERANCE, "the pipeline does not train as the plain model does"
    pipe.close()


if __name__ == "__main__":
    main()
