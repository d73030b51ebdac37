"""`hf:gpt2`: a model type of the installed transformers, with random weights; nothing is downloaded.

The configuration is the type's default, updated with the user's fields (`--kwargs n_layer=4`). The class is a language
model if the type has one, else a classifier, else the base model. If the user gives no inputs, some are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fxpipe.errors import ArgumentError
from fxpipe.inspect.targets import InputOption, InputShape, describe_error
from fxpipe.utils.units import did_you_mean

if TYPE_CHECKING:
    from torch import nn

HUGGING_FACE_PREFIX = "hf:"
TEXT_BATCH, TEXT_LENGTH = 8, 128  # samples and tokens of a drawn text
RAW_AUDIO = 16_000  # samples: one second
HIDDEN_CONFIG_FIELDS = ("attn_implementation",)  # accepted by a configuration, and stored under another name


@dataclass(frozen=True, slots=True)
class ModelType:
    """The `model_type` of a transformers configuration."""

    name: str

    def __str__(self) -> str:
        return f"{HUGGING_FACE_PREFIX}{self.name}"


def parse_model_type(text: str) -> ModelType:
    """Parses `hf:gpt2` -> ModelType("gpt2")."""
    name = text.removeprefix(HUGGING_FACE_PREFIX)
    if not re.fullmatch(r"[\w.-]+", name) and not (Path(name) / "config.json").is_file():
        raise ArgumentError(
            f"{text!r}: expected the type of a model of transformers, as in hf:gpt2, or a folder with its config.json; "
            "nothing is downloaded"
        )
    return ModelType(name)


def load_hugging_face_model(model_type: ModelType, kwargs: Mapping[str, Any]) -> nn.Module:
    """Makes a model in training mode, from its default configuration with these fields."""
    config = _config(model_type, kwargs)
    import transformers
    from transformers.models.auto import modeling_auto as known

    tables = {  # the auto classes that make trainable models; many types have several
        "AutoModelForSeq2SeqLM": known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "AutoModelForSpeechSeq2Seq": known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        "AutoModelForMaskedLM": known.MODEL_FOR_MASKED_LM_MAPPING,
        "AutoModelForCausalLM": known.MODEL_FOR_CAUSAL_LM_MAPPING,
        "AutoModelForImageClassification": known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    }
    names = [name for name, table in tables.items() if type(config) in table]
    if not getattr(config, "is_encoder_decoder", False):
        names = [name for name in names if "Seq2Seq" not in name]
    if getattr(config, "is_decoder", False):  # an encoder that is configured as a decoder
        names = [name for name in names if name != "AutoModelForMaskedLM"]
    name = next(iter(names), "AutoModel")
    try:
        model: nn.Module = getattr(transformers, name).from_config(config)
    except Exception as error:
        raise ArgumentError(
            f"{model_type}: {name} cannot be made of its configuration: {describe_error(error)}"
        ) from error
    return model.train()


def example_inputs(model: nn.Module, least_batch: int = 1) -> tuple[InputOption, ...]:
    """Returns named shapes for the model's inputs, with at least `least_batch` samples."""
    config, batch = cast(Any, model.config), max(TEXT_BATCH, least_batch)
    wanted: list[Any] = [getattr(model, "main_input_name", "input_ids")]
    if hasattr(config, "vision_config") and hasattr(config, "text_config"):
        wanted = ["input_ids", "pixel_values"]
    if getattr(config, "is_encoder_decoder", False):
        wanted.append("decoder_input_ids")
    try:
        return tuple(InputOption(_input_shape(name, config, batch), name) for name in wanted)
    except (KeyError, AttributeError, TypeError):
        names = " ".join(f"--input {name}=..." for name in wanted)
        raise ArgumentError(
            f"hf:{config.model_type}: fxpipe.inspect knows no example inputs for {type(model).__name__}; give {names}"
        ) from None


def vocabulary_size(model: nn.Module) -> int:
    """Returns the vocabulary size; 2 if the configuration has none."""
    config = _text_config(model.config)
    return max(2, getattr(config, "vocab_size", None) or 2)


def _config(model_type: ModelType, kwargs: Mapping[str, Any]) -> Any:
    try:
        import transformers
    except ImportError:
        raise ArgumentError(f"{model_type} needs transformers: pip install transformers") from None
    transformers.logging.set_verbosity_error()  # no warnings about defaults
    known = list(transformers.CONFIG_MAPPING)
    if (Path(model_type.name) / "config.json").is_file():
        return transformers.AutoConfig.from_pretrained(model_type.name, local_files_only=True, **kwargs)
    if model_type.name not in known:
        close = (
            did_you_mean(model_type.name, known)
            or did_you_mean(model_type.name.partition("-")[0], known)  # a checkpoint: gpt2-medium
            or f"; it has {len(known)}, gpt2, llama, bert, t5 and vit among them"
        )
        raise ArgumentError(f"transformers {transformers.__version__} has no model type {model_type.name!r}{close}")
    try:
        config_class = transformers.CONFIG_MAPPING[model_type.name]
        default = config_class()
        for name in kwargs:
            if not hasattr(default, name) and name not in HIDDEN_CONFIG_FIELDS:
                close = did_you_mean(name, (field for field in default.to_dict() if not field.startswith("_")))
                raise ArgumentError(f"--kwargs: the configuration of {model_type} has no field {name!r}{close}")
        # Training does not return the keys and values that generation caches.
        off = {"use_cache": False} if hasattr(default, "use_cache") else {}
        return config_class(**off | dict(kwargs))
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(f"{model_type}: its configuration raised {describe_error(error)}") from error


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def _input_shape(name: str, config: Any, batch: int) -> InputShape:
    match name:
        case "input_ids" | "decoder_input_ids":
            most = [getattr(_text_config(config), name, None) for name in ("max_position_embeddings", "n_positions")]
            most += [getattr(config, "max_target_positions", None)]
            length = min([TEXT_LENGTH, *(size for size in most if isinstance(size, int) and size > 0)])
            return InputShape((batch, length), "int64")
        case "pixel_values":
            vision = getattr(config, "vision_config", None) or config
            size = getattr(vision, "image_size", 224)
            height, width = size if isinstance(size, (tuple, list)) else (size, size)
            return InputShape((batch, getattr(vision, "num_channels", 3), int(height), int(width)), "float32")
        case "input_features":  # a spectrogram
            return InputShape((batch, config.num_mel_bins, 2 * config.max_source_positions), "float32")
        case "input_values":
            return InputShape((batch, RAW_AUDIO), "float32")
    raise KeyError(name)
