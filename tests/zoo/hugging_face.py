"""Models of transformers, as users make them: with the library's defaults where these fit into a tiny model.

One line each: name, configuration, model, inputs, settings. The package is imported when a model is made.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.entry import TOKENS, Call, Entry, call, images, padding, tokens, vectors

HUGGING_FACE: list[Entry] = []

_BODY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT: dict[str, Any] = _BODY | {"vocab_size": TOKENS, "max_position_embeddings": 64}
_CAUSAL: dict[str, Any] = _TEXT | {"use_cache": False, "pad_token_id": 0}
_VISION: dict[str, Any] = _BODY | {"image_size": 32, "patch_size": 8}
_PART = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
_PARTS: dict[str, Any] = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _PART.items()}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_SEQ2SEQ = _PARTS | _SPECIAL | {"vocab_size": TOKENS, "d_model": 16, "use_cache": False}


def _text() -> Call:
    return call(input_ids=tokens())


def _padded() -> Call:
    return call(input_ids=tokens(), attention_mask=padding())


def _labelled() -> Call:
    ids = tokens()
    return call(input_ids=ids, labels=ids.clone())


def _counted() -> Call:
    """Labels with padding, and how many are none, as the library's Trainer gives them."""
    ids = tokens()
    labels = ids.clone()
    labels[:2, 3:] = -100
    return call(input_ids=ids, labels=labels, num_items_in_batch=(labels[:, 1:] != -100).sum())


def _pairs() -> Call:
    return call(input_ids=tokens(), decoder_input_ids=tokens(6))


def _sounds() -> Call:
    return call(input_values=vectors(400))


def _picture(size: int = 32) -> Callable[[], Call]:
    return lambda: call(pixel_values=images(size))


def _add(
    name: str,
    config: str,
    model: str,
    inputs: Callable[[], Call],
    settings: dict[str, Any],
    *,
    made_with: dict[str, Any] | None = None,
    has_one_size: bool = False,
) -> None:
    def make() -> tuple[nn.Module, Call]:
        import transformers

        made = getattr(transformers, model)._from_config(getattr(transformers, config)(**settings), **made_with or {})
        return made, inputs()

    HUGGING_FACE.append(Entry(name, "transformers", make, has_one_size=has_one_size))


# -- encoders of text ------------------------------------------------------------------------------------------------

_EAGER = {"attn_implementation": "eager"}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
_ALBERT = _TEXT | {"embedding_size": 8, "num_hidden_layers": 5, "hidden_dropout_prob": 0.1}
_DISTIL = {"vocab_size": TOKENS, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32}
_XLNET = {"vocab_size": TOKENS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}

_add("bert", "BertConfig", "BertModel", _text, _TEXT)
_add("bert_padded", "BertConfig", "BertModel", _padded, _TEXT)
_add("bert_eager", "BertConfig", "BertModel", _padded, _TEXT | {"output_attentions": True}, made_with=_EAGER)
_add("bert_hidden_states", "BertConfig", "BertModel", _text, _TEXT | {"output_hidden_states": True})
_add("bert_masked_lm", "BertConfig", "BertForMaskedLM", _labelled, _TEXT)
_add("roberta", "RobertaConfig", "RobertaModel", _padded, _TEXT)
_add("albert", "AlbertConfig", "AlbertModel", _text, _ALBERT)
_add("electra", "ElectraConfig", "ElectraModel", _text, _TEXT | {"embedding_size": 8})
_add("distilbert", "DistilBertConfig", "DistilBertModel", _text, _DISTIL)
_add("deberta_v2", "DebertaV2Config", "DebertaV2Model", _padded, _TEXT | _DEBERTA)
_add("mpnet", "MPNetConfig", "MPNetModel", _text, _TEXT)
_add("fnet", "FNetConfig", "FNetModel", _text, _TEXT)
_add("xlnet", "XLNetConfig", "XLNetModel", _text, _XLNET | {"use_mems_eval": False, "use_mems_train": False})

# -- decoders --------------------------------------------------------------------------------------------------------

