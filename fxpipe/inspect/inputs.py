"""Inputs for a model: `8x3x64x64`, `8x128:int64`, `input_ids=8x128:int64`, or a user's function that makes them.

Sizes without a dtype are float32, drawn from a normal distribution. Integers and booleans are 0 or 1, which every
embedding accepts, or tokens of a known vocabulary. The seed is fixed. On the meta device, tensors have no values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError
from fxpipe.inspect.targets import TARGET_FORMS, Target, call_target, describe_error, parse_target
from fxpipe.utils.units import with_article

if TYPE_CHECKING:
    import torch

FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")
INTEGER_DTYPES = ("int64", "int32", "bool")
INPUT_DTYPES = FLOAT_DTYPES + INTEGER_DTYPES
NAMED_INPUT = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<value>.*)")
SHAPE_TEXT = re.compile(r"(?P<sizes>[1-9]\d*(x[1-9]\d*)*)(:(?P<dtype>\w+))?")
ACCEPTED_INPUTS = (
    f"sizes (8x3x64x64), sizes and a dtype (8x128:int64; {', '.join(INPUT_DTYPES)}), either with the name of an "
    f"argument "
    f"(input_ids=8x128:int64), or a function that makes the inputs ({TARGET_FORMS.replace('factory', 'make_inputs')})"
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


@dataclass(frozen=True, slots=True)
class ModelArguments:
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
    """Makes the inputs in order: tensors and tuples are positional arguments, names and dicts keyword arguments.

    Args:
        integers_below: upper bound of drawn integers, exclusive.
        on_meta: make tensors on the meta device instead of drawing them.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for option in inputs:
        if isinstance(option.value, Target):
            value = call_target(option.value)
        else:
            value = _empty_tensor(option.value) if on_meta else _draw_tensor(option.value, generator, integers_below)
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


def _draw_tensor(shape: InputShape, generator: torch.Generator, integers_below: int) -> torch.Tensor:
    import torch

    dtype = getattr(torch, shape.dtype)
    try:
        if shape.dtype in INTEGER_DTYPES:
            below = 2 if shape.dtype == "bool" else integers_below
            return torch.randint(0, below, shape.sizes, generator=generator).to(dtype)
        return torch.randn(shape.sizes, generator=generator).to(dtype)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # too large for memory, or for an integer
        raise ArgumentError(f"--input {shape}: cannot be made: {describe_error(error)}") from error


def _empty_tensor(shape: InputShape) -> torch.Tensor:
    import torch

    try:
        return torch.empty(shape.sizes, dtype=getattr(torch, shape.dtype), device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ArgumentError(f"--input {shape}: cannot be made: {describe_error(error)}") from error
