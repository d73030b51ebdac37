"""Targets, `module:factory` and `path/to/file.py:factory`, the user's functions that make models; and their inputs.

Every failure here is an `ArgumentError` of one line.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fxpipe.errors import ArgumentError
from fxpipe.utils.units import did_you_mean, with_article

if TYPE_CHECKING:
    from torch import nn


LONGEST_ERROR = 500  # characters: some errors have long lists


def describe_error(error: BaseException) -> str:
    """Formats an exception in one line: `KeyError: 'width'`."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_ERROR:
        text = f"{text[:LONGEST_ERROR]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# -- Keyword arguments of a command line: `--kwargs depth=4 name=small rate=0.1 flag=true` ---------------------------
#
# A value is JSON (`true`, `null`, `[64, 128]`, `{"a": 1}`) or a Python literal (`True`, `None`, `(3, 3)`). Anything
# else is text, so text needs no quotes.


def parse_keyword(text: str) -> tuple[str, Any]:
    """Parses `depth=4` -> ("depth", 4); `name=small` -> ("name", "small")."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        place = "; TARGET goes before --kwargs" if ":" in text else ""  # argparse took it for a keyword
        raise ArgumentError(f"{text!r}: expected name=value, as in depth=4{place}")
    if re.fullmatch(r"[^,='\"{\[]+(,\s*\w+=[^,]*)+", value):
        raise ArgumentError(f"{text!r}: separate arguments by spaces: {text.replace(',', ' ')}")
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return name, read(value)
    return name, value


def check_keywords(function: Callable[..., Any], called: str, kwargs: Mapping[str, Any]) -> None:
    """Raises `ArgumentError`, with the function's parameters, unless it accepts exactly these keyword arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a C function without a signature: the call checks
        return
    parameters = signature.parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    shown = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    has = f"; it has ({shown})" if shown else "; it has none"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in kwargs:
            if name not in known:
                raise ArgumentError(f"--kwargs: {called} has no parameter {name!r}{did_you_mean(name, known)}{has}")
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [name for name in required if name not in kwargs]
    if missing:
        keywords = " ".join(f"{name}=..." for name in missing)
        raise ArgumentError(f"{called} needs {' and '.join(map(repr, missing))}; give --kwargs {keywords}{has}")


TARGET_FORMS = "module:factory or path/to/file.py:factory"
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Target:
    """The name of an object in a module or in a file."""

    where: str  # a module's name, or a path that ends in .py
    name: str  # may have dots: `Models.small`

    def __str__(self) -> str:
        return f"{self.where}:{self.name}"

    @property
    def is_file(self) -> bool:
        return self.where.endswith(".py")


def parse_target(text: str) -> Target:
    """Parses `models:make` -> `Target("models", "make")`. Splits at the last colon: paths may have colons, too."""
    where, _, name = text.rpartition(":")
    target = Target(where, name)
    if not _is_dotted(name) or not (target.is_file or _is_dotted(where)):
        raise ArgumentError(f"{text!r}: expected {TARGET_FORMS}")
    return target


def load_target(target: Target) -> Any:
    """Imports the target's module, or runs its file, and returns the named object."""
    value: Any = _load_file(Path(target.where)) if target.is_file else _import_module(target.where)
    for part in target.name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise ArgumentError(f"{target.where} has no {target.name!r}{_suggestion(part, value)}") from None
        except Exception as error:  # from a module that imports attributes lazily
            raise ArgumentError(f"loading {target} raised {describe_error(error)}") from error
    return value


def call_target(target: Target, kwargs: Mapping[str, Any] = NO_KWARGS) -> Any:
    function = load_target(target)
    if not callable(function):
        raise ArgumentError(f"{target} is {with_article(function)}, not a function that can be called")
    check_keywords(function, str(target), kwargs)
    try:
        return function(**kwargs)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)  # one if the command itself raised it
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
        raise ArgumentError(f"calling {target} raised {describe_error(error)}{place}") from error


def load_model(target: Target, kwargs: Mapping[str, Any] = NO_KWARGS) -> nn.Module:
    from torch import nn

    value = load_target(target)
    # A target can be a model instead of a factory; calling it would run it.
    is_made = isinstance(value, nn.Module)
    if is_made and kwargs:
        raise ArgumentError(f"--kwargs {next(iter(kwargs))}=...: {target} is a model, not a function that makes one")
    model = value if is_made else call_target(target, kwargs)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{target} returned {with_article(model)}, expected a torch.nn.Module")
    return model


def _import_module(name: str) -> ModuleType:
    _put_on_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # Only if the target itself is missing, not a module that it imports.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise ArgumentError(f"importing {name} raised {describe_error(error)}") from error
        close = did_you_mean(name, (path.stem for path in Path.cwd().glob("*.py")))
        looked = "looked in the current directory and where Python looks"
        raise ArgumentError(f"no module named {missing!r} ({looked}){close}") from None


@functools.cache  # a model and its inputs often share a file, which runs once
def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        close = did_you_mean(path.name, (other.name for other in path.parent.glob("*.py")))
        raise ArgumentError(f"no file {str(path)!r}{close}")
    path = path.resolve()
    # As for a script, modules next to the file can be imported. The name has a checksum, so that a file named queue.py
    # does not replace a module.
    _put_on_path(str(path.parent))
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, for example, look up their module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ArgumentError(f"running {path.name} raised {describe_error(error)}") from error
    return module


