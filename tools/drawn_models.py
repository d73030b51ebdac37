"""Tiny models drawn by a seed from the configurations of transformers that the zoo does not name.

Sizes of a configuration are shrunk by their names, in configurations inside it as well. Inputs are found by trying:
the first candidates with which the model runs and trains. Models that none fits are left out.
"""

import copy
import inspect
import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from zoo.entry import BATCH, Call, Entry

TESTS = Path(__file__).resolve().parents[1] / "tests"
VOCABULARY = 64
FIRST_SPECIAL = 40  # token ids from here on are special ones
LENGTH = 8
TASKS = (
    "MODEL CAUSAL_LM CAUSAL_LM MASKED_LM SEQUENCE_CLASSIFICATION TOKEN_CLASSIFICATION QUESTION_ANSWERING "
    "SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ IMAGE_CLASSIFICATION IMAGE_CLASSIFICATION OBJECT_DETECTION "
    "SEMANTIC_SEGMENTATION UNIVERSAL_SEGMENTATION DEPTH_ESTIMATION AUDIO_CLASSIFICATION CTC IMAGE_TEXT_TO_TEXT "
    "IMAGE_TEXT_TO_TEXT TIME_SERIES_PREDICTION TIME_SERIES_REGRESSION VIDEO_CLASSIFICATION BACKBONE "
    "MASK_GENERATION TEXT_ENCODING PRETRAINING MASKED_IMAGE_MODELING ZERO_SHOT_IMAGE_CLASSIFICATION "
    "VISUAL_QUESTION_ANSWERING KEYPOINT_DETECTION IMAGE_TO_IMAGE TEXT_TO_WAVEFORM MULTIPLE_CHOICE"
).split()

# -- shrinking -------------------------------------------------------------------------------------------------------

_SIZES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"vocab_size|_vocab_size_|num_embeddings$|codebook_size", lambda v: VOCABULARY if v > 16 else v),
    (r"layers$|n_layers?$|num_blocks|depth$|layers_per|_stages$|num_layers_", lambda v: min(v, 2)),
    (r"(kv|key_value)_heads|n_head_kv|num_kv", lambda v: min(v, 2)),
    (r"heads?$", lambda v: min(v, 4)),
    (r"experts_per|top_?k|n_group|topk_group", lambda v: min(v, 2)),
    (r"experts", lambda v: min(v, 4)),
    (
        r"(image|sample|input|crop)_(size|resolution)|resolution|img_size|(^|_)image_(height|width)",
        lambda v: 32 if v >= 32 else v,
    ),
    (r"patch_size", lambda v: 8 if v > 8 else v),
    (r"position|max_length|max_seq|n_ctx|context_length", lambda v: min(v, 128)),
    (r"head_dim|d_kv|d_head|head_size|key_dim|linear_.*dim", lambda v: min(v, 8)),
    (r"window", lambda v: min(v, 4)),
    (r"mel|num_freq|bins|feature_size", lambda v: min(v, 16)),
    (r"queries|query_tokens|latents$|num_proposals", lambda v: min(v, 8)),
    (r"rank", lambda v: min(v, 8)),
    (r"num_frames|tubelet|n_fft|sampling_rate|hop_length|kernel|stride", lambda v: v),
    (r"intermediate|ffn|d_ff|inner|mlp_dim|feedforward", lambda v: min(v, 64)),
    (r"", lambda v: 32 if v > 32 else v),
)
_LEFT = re.compile(r"num_feat_extract|id2label|label2id|_offset|version|chunk_size_feed|seed")
_DROPPED = re.compile(r"out_features|out_indices|stage_names|transformers_version")


def shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration with small sizes, also in the configurations inside it."""
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if not _DROPPED.search(name):
            small[name] = value if _LEFT.search(name) else _small(name, value)
    layers = next(
        (small[k] for k in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if isinstance(small.get(k), int)),
        2,
    )
    was = next(
        (
            settings[k]
            for k in ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
            if isinstance(settings.get(k), int)
        ),
        0,
    )
    for name, value in settings.items():
        if name in small and isinstance(value, (list, tuple)) and was > 4 and len(value) == was:
            kinds = dict.fromkeys(value) if isinstance(value[0], str) else {}
            picked = [_small(name, v) for v in ([*kinds] if len(kinds) > 1 else value)]
            small[name] = (picked * layers)[: max(layers, len(kinds))]
            if len(kinds) > layers:
                for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
                    if key in small:
                        small[key] = len(kinds)
    return small


def _small(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return shrunk(value) if "id2label" not in name else value
    if re.search(r"token_id|token_index|_index$|_token$|_id$|_ids$", name):
        if isinstance(value, int) and not isinstance(value, bool):
            return value if value < 4 else FIRST_SPECIAL + value % 23
        return [_small(name, v) for v in value] if isinstance(value, (list, tuple)) else value
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    ):
        return _small_list(name, list(value))
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(v, (list, tuple)) for v in value)
        and "dilation" not in name
    ):
        return [_small(name, v) for v in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return next(size(value) for pattern, size in _SIZES if re.search(pattern, name))


def _small_list(name: str, values: list[int]) -> list[int]:
    if "mrope_section" in name:
        return [2, 1, 1]
    if re.search(r"depths|blocks|layers$|layers_per", name):
        return [1] * len(values)
    if "heads" in name:
        return [min(v, 2) for v in values]
    if re.search(r"index|indices|indexes|ids", name):
        return [min(v, 1) for v in values][:1]
    if re.search(r"kernel|stride|dilation|ratio|rates|lags|cardinality|padding|scales|factors|mult", name):
        return values
    if re.search(r"size$|resolution|window", name) and len(values) < 4 and "hidden" not in name:
        return [_small(name, v) for v in values]
    if max(values) > 32:
        return [
            max(8, round(v * 8 / min(values) / 8) * 8)
            if max(values) / min(values) <= 8
            else (8 if v < max(values) else 16)
            for v in values
        ]
    return values


# -- inputs ----------------------------------------------------------------------------------------------------------


def _get(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the names that the configuration or one inside it has."""
    inside = [v for v in vars(config).values() if hasattr(v, "to_dict")]
    for holder in (config, *inside, *(v for c in inside for v in vars(c).values() if hasattr(v, "to_dict"))):
        for name in names:
            value = getattr(holder, name, None)
            if value is not None and not isinstance(value, bool):
                return value
    return default


def _ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(4, FIRST_SPECIAL, (BATCH, length))


