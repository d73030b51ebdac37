"""The shape of a node's tensor in the batch size `b`, and its bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import sympy
import torch

from fxpipe.tracing.dynamic_sizes import Lengths


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of a node, with sizes in the batch size `b`."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> sympy.Expr:
        return sympy.Mul(*self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@functools.lru_cache(maxsize=4096)
def bytes_formula(shapes: tuple[TensorShape, ...]) -> sympy.Expr:
    return sympy.Add(*(shape.bytes for shape in shapes))


@functools.lru_cache(maxsize=4096)
def bytes_at(formula: sympy.Expr, batch: sympy.Symbol, samples: int, lengths: Lengths = ()) -> int:
    """Computes the bytes for `samples` samples and dynamic sizes `lengths`. Data-dependent sizes count as 0."""
    number = formula.xreplace({batch: sympy.Integer(samples), **{s: sympy.Integer(size) for s, size in lengths}})
    return int(number.subs(dict.fromkeys(number.free_symbols, 0)))