def _put_on_path(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _suggestion(name: str, holder: object) -> str:
    """Suggests similar names or, if there are none, names that the holder defines."""
    public = [other for other in dir(holder) if not other.startswith("_")]
    close = did_you_mean(name, public)
    if close:
        return close
    # From `__dict__`: attribute access may import modules lazily.
    here, held = getattr(holder, "__name__", None), getattr(holder, "__dict__", {})
    own = [name for name in public if callable(held.get(name)) and getattr(held[name], "__module__", None) == here]
    return f"; it has {', '.join(own[:8])}{', ...' if len(own) > 8 else ''}" if own else ""


INTEGER_DTYPES = ("int64", "int32", "bool")
INPUT_DTYPES = ("float32", "float64", "float16", "bfloat16", *INTEGER_DTYPES)
NAMED_INPUT = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<value>.*)")
SHAPE_TEXT = re.compile(r"(?P<sizes>[1-9]\d*(x[1-9]\d*)*)(:(?P<dtype>\w+))?")
ACCEPTED_INPUTS = (
    f"sizes (8x3x64x64), sizes and a dtype (8x128:int64; {', '.join(INPUT_DTYPES)}), either with the name of an "
    "argument (input_ids=8x128:int64), or a function that makes the inputs "
    f"({TARGET_FORMS.replace('factory', 'make_inputs')})"
)


@dataclass(frozen=True, slots=True)
class InputShape:
    """The shape and dtype of a tensor to draw."""

    sizes: tuple[int, ...]
    dtype: str  # one of `INPUT_DTYPES`

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.sizes))}:{self.dtype}"


@dataclass(frozen=True, slots=True)
class InputOption:
    """An `--input` of the command line: its value, and the argument that it is for."""

    value: InputShape | Target
    name: str | None = None  # name of the argument; None: a positional argument, or a function that returns names

    def __str__(self) -> str:
        return f"{self.value}" if self.name is None else f"{self.name}={self.value}"


class ModelArguments(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def parse_input(text: str) -> InputOption:
    """Parses one `--input`.

    8x3x64x64              ->  InputOption(InputShape((8, 3, 64, 64), "float32"))
    input_ids=8x128:int64  ->  InputOption(InputShape((8, 128), "int64"), "input_ids")
    data:make_batch        ->  InputOption(Target("data", "make_batch"))
    """
    match = NAMED_INPUT.fullmatch(text)
    name, value = (match["name"], match["value"]) if match is not None else (None, text)
    match = SHAPE_TEXT.fullmatch(value)
    if match is not None:
        dtype = match["dtype"] or "float32"
        if dtype not in INPUT_DTYPES:
            raise ArgumentError(f"{text!r}: no dtype {dtype!r}; accepted are {', '.join(INPUT_DTYPES)}")
        return InputOption(InputShape(tuple(int(size) for size in match["sizes"].split("x")), dtype), name)
    try:
        return InputOption(parse_target(value), name)
    except ArgumentError:
        raise ArgumentError(f"{text!r}: expected {ACCEPTED_INPUTS}") from None


def make_arguments(inputs: Iterable[InputOption], *, integers_below: int = 2, on_meta: bool = False) -> ModelArguments:
    """Makes the inputs in order: tensors and tuples are positional arguments, names and dicts keyword arguments."""
    # Floats are drawn from a normal distribution, with a fixed seed. Integers and booleans are 0 or 1, which every
    # embedding accepts, or tokens of a known vocabulary, `integers_below` its size.
    import torch

    generator = None if on_meta else torch.Generator().manual_seed(0)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for option in inputs:
        if isinstance(option.value, Target):
            value = call_target(option.value)
        else:
            shape = option.value
            below = 2 if shape.dtype == "bool" else integers_below
            draw = functools.partial(torch.randint, 0, below) if shape.dtype in INTEGER_DTYPES else torch.randn
            try:
                value = draw(shape.sizes, generator=generator, device="meta" if on_meta else "cpu")
                value = value.to(getattr(torch, shape.dtype))
            except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # too large for memory or an integer
                raise ArgumentError(f"--input {shape}: cannot be made: {describe_error(error)}") from error
        if option.name is not None:
            value = {option.name: value}
        if isinstance(value, torch.Tensor):
            args.append(value)
        elif isinstance(value, tuple):
            args.extend(value)
        elif isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            twice = sorted(kwargs.keys() & value.keys())
            if twice:
                raise ArgumentError(f"--input {option}: argument {twice[0]!r} was given by an --input before it")
            kwargs.update(value)
        else:
            raise ArgumentError(
                f"--input {option}: returned {with_article(value)}; expected a tensor, a tuple of positional "
                "arguments, or a dict of keyword arguments"
            )
    return ModelArguments(tuple(args), kwargs)


# -- `hf:gpt2`: a model type of the installed transformers, with random weights; nothing is downloaded -----------------
#
# The configuration is the type's default, updated with the user's fields (`--kwargs n_layer=4`). The class is a
# language model if the type has one, else a classifier, else the base model. Without inputs of the user some are drawn.

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
