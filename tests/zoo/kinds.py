"""Models that are hard to cut into micro-batches, by kind: losses of all samples, inputs not simply cut, state.

Each returns what its training takes: a loss, or a loss and what belongs to it. What is right is the plain model on the
whole mini-batch. The family of an entry is its kind.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from helpers.contrastive import barlow_twins, nt_xent, vicreg
from helpers.layered import Layered
from torch import Tensor, nn

from zoo.entry import BATCH, TOKENS, Call, Entry, call, images, name_of, padding, tokens, vectors

KINDS: list[Entry] = []

WIDTH = 8


def _library(kind: str, name: str, make: Callable[[], tuple[nn.Module, Call]], **options: Any) -> None:
    KINDS.append(Entry(name, kind, make, options))


def _own(kind: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(model: type[nn.Module]) -> type[nn.Module]:
        KINDS.append(Entry(name_of(model), kind, lambda: (model(), call(vectors(), vectors()))))
        return model

    return add


def _layers(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh())))


# -- experts with labels and the loss of their router ----------------------------------------------------------------

_BODY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = _BODY | {"vocab_size": TOKENS, "max_position_embeddings": 64}
_EXPERTS = _TEXT | {"num_key_value_heads": 1, "use_cache": False, "output_router_logits": True, "pad_token_id": 0}


def _experts(config: str, model: str, experts: str, **settings: Any) -> Callable[[], tuple[nn.Module, Call]]:
    def make() -> tuple[nn.Module, Call]:
        import transformers

        kind = getattr(transformers, model)
        made = kind._from_config(getattr(transformers, config)(**_EXPERTS, **settings), experts_implementation=experts)
        ids = tokens()
        return made, call(input_ids=ids, attention_mask=padding(), labels=ids.clone())

    return make


_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}

for _way in ("eager", "grouped_mm", "batched_mm"):
    _library("experts", f"mixtral_{_way}", _experts("MixtralConfig", "MixtralForCausalLM", _way, num_local_experts=4))
_library("experts", "qwen2_moe", _experts("Qwen2MoeConfig", "Qwen2MoeForCausalLM", "eager", **_QWEN))

# -- contrastive losses ----------------------------------------------------------------------------------------------

_VISION = _BODY | {"image_size": 32, "patch_size": 8}


def _two_towers(name: str, **settings: Any) -> Callable[[], tuple[nn.Module, Call]]:
    def make() -> tuple[nn.Module, Call]:
        import transformers

        config = getattr(transformers, f"{name}Config")
        text = _TEXT | {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "projection_size": 16}
        towers = {"text_config": text, "vision_config": _VISION}
        model = getattr(transformers, f"{name}Model")(config(**towers, projection_dim=8, **settings))
        return model, call(input_ids=tokens(), pixel_values=images(), return_loss=True)

    return make


for _name in ("CLIP", "Siglip", "Blip"):
    _library("contrastive", f"{_name.lower()}_loss", _two_towers(_name))


class _Views(nn.Module):
    """Two views of each sample, and a loss of the features of all."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.loss = _layers(8, 16, 16, 8), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.encoder(x), self.encoder(y))


for _name, _loss in {"simclr": nt_xent, "vicreg": vicreg, "barlow_twins": barlow_twins}.items():
    _library("contrastive", _name, lambda loss=_loss: (_Views(loss), call(vectors(), vectors())))  # type: ignore[misc]

# -- pictures in texts -----------------------------------------------------------------------------------------------

