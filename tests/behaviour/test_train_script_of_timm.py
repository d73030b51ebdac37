"""The loop of timm's train script, with torch alone: a pipe in the place of what `create_model` returns."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from helpers.layered import Layered
from torch import nn

import fxpipe

CLASSES = 5


class VisionTransformer(
    Layered,
    patch_embed=lambda: nn.Conv2d(3, 16, 4, stride=4),
    cls_token=lambda: nn.Parameter(torch.zeros(1, 1, 16)),
    pos_embed=lambda: nn.Parameter(0.02 * torch.randn(1, 17, 16)),
    blocks=lambda: nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)),
    norm=lambda: nn.LayerNorm(16),
    head=(16, CLASSES),
):
    """As timm's small ones: patches, a class token, positions, blocks, and a head that can be replaced."""

    num_classes = CLASSES

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.forward_features(x)[:, 0])


class AveragedModel:
    """`ModelEma` of timm: a copy of the model, whose `state_dict` follows the model's."""

    def __init__(self, model: nn.Module, decay: float = 0.9):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            average.copy_(self.decay * average + (1.0 - self.decay) * value)


def mixup(x: torch.Tensor, target: torch.Tensor, share: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    soft = F.one_hot(target, CLASSES).float() * 0.9 + 0.1 / CLASSES
    return share * x + (1 - share) * x.flip(0), share * soft + (1 - share) * soft.flip(0)


def soft_cross_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Without decay for biases and norms, as `create_optimizer_v2` makes them."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": decayed, "weight_decay": 0.05}, {"params": [p for p in model.parameters() if p.ndim <= 1]}]


def train(model: Any, epochs: int = 2, accumulation: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of steps and of validations, and the weights with their averages, after a checkpoint was loaded."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(param_groups(model), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    average, losses = AveragedModel(model), []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        for step in range(4):
            samples = 6 if step == 3 else 8
            x, target = torch.randn(samples, 3, 16, 16, generator=generator), torch.arange(samples) % CLASSES
            x, target = mixup(x.contiguous(memory_format=torch.channels_last), target)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                loss = soft_cross_entropy(model(x), target) / accumulation
            scaler.scale(loss).backward()
            if step % accumulation == accumulation - 1:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                average.update(model)
            losses.append(loss.item())
        scheduler.step()
        for validated in (model, average.module):
            validated.eval()
            with torch.inference_mode():
                x = torch.randn(11, 3, 16, 16, generator=generator)
                losses.append(F.cross_entropy(validated(x), torch.arange(11) % CLASSES).item())
        checkpoint = {"state_dict": model.state_dict(), "state_dict_ema": average.module.state_dict()}
        checkpoint = copy.deepcopy(checkpoint)
        model.load_state_dict(checkpoint["state_dict"])
    return losses, {f"{kind}.{key}": value for kind, state in checkpoint.items() for key, value in state.items()}


def test_a_pipe_trains_in_it_as_the_model_does():
    plain = copy.deepcopy(model := VisionTransformer())
    with fxpipe.pipeline(model, ["cpu", "cpu"], chunks=4, progress=False) as pipe:
        ours = train(pipe)
        torch.testing.assert_close(ours, train(plain), atol=5e-6, rtol=2e-5)
        assert pipe.num_classes == CLASSES
        x = torch.randn(8, 3, 16, 16)
        torch.testing.assert_close(pipe.forward_features(x), plain.forward_features(x), atol=5e-6, rtol=2e-5)