def _candidates(model: nn.Module, config: Any, task: str) -> dict[str, list[Callable[[], Any]]]:
    """For each argument of forward the inputs to try, most likely first."""
    size = _get(config, "image_size", default=32)
    size = size if isinstance(size, int) else size[0] if isinstance(size, (list, tuple)) else 32
    channels = _get(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    frames = _get(config, "num_frames", default=2)
    mels = _get(
        config, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", default=16
    )
    hidden = _get(config, "hidden_size", "d_model", default=32)
    series = _get(config, "context_length", "seq_length", default=32)
    width = _get(config, "num_input_channels", "input_size", default=2)

    def normal(*shape: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.randn(BATCH, *shape)

    pixels = [normal(channels, s, s) for s in dict.fromkeys((size, 32, 64, 128))]
    pixels += [
        normal(frames, channels, size, size),
        normal(1, channels, size, size),
        normal(channels, frames, size, size),
    ]
    return {
        "input_ids": [_ids, lambda: _ids(16), lambda: torch.randint(4, FIRST_SPECIAL, (BATCH, 2, LENGTH))],
        "decoder_input_ids": [lambda: _ids(6)],
        "attention_mask": [lambda: torch.ones(BATCH, LENGTH, dtype=torch.long)],
        "pixel_values": pixels,
        "pixel_values_videos": [normal(frames, channels, size, size)],
        "input_features": [normal(mels, 64), normal(64, mels), normal(1, 64, mels), normal(mels, 3000)],
        "input_values": [
            normal(400),
            normal(1600),
            normal(64, mels),
            normal(mels, 64),
            normal(1, 640),
            normal(1, 64, mels),
            normal(4000),
        ],
        "bbox": [lambda: torch.sort(torch.randint(0, 31, (BATCH, LENGTH, 4)), -1).values[..., [0, 1, 2, 3]]],
        "past_values": [normal(series, width), normal(series), normal(series + 7)],
        "future_values": [normal(_get(config, "prediction_length", default=4), width)],
        "spectrogram": [normal(64, mels)],
        "noise": [normal(16, 16)],
        "inputs": [normal(LENGTH, hidden), _ids],
        "token_ids": [_ids],
    }


def _labels(model: nn.Module, config: Any, task: str, inputs: dict[str, Any]) -> dict[str, list[Callable[[], Any]]]:
    classes = _get(config, "num_labels", default=2)
    ids = inputs.get("input_ids")
    if task == "QUESTION_ANSWERING":
        place = lambda: torch.randint(0, LENGTH, (BATCH,))  # noqa: E731
        return {"start_positions": [place], "end_positions": [place]}
    if "labels" not in inspect.signature(model.forward).parameters or "DETECTION" in task:
        return {}
    one = lambda: torch.randint(0, classes, (BATCH,))  # noqa: E731
    if "CLASSIFICATION" in task and "TOKEN" not in task:
        return {"labels": [one]}
    if task == "TOKEN_CLASSIFICATION":
        return {"labels": [lambda: torch.randint(0, classes, tuple(ids.shape))]}
    if task == "SEMANTIC_SEGMENTATION":
        return {"labels": [lambda: torch.randint(0, classes, (BATCH, *inputs["pixel_values"].shape[-2:]))]}
    if task in ("CTC", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        return {"labels": [lambda: _ids(4)]}
    if ids is not None:
        return {"labels": [lambda: ids.clone(), one]}
    return {}


def _trains(model: nn.Module, inputs: dict[str, Any]) -> bool:
    from zoo.reference import flat

    model.train()
    leaves = [x for _, x in flat(model(**inputs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    sum(x.float().sum() for x in leaves).backward()
    model.zero_grad()
    return bool(leaves)


_MISMATCH = re.compile(r"tokens: (?:\D*)(\d+).*features:? (?:\D*)(\d+)", re.S)


def fitting_inputs(model: nn.Module, config: Any, task: str, has_labels: bool) -> dict[str, Any]:
    """The first inputs with which the model runs and trains."""
    parameters = inspect.signature(model.forward).parameters
    tables = _candidates(model, config, task)
    required = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    main = getattr(model, "main_input_name", "input_ids")
    names = list(
        dict.fromkeys(
            [
                *required,
                *([main] if main in parameters else []),
                *(["input_ids"] if "input_ids" in parameters else []),
                *(n for n in ("bbox",) if n in parameters),
            ]
        )
    )
    if (
        task in ("IMAGE_TEXT_TO_TEXT", "VISUAL_QUESTION_ANSWERING", "ZERO_SHOT_IMAGE_CLASSIFICATION", "MODEL")
        and "pixel_values" in parameters
        and "pixel_values" not in names
    ):
        options = [[*names, "pixel_values"], names]
    else:
        options = [names]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        options = [[*o, "decoder_input_ids"] for o in options] + options
    if task.startswith("TIME_SERIES") and "future_values" in parameters:
        options = [[*o, "future_values"] for o in options] + options
    problems: list[str] = []
    for names in options:
        if any(n not in tables for n in names):
            problems.append(f"no candidates for {[n for n in names if n not in tables]}")
            continue
        for choice in itertools.product(*(tables[n] for n in names)):
            inputs = {n: c() for n, c in zip(names, choice, strict=True)}
            found = _with_tokens(model, config, inputs, problems)
            if found is None:
                continue
            if not has_labels:
                return found
            extra = _labels(model, config, task, found)
            for labels in itertools.product(*extra.values()):
                full = found | {n: c() for n, c in zip(extra, labels, strict=True)}
                try:
                    if _trains(model, full):
                        return full
                except Exception as error:
                    problems.append(f"labels: {type(error).__name__}: {error}")
            return found
    raise ValueError(" || ".join(dict.fromkeys(p[:150] for p in problems)))


def _with_tokens(model: nn.Module, config: Any, inputs: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """The inputs, with as many placeholder tokens as an image needs; None where the model does not run with them."""
    for _ in range(3):
        try:
            return inputs if _trains(model, inputs) else None
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
            token = _get(config, "image_token_id", "image_token_index", "boi_token_id")
            match = _MISMATCH.search(str(error))
            if match is None or token is None or "input_ids" not in inputs:
                return None
            count = int(match[2])
            if count % BATCH == 0 and count // BATCH <= 256 and count > 0:
                count //= BATCH
            else:
                return None
            ids = torch.cat([torch.full((BATCH, count), token), _ids()], 1)
            inputs = inputs | {"input_ids": ids}
    return None


# -- diffusers -------------------------------------------------------------------------------------------------------

_WIDTH = 32  # of embeddings: two heads of 16
_ROTARY = {2: [8, 8], 3: [4, 6, 6], 4: [4, 4, 4, 4]}  # parts of the width of a head
_MISSING: tuple[dict[str, Any], ...] = (  # what to try for sizes that are None by default
    {"in_channels": 4, "cross_attention_dim": _WIDTH, "norm_num_groups": 4},
    {"in_channels": 4, "out_channels": 4, "patch_size": 2, "caption_channels": _WIDTH, "axes_dim": (8, 8)},
)
_REQUIRED: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "spatial_compression_ratio": 2}
_DIFFUSION_KINDS = r"^(?!.*Control)(Auto(?!Model)|.*(.Model|Transformer|UNet|VAE|Vae|Bank|Decoder|Vocoder))"
_LARGEST = 30_000_000  # parameters
_DIFFUSION_SIZES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"z_dim|latent_channels|ratio|factor|stride|skip|kernel|n_fft|rate$|pos_embed_max|hop|max_size|timesteps", int),
    (r"projection_class", lambda v: 3 * _WIDTH),
    (r"patch", lambda v: min(v, 8)),
    (r"min_", lambda v: min(v, 16)),
    (r"text_.*length|text_len|num_embeddings", lambda v: LENGTH),
    (r"sample_frames", lambda v: 9),
    (r"num_frames|video_length", lambda v: 3),
    (r"sample_(size|width|height)", lambda v: min(v, 8)),
    (r"groups$", lambda v: min(v, 4)),
    (r"kv_heads|key_value", lambda v: min(v, 1)),
    (r"heads?$", lambda v: min(v, 2)),
    (r"caption|text|cond", lambda v: min(v, _WIDTH)),
    (r"head_dim|dim_head|rotary_dim|visual_dim|^latent_dim$|channels$|^ch$|base_dim", lambda v: min(v, 16)),
    (r"layers|depth|blocks$", lambda v: min(v, 2)),
    (r"length|tokens|vocab|codebook", lambda v: min(v, VOCABULARY)),
    (r"", lambda v: min(v, _WIDTH)),
)


def _small_diffusion(name: str, value: Any, channels: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
        return value
    if isinstance(value, int):
        small = next(size(value) for pattern, size in _DIFFUSION_SIZES if re.search(pattern, name))
        return small * channels // 16 if small == 16 and value > 16 else small
    if not value or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        return value
    if re.search(r"axes_dim|rope_dim|mrope|rope_axes", name):
        return _ROTARY[len(value)]
    if re.search(r"layers$|layer_ids", name) and "per" not in name:
        return [0]
    if re.search(r"layers|depths|num_.*blocks", name):
        return [1 for _ in value]
    if "heads" in name:
        return [2 for _ in value]
    return [channels * round(v / min(value)) for v in value] if "channels" in name else value


def _small_diffusion_model(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model and its settings, the first that fit each other."""
    problems = []
    for missing, channels in itertools.product(_MISSING, (16, 32)):
        settings = {}
        for name, parameter in inspect.signature(kind).parameters.items():
            is_required = parameter.default is parameter.empty
            value = _REQUIRED.get(name, 4) if is_required else parameter.default
            value = missing.get(name) if value is None else value
            if value is not None and parameter.kind is not parameter.VAR_KEYWORD:
                settings[name] = _small_diffusion(name, value, channels)
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(**settings).parameters())
            if size < _LARGEST:
                return kind(**settings), settings
            problems.append(f"{size} parameters")
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
    raise ValueError(" || ".join(dict.fromkeys(p[:150] for p in problems)))


def _diffusion_candidates(settings: dict[str, Any]) -> dict[str, list[Callable[[], Any]]]:
    """For each argument of forward the inputs to try, most likely first."""
    names = ("in_channels", "in_visual_dim", "in_dim", "io_channels", "latent_channels", "latent_dim")
    channels = next((settings[n] for n in names if settings.get(n)), 4)
    rotary = next(
        (len(v) for n, v in settings.items() if isinstance(v, list) and re.search(r"axes_dim|rope_dim|rope_axes", n)), 3
    )

    def normal(*shape: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.randn(BATCH, *shape)

    def grid(*shape: int) -> list[Callable[[], torch.Tensor]]:
        sizes = (*[1] * (rotary - len(shape)), *shape)
        places = torch.cartesian_prod(*map(torch.arange, sizes)).float()
        return [lambda: places, lambda: places.expand(BATCH, -1, -1).clone()]

    def each(*shape: int) -> Callable[[], list[torch.Tensor]]:
        return lambda: list(torch.randn(BATCH, *shape))

    def pair(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: tuple(torch.randn(2, *shape))

    images = [normal(c, s, s) for s in (8, 32) for c in dict.fromkeys((channels, 3))]
    videos = [
        normal(*shape)
        for s in (8, 16, 32)
        for shape in ((channels, 3, s, s), (3, channels, s, s), (3, s, s, channels), (3, 9, s, s))
    ]
    tokens = [normal(16, w) for w in (channels, _WIDTH, 4 * channels)] + [
        normal(channels, 16),
        normal(_WIDTH, 16),
        normal(_WIDTH),
    ]
    videos += [normal(3, 9, 64, 64), normal(3, 8, 8, 2 * channels + 1)]
    sounds = [normal(c, n) for n in (256, 2048) for c in (1, 2, 16)]
    texts = [normal(LENGTH, _WIDTH), normal(_WIDTH), normal(LENGTH, 2, _WIDTH), normal(16, _WIDTH)]
    time = [
        lambda: torch.randint(0, 100, (BATCH,)),
        lambda: torch.rand(BATCH),
        lambda: torch.rand(BATCH, 3),
        lambda: torch.rand(BATCH, 16),
    ]

    def ones(*shape: int, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        return lambda: torch.ones(BATCH, *shape, dtype=dtype)

    masks = [ones(n, dtype=t) for n in (LENGTH, 16) for t in (None, torch.bool)]
    sizes = [lambda: torch.full((BATCH, 2), 64.0)]
    return {
        "(audio_)?hidden_states|inputs_embeds": images + videos + tokens,
        "sample|mel": images + videos + sounds + tokens,
        "control_hidden_states": videos,
        "text_encoder_layers": [lambda: [torch.randn(BATCH, LENGTH, _WIDTH) for _ in range(4)]],
        "num_frames": [lambda: 1],
        "height|width": [lambda: 4],
        "audio_num_frames": [lambda: 16],
        "latents?": images + videos + tokens,
        "x": [*images, each(channels, 1, 8, 8)],
        "timesteps?|t|r_timestep|timestep_r|timestep_ratio": time,
        "\\w*encoder_hidden_states\\w*|text_bth|image_embeds|\\w*_hidden_states": texts,
        "cap_feats": [each(LENGTH, _WIDTH)],
        "image_latents|context_latents|latent_cond": [*images, *videos, *tokens],
        "image_embeddings": [normal(_WIDTH)],
        "padding_mask": [ones(8), ones(1, 8, 8), ones(1, 32, 32)],
        "condition_mask": [ones(1, 3, 8, 8)],
        "\\w*_mask(_\\w+)?": masks,
        "pooled_\\w+|proj_embedding": [normal(_WIDTH)],
        "clip_text_pooled": [normal(1, _WIDTH)],
        "guidance": [lambda: torch.rand(BATCH)],
        "img_ids": grid(4, 4),
        "txt_ids": grid(LENGTH),
        "position_ids": grid(LENGTH + 16) + grid(16),
        "img_shapes": [lambda: [[(1, 4, 4)]] * BATCH],
        "original_size|target_size|crop_coords": sizes,
        "\\w*rotary_emb\\w*": [pair(16, 16), normal(16, 8)],
        "input_ids|inputs|target_input_ids": [_ids],
        "prior_token_id": [lambda: _ids(16)],
        "prior_token_drop": [lambda: torch.arange(BATCH)[:, None].expand(BATCH, 16) > 1],
        "text_lens": [lambda: torch.tensor([LENGTH, LENGTH - 2] * (BATCH // 2))],
        "indices_latents": [lambda: torch.arange(3)],
        "fps": [lambda: torch.ones(BATCH)],
        "style": [lambda: torch.zeros(BATCH, dtype=torch.long)],
        "image_meta_size": [lambda: torch.full((BATCH, 6), 32.0)],
        "added_time_ids": [lambda: torch.full((BATCH, 3), 3.0)],
        "segment_ids": [ones(16)],
        "indicator": [lambda: torch.tensor([[2] * 10 + [3] * 6] * BATCH)],
        "scale": [lambda: 2],
        "global_hidden_states": [normal(1, _WIDTH)],
        "visual_rope_pos": [lambda: [torch.arange(3), torch.arange(4), torch.arange(4)]],
        "text_rope_pos": [lambda: torch.arange(LENGTH)],
    }


class _Calls(TorchFunctionMode):
    """Counts torch's functions: how far forward came."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def fitting_diffusion_inputs(kind: type[nn.Module], settings: dict[str, Any]) -> dict[str, Any]:
    """Inputs with which the model trains: one after another those with which forward comes furthest.

    First with few arguments that have defaults, then with all.
    """
    table = _diffusion_candidates(settings)
    needed: dict[str, list[Any]] = {}
    options: dict[str, list[Any]] = {}
    for name, parameter in list(inspect.signature(kind.forward).parameters.items())[1:]:
        fitting = next((choices for pattern, choices in table.items() if re.fullmatch(pattern, name)), [])
        if parameter.default is parameter.empty and fitting:
            options[name] = needed[name] = fitting
        elif fitting:
            is_rare = re.search("mask|rotary|guidance|image|control|clean|history|frames|height|width", name)
            options[name] = [None, *fitting] if is_rare else [*fitting, None]
            needed[name] = [None] if is_rare else options[name]
    problems: list[str] = []
    for choices in (needed, options):
        inputs = _furthest(kind, settings, choices, problems)
        if inputs is not None:
            return inputs
    raise ValueError(" || ".join(dict.fromkeys(p[:150] for p in problems)))


def _furthest(
    kind: type[nn.Module], settings: dict[str, Any], options: dict[str, list[Any]], problems: list[str]
) -> dict[str, Any] | None:
    best, before, problem = 0, -1, ""
    chosen = {name: choices[0] for name, choices in options.items()}
    while best > before:
        before = best
        for name, choices in reversed(options.items()):
            for choice in choices:
                trial = chosen | {name: choice}
                torch.manual_seed(1)
                inputs = {n: make() for n, make in trial.items() if make is not None}
                calls = _Calls()
                try:
                    with calls:
                        if _trains(kind(**settings), copy.deepcopy(inputs)):  # failed calls leave caches
                            return inputs
                except Exception as error:
                    if calls.count > best:
                        best, chosen, problem = calls.count, trial, f"{type(error).__name__}: {error}"
    problems.append(f"{problem} with {[n for n, c in chosen.items() if c is not None]}")
    return None


# -- drawing ---------------------------------------------------------------------------------------------------------


def _named() -> set[str]:
    """The classes that tests name."""
    texts = [
        path.read_text()
        for folder in ("tests", "docs", "examples")
        for path in (TESTS.parent / folder).rglob("*.*")
        if path.suffix in (".py", ".md")
    ]
    return set(re.findall(r"\b[A-Z]\w*\b", "\n".join(texts)))


def diffusion_names() -> list[str]:
    """Names of drawn models of diffusers."""
    import diffusers

    named = _named()
    models = [name for name, module in diffusers._class_to_module.items() if module.startswith("models")]
    return [f"diffusers:{name}" for name in models if name not in named and re.search(_DIFFUSION_KINDS, name)]


def drawn(seed: int) -> Iterator[str]:
    """Names of drawn models, one for each family: task, configuration, model, whether it gets labels."""
    from transformers.models.auto import modeling_auto

    generator = random.Random(seed)
    named = _named()
    pool: dict[str, list[tuple[str, str]]] = {}
    for task in dict.fromkeys(TASKS):
        mapping = getattr(modeling_auto, "MODEL_MAPPING" if task == "MODEL" else f"MODEL_FOR_{task}_MAPPING")
        names = mapping._model_mapping
        pairs = []
        for kind, config in mapping._config_mapping.items():
            if kind in names and config not in named:
                models = names[kind]
                pairs.append((config, models if isinstance(models, str) else models[0]))
        pool[task] = sorted(set(pairs))
    diffusion = diffusion_names()
    random.Random(seed).shuffle(diffusion)
    taken: set[str] = set()
    while any(pool.values()):
        task = generator.choice(TASKS)
        if not pool[task]:
            continue
        config, model = pool[task].pop(generator.randrange(len(pool[task])))
        if config not in taken:
            taken.add(config)
            yield f"{task}:{config}:{model}:{int(generator.random() < 0.7)}"
            if diffusion and len(taken) % 2 == 0:
                yield diffusion.pop()


def entry_of(name: str) -> Entry:
    """The entry of a drawn model. Its first build finds the inputs."""
    if name.startswith("diffusers:"):
        return _diffusion_entry(name)
    task, config_name, model_name, has_labels = name.split(":")
    state: dict[str, Any] = {}

    def make() -> tuple[nn.Module, Call]:
        import transformers

        kind = getattr(transformers, config_name)
        config = kind.from_dict(shrunk(kind().to_dict()))
        model_kind = getattr(transformers, model_name, None) or _hidden(model_name)
        torch.manual_seed(0)
        model = model_kind._from_config(config)
        if "inputs" not in state:
            torch.manual_seed(1)
            state["inputs"] = fitting_inputs(model, config, task, bool(int(has_labels)))
            torch.manual_seed(0)
            model = model_kind._from_config(kind.from_dict(shrunk(kind().to_dict())))
        return model, ((), copy.deepcopy(state["inputs"]))

    return Entry(name, "drawn", make)


def _diffusion_entry(name: str) -> Entry:
    state: dict[str, Any] = {}

    def make() -> tuple[nn.Module, Call]:
        import diffusers

        kind = getattr(diffusers, name.removeprefix("diffusers:"))
        model, settings = _small_diffusion_model(kind)
        if "inputs" not in state:
            state["inputs"] = fitting_diffusion_inputs(kind, settings)
            torch.manual_seed(0)
            model, _ = _small_diffusion_model(kind)
        return model, ((), copy.deepcopy(state["inputs"]))

    return Entry(name, "drawn", make)


def _hidden(name: str) -> Any:
    import transformers
    from transformers.models.auto.auto_factory import getattribute_from_module

    return getattribute_from_module(transformers, name)