_PICTURE, _START, _END = 5, 3, 4  # tokens
_PATCH = {"patch_size": 4, "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3}
_MULTIMODAL_TEXT = _TEXT | {"num_key_value_heads": 1, "pad_token_id": 0, "head_dim": 8}
_QWEN_VL: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {
        "text_config": _MULTIMODAL_TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        "vision_config": _PATCH | {
            "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16,
            "window_size": 16, "fullatt_block_indexes": [1],
        },
    },
    "Qwen3VL": {
        "text_config": _MULTIMODAL_TEXT | {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": _PATCH | {
            "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 16,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    },
}  # fmt: skip


def _qwen_vl(name: str) -> Callable[[], tuple[nn.Module, Call]]:
    def make() -> tuple[nn.Module, Call]:
        import transformers

        config = getattr(transformers, f"{name}Config")
        special = {"image_token_id": _PICTURE, "vision_start_token_id": _START, "vision_end_token_id": _END}
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config(**_QWEN_VL[name], **special))
        model.config.use_cache = model.config.text_config.use_cache = False
        text = torch.randint(10, TOKENS, (BATCH, 4))
        picture = torch.tensor([_START, *[_PICTURE] * 4, _END]).expand(BATCH, -1)  # 4 x 4 patches, merged 2 x 2
        ids = torch.cat([picture, text], 1)
        kinds = (ids == _PICTURE).int()
        patches, grid = torch.randn(BATCH * 16, 3 * 4 * 4), torch.tensor([[1, 4, 4]] * BATCH)
        return model, call(
            input_ids=ids, labels=ids.clone(), pixel_values=patches, image_grid_thw=grid, mm_token_type_ids=kinds
        )

    return make


for _name in _QWEN_VL:
    _library("pictures in texts", _name.lower(), _qwen_vl(_name))


def _padded_pictures(name: str, text: str, **settings: Any) -> None:
    """The second sample has one picture and padding, so that the numbers of pictures differ."""

    def make() -> tuple[nn.Module, Call]:
        import transformers

        towers = {"text_config": _MULTIMODAL_TEXT | {"model_type": text}, "vision_config": _VISION}
        config = getattr(transformers, f"{name}Config")(**towers, image_token_id=_PICTURE, use_cache=False, **settings)
        ids, pictures = torch.randint(10, TOKENS, (BATCH, 12)), vectors(2, 3, 32, 32)
        ids[:, :8], ids[1, 4:8], pictures[1, 1] = _PICTURE, 9, 0  # 4 tokens for a picture
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        return model, call(input_ids=ids, labels=ids.clone(), pixel_values=pictures)

    _library("pictures in texts", name.lower(), make)


_HEADS_OF_LATENTS = {"resampler_n_heads": 2, "resampler_head_dim": 8, "num_key_value_heads": 1, "hidden_size": 16}
_padded_pictures("SmolVLM", "llama", scale_factor=2)
_padded_pictures("Idefics3", "llama", scale_factor=2)
_padded_pictures("Idefics2", "mistral", perceiver_config=_HEADS_OF_LATENTS | {"resampler_n_latents": 4})

# -- diffusion transformers: tables beside inputs that are cut -------------------------------------------------------

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}


def _diffusion(model: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> None:
    def make() -> tuple[nn.Module, Call]:
        import diffusers

        return getattr(diffusers, model)(**settings, **_HEADS), call(**inputs(), return_dict=False)

    _library("diffusion", model.partition("Transformer")[0].lower(), make)


_diffusion(
    "FluxTransformer2DModel",
    lambda: {
        "hidden_states": vectors(16, 4), "encoder_hidden_states": vectors(5, 8), "pooled_projections": vectors(8),
        "timestep": torch.rand(BATCH), "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(5, 3),
    },
    patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, joint_attention_dim=8, pooled_projection_dim=8,
    axes_dims_rope=(4, 6, 6),
)  # fmt: skip
_diffusion(
    "WanTransformer3DModel",
    lambda: {
        "hidden_states": vectors(4, 2, 8, 8), "encoder_hidden_states": vectors(5, 16), "timestep": torch.rand(BATCH)
    },
    in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2,
)  # fmt: skip
_diffusion(
    "HunyuanVideoTransformer3DModel",
    lambda: {
        "hidden_states": vectors(4, 2, 8, 8), "encoder_hidden_states": vectors(5, 16), "timestep": torch.rand(BATCH),
        "encoder_attention_mask": torch.ones(BATCH, 5), "pooled_projections": vectors(8), "guidance": torch.rand(BATCH),
    },
    in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, num_refiner_layers=1, text_embed_dim=16,
    pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
)  # fmt: skip
_diffusion(
    "LTXVideoTransformer3DModel",
    lambda: {
        "hidden_states": vectors(16, 4), "encoder_hidden_states": vectors(5, 16), "timestep": torch.rand(BATCH),
        "encoder_attention_mask": torch.ones(BATCH, 5), "num_frames": 1, "height": 4, "width": 4,
    },
    in_channels=4, out_channels=4, num_layers=2, cross_attention_dim=32, caption_channels=16,
)  # fmt: skip

# -- detection, series -----------------------------------------------------------------------------------------------


def _detr() -> tuple[nn.Module, Call]:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _DETR.items()}
    config = DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, num_queries=5, num_labels=3, d_model=16, dropout=0.0, **sizes
    )
    labels = [
        {"class_labels": torch.randint(0, 3, (count,)), "boxes": torch.rand(count, 4) / 2 + 0.2}
        for count in (1, 2, 1, 3)
    ]
    return DetrForObjectDetection(config), call(pixel_values=images(64), labels=labels)


