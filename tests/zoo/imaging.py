"""Models of diffusers and monai: images made, images understood."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.entry import BATCH, Call, Entry, call, images, vectors

IMAGING: list[Entry] = []


def _steps() -> torch.Tensor:
    """Of the diffusion: one for each sample."""
    return torch.randint(0, 100, (BATCH,))


def _diffusers(name: str, model: str, inputs: Callable[[], Call], **settings: Any) -> None:
    def make() -> tuple[nn.Module, Call]:
        import diffusers

        return getattr(diffusers, model)(**settings), inputs()

    IMAGING.append(Entry(name, "diffusers", make))


def _monai(name: str, model: str, inputs: Callable[[], Call], **settings: Any) -> None:
    def make() -> tuple[nn.Module, Call]:
        from monai.networks import nets

        return getattr(nets, model)(**settings), inputs()

    IMAGING.append(Entry(name, "monai", make))


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}
_LEVELS: dict[str, Any] = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}

_diffusers(
    "unet2d", "UNet2DModel", lambda: call(images(16), _steps()), sample_size=16, attention_head_dim=4, dropout=0.1,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), **_LEVELS,
)  # fmt: skip
_diffusers(
    "unet2d_condition", "UNet2DConditionModel", lambda: call(images(16, 4), _steps(), vectors(5, 8)),
    sample_size=16, attention_head_dim=4, cross_attention_dim=8,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    **_LEVELS,
)  # fmt: skip
_diffusers(
    "unet1d", "UNet1DModel", lambda: call(vectors(2, 32), _steps()), sample_size=32, block_out_channels=(32, 32),
    down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"), up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
    extra_in_channels=64,
)  # fmt: skip
_diffusers(
    "autoencoder_kl", "AutoencoderKL", lambda: call(images(16)), down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2, **_LEVELS,
)  # fmt: skip
_diffusers(
    "vq_model", "VQModel", lambda: call(images(16)), down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=16, **_LEVELS,
)  # fmt: skip
_diffusers(
    "dit", "DiTTransformer2DModel",
    lambda: call(images(8, 4), timestep=_steps(), class_labels=torch.randint(0, 10, (BATCH,))),
    in_channels=4, num_layers=3, sample_size=8, num_embeds_ada_norm=10, norm_num_groups=4, **_HEADS,
)  # fmt: skip
_diffusers(
    "sd3", "SD3Transformer2DModel",
    lambda: call(images(8, 4), encoder_hidden_states=vectors(5, 8), pooled_projections=vectors(16), timestep=_steps()),
    sample_size=8, patch_size=2, in_channels=4, num_layers=2, joint_attention_dim=8, caption_projection_dim=16,
    pooled_projection_dim=16, out_channels=4, **_HEADS,
)  # fmt: skip
_diffusers(
    "pixart", "PixArtTransformer2DModel",
    lambda: call(images(8, 4), encoder_hidden_states=vectors(5, 8), timestep=_steps()),
    sample_size=8, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=16, caption_channels=8,
    norm_num_groups=4, use_additional_conditions=False, **_HEADS,
)  # fmt: skip


def _scan(size: int = 32) -> Callable[[], Call]:
    return lambda: call(images(size, 1))


_PLANE: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_VOLUME: dict[str, Any] = {"in_channels": 1, "img_size": (16, 16, 16), "hidden_size": 12, "mlp_dim": 24, "num_heads": 2}

_monai("monai_unet", "UNet", _scan(), channels=(4, 8, 16), strides=(2, 2), num_res_units=2, dropout=0.1, **_PLANE)
_monai("monai_basic_unet", "BasicUNet", _scan(), features=(4, 4, 8, 8, 8, 4), dropout=0.1, **_PLANE)
_monai(
    "monai_dynunet", "DynUNet", _scan(), kernel_size=[3, 3, 3, 3], strides=[1, 2, 2, 2], filters=[4, 8, 8, 8],
    upsample_kernel_size=[2, 2, 2], deep_supervision=True, deep_supr_num=1, **_PLANE,
)  # fmt: skip
_monai("monai_segresnet", "SegResNet", _scan(16), init_filters=8, dropout_prob=0.1, **_PLANE)
_monai("monai_attention_unet", "AttentionUnet", _scan(), channels=(4, 8, 16), strides=(2, 2), **_PLANE)
_monai(
    "monai_unetr", "UNETR", lambda: call(vectors(1, 16, 16, 16)), out_channels=2, feature_size=4, dropout_rate=0.1,
    **_VOLUME,
)  # fmt: skip
_monai("monai_swin_unetr", "SwinUNETR", _scan(64), feature_size=12, depths=(1, 1, 1, 1), **_PLANE)
_monai("monai_vit", "ViT", lambda: call(vectors(1, 16, 16, 16)), patch_size=(8, 8, 8), num_layers=3, **_VOLUME)
_monai("monai_densenet", "DenseNet", _scan(), init_features=8, growth_rate=4, block_config=(2, 2), **_PLANE)
_monai("monai_highres", "HighResNet", _scan(16), dropout_prob=0.1, **_PLANE)
