"""Inputs for a model: `8x3x64x64`, `8x128:int64`, or a function of the user's that makes them.

Sizes alone are float32 and drawn from a normal distribution. Integers and truth values are 0 or 1, which every
embedding accepts. All are drawn from a seed of their own, so that two looks at a model look at the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpipe.errors import ArgumentError
from fxpipe.inspect.target import FORMS, Target, call_target, describe, parse_target

if TYPE_CHECKING:
    import torch

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "bool")
DTYPES = FLOATS + INTEGERS
SHAPE = re.compile(r"(?P<sizes>[1-9]\d*(x[1-9]\d*)*)(:(?P<dtype>\w+))?")
ACCEPTED = (
    f"sizes (8x3x64x64), sizes and a dtype (8x128:int64; {', '.join(DTYPES)}), "
    f"or a function that makes the inputs ({FORMS.replace('factory', 'make_inputs')})"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One tensor, to be drawn."""

    sizes: tuple[int, ...]
    dtype: str  # one of DTYPES

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.sizes))}:{self.dtype}"


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def parse_input(text: str) -> Shape | Target:
    """What one `--input` says.

    8x3x64x64        ->  Shape((8, 3, 64, 64), "float32")
    8x128:int64      ->  Shape((8, 128), "int64")
    data:make_batch  ->  Target("data", "make_batch")
    """
    match = SHAPE.fullmatch(text)
    if match is not None:
        dtype = match["dtype"] or "float32"
        if dtype not in DTYPES:
            raise ArgumentError(f"{text!r}: no dtype {dtype!r}; accepted are {', '.join(DTYPES)}")
        return Shape(tuple(int(size) for size in match["sizes"].split("x")), dtype)
    try:
        return parse_target(text)
    except ArgumentError:
        raise ArgumentError(f"{text!r}: expected {ACCEPTED}") from None


def make_arguments(inputs: Iterable[Shape | Target]) -> Arguments:
    """The inputs in order: tensors and tuples are positional arguments, the items of dicts are keyword arguments."""
    import torch

    generator = torch.Generator().manual_seed(0)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for given in inputs:
        made = _draw(given, generator) if isinstance(given, Shape) else call_target(given)
        if isinstance(made, torch.Tensor):
            args.append(made)
        elif isinstance(made, tuple):
            args.extend(made)
        elif isinstance(made, Mapping) and all(isinstance(name, str) for name in made):
            twice = sorted(kwargs.keys() & made.keys())
            if twice:
                raise ArgumentError(f"--input {given}: argument {twice[0]!r} was given by an --input before it")
            kwargs.update(made)
        else:
            raise ArgumentError(
                f"--input {given}: returned {type(made).__name__}; expected a tensor, a tuple of positional arguments, "
                f"or a dict of keyword arguments"
            )
    return Arguments(tuple(args), kwargs)


def _draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    import torch

    dtype = getattr(torch, shape.dtype)
    try:
        if shape.dtype in INTEGERS:
            return torch.randint(0, 2, shape.sizes, generator=generator).to(dtype)
        return torch.randn(shape.sizes, generator=generator).to(dtype)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # more than there is, or than can be said
        raise ArgumentError(f"--input {shape}: cannot be made: {describe(error)}") from error