_GPT2 = {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
_GROUPED = _CAUSAL | {"num_key_value_heads": 1}
_BLOOM = {"vocab_size": TOKENS, "hidden_size": 16, "n_layer": 3, "n_head": 2, "use_cache": False}
_OPT = _CAUSAL | {"ffn_dim": 32, "word_embed_proj_dim": 16}
_GEMMA = _GROUPED | {"head_dim": 8, "sliding_window": 4}
_MIXTRAL = _GROUPED | {"num_local_experts": 2}
_MAMBA = {"vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}

_add("gpt2", "GPT2Config", "GPT2LMHeadModel", _text, _GPT2 | {"use_cache": False})
_add("gpt2_padded", "GPT2Config", "GPT2LMHeadModel", _padded, _GPT2 | {"use_cache": False})
_add("gpt2_cache", "GPT2Config", "GPT2LMHeadModel", _text, _GPT2)
_add("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", _text, _CAUSAL)
_add("bloom", "BloomConfig", "BloomForCausalLM", _padded, _BLOOM)
_add("opt", "OPTConfig", "OPTForCausalLM", _padded, _OPT)
_add("llama", "LlamaConfig", "LlamaForCausalLM", _text, _GROUPED)
_add("llama_padded", "LlamaConfig", "LlamaForCausalLM", _padded, _GROUPED)
_add("llama_cache", "LlamaConfig", "LlamaForCausalLM", _text, _GROUPED | {"use_cache": True})
_add("llama_counted", "LlamaConfig", "LlamaForCausalLM", _counted, _GROUPED)
_add("qwen2", "Qwen2Config", "Qwen2ForCausalLM", _padded, _GROUPED)
_add("gemma2", "Gemma2Config", "Gemma2ForCausalLM", _text, _GEMMA)
_add("phi", "PhiConfig", "PhiForCausalLM", _text, _CAUSAL)
_add("mixtral", "MixtralConfig", "MixtralForCausalLM", _text, _MIXTRAL)
_add("mixtral_bmm", "MixtralConfig", "MixtralForCausalLM", _text, _MIXTRAL, made_with={"experts_implementation": "batched_mm"})  # fmt: skip  # noqa: E501
_add("mamba", "MambaConfig", "MambaModel", _text, _MAMBA)
# With rescale_every it divides its weights in place when it is first called in evaluation, which is refused.
_add("rwkv", "RwkvConfig", "RwkvModel", _text, _MAMBA | {"attention_hidden_size": 16, "rescale_every": 0})

# -- encoder and decoder ---------------------------------------------------------------------------------------------

_T5_SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_T5 = _T5_SIZES | {"vocab_size": TOKENS, "use_cache": False, "decoder_start_token_id": 0}
_BART = _SEQ2SEQ | {"max_position_embeddings": 32}

_add("t5", "T5Config", "T5ForConditionalGeneration", _pairs, _T5)
_add("t5_labels", "T5Config", "T5ForConditionalGeneration", lambda: call(input_ids=tokens(), labels=tokens(6)), _T5)
_add("bart", "BartConfig", "BartModel", _text, _BART)
_add("bart_layerdrop", "BartConfig", "BartModel", _text, _BART | {"encoder_layerdrop": 1.0})

# -- sound -----------------------------------------------------------------------------------------------------------

_WHISPER = _SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
_CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3)}
_POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
_WAV2VEC2 = _BODY | _CONVOLUTIONS | _POSITIONS | {"vocab_size": 20, "layerdrop": 0.0, "mask_time_prob": 0.0}


def _spectra() -> Call:
    return call(input_features=vectors(8, 32), decoder_input_ids=tokens(6))


_add("whisper", "WhisperConfig", "WhisperModel", _spectra, _WHISPER)
_add("wav2vec2", "Wav2Vec2Config", "Wav2Vec2Model", _sounds, _WAV2VEC2)
# Spans of time are masked by numbers of numpy's (one place for a span as long as the sound), behind hooks on modules.
_add("wav2vec2_masked", "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", _sounds, _WAV2VEC2 | {"mask_time_prob": 0.5, "mask_time_length": 49, "classifier_proj_size": 512}, has_one_size=True)  # fmt: skip  # noqa: E501
_add("hubert", "HubertConfig", "HubertModel", _sounds, _WAV2VEC2)

# -- pictures --------------------------------------------------------------------------------------------------------