_DETR = {"layers": 1, "attention_heads": 2, "ffn_dim": 256}
_library("detection", "detr_labels", _detr)

_PAST, _FUTURE = 10, 4


def _series(name: str) -> Callable[[], tuple[nn.Module, Call]]:
    def make() -> tuple[nn.Module, Call]:
        import transformers

        config = getattr(transformers, f"{name}Config")(
            prediction_length=_FUTURE, context_length=8, lags_sequence=[1, 2], num_time_features=1, d_model=16,
            encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, scaling="mean", use_cache=False, encoder_layerdrop=0.0,
            decoder_layerdrop=0.0, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        )  # fmt: skip
        return getattr(transformers, f"{name}ForPrediction")(config), call(
            past_values=vectors(_PAST), past_time_features=vectors(_PAST, 1), future_values=vectors(_FUTURE),
            past_observed_mask=torch.ones(BATCH, _PAST), future_time_features=vectors(_FUTURE, 1),
        )  # fmt: skip

    return make


for _name in ("TimeSeriesTransformer", "Informer"):
    _library("series", _name.lower(), _series(_name))

# -- likelihoods, reinforcement, state -------------------------------------------------------------------------------


@_own("flows")
class NormalizingFlow(Layered, couplings=lambda: nn.ModuleList(_layers(4, 16, 8) for _ in range(4))):
    """Affine couplings, and the likelihood under a normal distribution."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for coupling in self.couplings:
            a, b = x.chunk(2, 1)
            shift, scale = coupling(a + y[:, :4]).chunk(2, 1)
            total = total + scale.sum(1)
            x = torch.cat([b * scale.exp() + shift, a], 1)
        prior = torch.distributions.Normal(torch.zeros(8), torch.ones(8))
        return -(prior.log_prob(x).sum(1) + total).mean()


@_own("policies")
class ProximalPolicy(Layered, body=lambda: _layers(8, 16, 16), actor=(16, 5), critic=(16, 1)):
    """PPO: the advantages of the batch are normalised."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        policy, value = torch.distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(1)
        actions, returns = (y[:, 0].abs() * 2).long().clamp(max=4), y[:, 1]
        advantages = returns - value.detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (policy.log_prob(actions) - y[:, 2] / 5).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -gain.mean() + 0.5 * F.mse_loss(value, returns) - 0.01 * policy.entropy().mean()


@_own("teachers")
class MeanTeacher(
    Layered, student=lambda: _layers(8, 16, 16, 8), teacher=lambda: _layers(8, 16, 16, 8).requires_grad_(False)
):
    """The teacher's weights follow those of the student, in forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.mul_(0.99).add_(s, alpha=0.01)
        with torch.no_grad():
            wanted = self.teacher(y)
        return F.mse_loss(self.student(x), wanted)


@_own("gradients in forward")
class GradientPenalty(Layered, critic=lambda: _layers(8, 16, 16), head=(16, 1)):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        middle = ((x + y) / 2).requires_grad_()
        with torch.enable_grad():
            score = self.head(self.critic(middle)).sum()
            (slope,) = torch.autograd.grad(score, middle, create_graph=True)
        return self.head(self.critic(x)).mean() + (slope.norm(dim=1) - 1).square().mean()


@_own("spiking")
class Spiking(Layered, layers=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), potential=list):
    """Leaky neurons that keep their potential in an attribute, which each call resets."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.potential = [torch.zeros_like(x) for _ in self.layers]
        spikes = torch.zeros_like(x)
        for moment in (x, y, x * y):
            signal = moment
            for k, layer in enumerate(self.layers):
                self.potential[k] = 0.9 * self.potential[k] + layer(signal)
                signal = torch.sigmoid(5 * (self.potential[k] - 0.5))
            spikes = spikes + signal
        return F.mse_loss(spikes, y)
