"""The models on which cuts and predictions are tried, each with a mini-batch: two of our own, three of libraries.

Those of libraries are built from a configuration with random weights, so nothing is downloaded. All are small enough
for two cores, and train as they would elsewhere: dropout drops, batch norm counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from models import Workload, make_gpt, make_unet
from torch import Tensor, nn


@dataclass(frozen=True)
class RealModel:
    """A model with a mini-batch to train it on, and what its author would call a layer."""

    model: nn.Module
    layer: str  # a pattern of the module paths of a layer's functions
    target: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]
    args: tuple[Tensor, ...] = ()
    kwargs: dict[str, Tensor] = field(default_factory=dict)


def of_workload(workload: Workload, layer: str) -> RealModel:
    return RealModel(workload.model, layer, workload.target, workload.loss_fn, (workload.input,))


def make_t5(batch: int) -> RealModel:
    """An encoder and a decoder of five layers each: each decoder layer uses what the encoder made; tied embeddings."""
    from transformers import T5Config, T5ForConditionalGeneration

    tokens = 2048
    config = T5Config(
        vocab_size=tokens, d_model=256, d_kv=32, d_ff=1024, num_layers=5, num_heads=8, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    texts, answers = torch.randint(tokens, (batch, 96)), torch.randint(tokens, (batch, 48 + 1))

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    inputs = {"input_ids": texts, "decoder_input_ids": answers[:, :-1].contiguous()}
    layer = r"(encoder|decoder)\.block\.\d+"
    return RealModel(T5ForConditionalGeneration(config), layer, answers[:, 1:].contiguous(), loss_fn, kwargs=inputs)


def make_resnet(batch: int) -> RealModel:
    """Sixteen bottleneck blocks with batch norm, as ResNet-50 has; on images of 96 x 96 and at half its width."""
    from transformers import ResNetConfig, ResNetForImageClassification

    classes = 100
    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[128, 256, 512, 1024], depths=[3, 4, 6, 3], num_labels=classes
    )
    images, target = torch.randn(batch, 3, 96, 96), torch.randint(classes, (batch,))
    model = ResNetForImageClassification(config)
    layer = r"stages\.\d+\.layers\.\d+"
    return RealModel(model, layer, target, lambda output, y: F.cross_entropy(output.logits, y), (images,))


def make_diffusion(batch: int) -> RealModel:
    """A U-Net that predicts noise: residual blocks that all see the time, attention at the bottom, a skip for each."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64, 128),
        norm_num_groups=8, down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    images, times, noise = torch.randn(batch, 3, 32, 32), torch.randint(1000, (batch,)), torch.randn(batch, 3, 32, 32)
    layer = r"(down_blocks|up_blocks)\.\d+\.(resnets|attentions|downsamplers|upsamplers)\.\d+|mid_block\.\w+\.\d+"
    return RealModel(model, layer, noise, lambda output, y: F.mse_loss(output.sample, y), (images, times))


def make_gpt2(batch: int) -> RealModel:
    """GPT-2 small, without its dropout: weights that no cache holds, and 50,257 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    tokens, target = torch.randint(config.vocab_size, (2, batch, 64)).unbind()

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return RealModel(GPT2LMHeadModel(config), r"transformer\.h\.\d+", target, loss_fn, (tokens,))


REAL_MODELS: dict[str, Callable[[int], RealModel]] = {
    "gpt": lambda batch: of_workload(make_gpt(batch), r"blocks\.\d+"),
    "unet": lambda batch: of_workload(make_unet(batch), r"(down|up)\.\d+\.\d+|(bottom|grow)\.\d+"),
    "t5": make_t5,
    "resnet": make_resnet,
    "diffusion": make_diffusion,
    "gpt2": make_gpt2,
}