_BEIT = _VISION | {"drop_path_rate": 0.1, "use_relative_position_bias": True, "use_mask_token": False}
_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
_MAE = _VISION | {f"decoder_{name}": size for name, size in _BODY.items()} | {"decoder_num_hidden_layers": 2}
_NECK = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [4, 4, 4, 4], "fusion_hidden_size": 4}
_DPT = _VISION | _NECK | {"num_hidden_layers": 4}
_LEVELS: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}
_SEGFORMER = _LEVELS | {"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16}
_PVT = _LEVELS | {"image_size": 64, "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]}
_MOBILEVIT = {"image_size": 64, "hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8] * 7, "num_attention_heads": 2}
_MASK_WIDTHS = ("hidden_dim", "feature_size", "mask_feature_size", "encoder_feedforward_dim", "dim_feedforward")
_MASK_COUNTS = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 5}
_MASK_FORMER = dict.fromkeys(_MASK_WIDTHS, 32) | _MASK_COUNTS


def _mask2former() -> tuple[nn.Module, Call]:
    """Queries that attend to a picture, on a Swin: the kind of model that detects and segments."""
    from transformers import Mask2FormerConfig, Mask2FormerModel, SwinConfig

    backbone = SwinConfig(
        image_size=64, patch_size=2, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    return Mask2FormerModel(Mask2FormerConfig(backbone_config=backbone, **_MASK_FORMER)), call(pixel_values=images(64))


def _detr() -> tuple[nn.Module, Call]:
    from transformers import DetrConfig, DetrModel, ResNetConfig

    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    config = DetrConfig(backbone_config=backbone, use_timm_backbone=False, num_queries=5, d_model=16, **_PARTS)
    return DetrModel(config), call(pixel_values=images(64))


_add("vit", "ViTConfig", "ViTModel", _picture(), _VISION)
_add("deit", "DeiTConfig", "DeiTModel", _picture(), _VISION)
_add("beit", "BeitConfig", "BeitModel", _picture(), _BEIT)
_add("dinov2", "Dinov2Config", "Dinov2Model", _picture(), _VISION | {"mlp_ratio": 2, "drop_path_rate": 0.1})
_add("vit_mae", "ViTMAEConfig", "ViTMAEForPreTraining", _picture(), _MAE)
_add("swin", "SwinConfig", "SwinModel", _picture(), _SWIN)
_add("swinv2", "Swinv2Config", "Swinv2Model", _picture(), _SWIN)
_add("convnext", "ConvNextConfig", "ConvNextModel", _picture(64), _LEVELS | {"drop_path_rate": 0.1})
_add("resnet", "ResNetConfig", "ResNetForImageClassification", _picture(), {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]})  # fmt: skip  # noqa: E501
_add("regnet", "RegNetConfig", "RegNetModel", _picture(64), _LEVELS | {"embedding_size": 8, "groups_width": 8})
_add("mobilenet_v2", "MobileNetV2Config", "MobileNetV2Model", _picture(64), {"depth_multiplier": 0.25, "min_depth": 4})
_add("mobilevit", "MobileViTConfig", "MobileViTModel", _picture(64), _MOBILEVIT)
_add("poolformer", "PoolFormerConfig", "PoolFormerModel", _picture(64), _LEVELS | {"hidden_sizes": [8] * 4})
_add("pvt_v2", "PvtV2Config", "PvtV2Model", _picture(64), _PVT)
_add("segformer", "SegformerConfig", "SegformerForSemanticSegmentation", _picture(64), _SEGFORMER)
_add("dpt", "DPTConfig", "DPTForDepthEstimation", _picture(), _DPT)
_add("timesformer", "TimesformerConfig", "TimesformerModel", lambda: call(vectors(2, 3, 32, 32)), _VISION | {"num_frames": 2})  # fmt: skip  # noqa: E501
HUGGING_FACE += [Entry("mask2former", "transformers", _mask2former), Entry("detr", "transformers", _detr)]

# -- several kinds of input, and series ------------------------------------------------------------------------------

_CLIP = {"text_config": _TEXT | {"eos_token_id": 2}, "vision_config": _VISION, "projection_dim": 8}
_SERIES = {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "prediction_length": 4}
_PATCHTST = _SERIES | {"d_model": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 16}


class ClipEmbeddings(nn.Module):
    """What a contrastive loss takes. (The model's own output compares all texts of the batch with all images.)"""

    def __init__(self) -> None:
        super().__init__()
        from transformers import CLIPConfig, CLIPModel

        self.clip = CLIPModel(CLIPConfig(**_CLIP))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.clip(input_ids=ids, attention_mask=mask, pixel_values=pixels)
        return out.text_embeds, out.image_embeds


def _clip() -> tuple[nn.Module, Call]:
    return ClipEmbeddings(), call(tokens(), padding(), images())


_add("clip_vision", "CLIPVisionConfig", "CLIPVisionModel", _picture(), _VISION)
HUGGING_FACE.append(Entry("clip", "transformers", _clip))
_add("patchtst", "PatchTSTConfig", "PatchTSTForPrediction", lambda: call(past_values=vectors(32, 2)), _PATCHTST)
